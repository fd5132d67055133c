"""The search proposes meshes that exist, fit and are in order."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from m2jax import config, forest, model, sharding
from m2jax.optim import optimizer
from m2jax.plan import compile as compile_lib
from m2jax.plan import search, workloads
from m2jax.train import step as train_step
from tests.plan import fake

M2 = config.m2()
LOAD = workloads.Workload('pretrain', 256, 8192)
PLAN = workloads.PlanConfig(M2, {'m2': LOAD})


@pytest.fixture(scope='module')
def found():
  return search.candidates(PLAN, 'm2', LOAD, fake.slice_(4, 4, 8))


def test_candidates_divide_and_fit(found):
  """What the search proposes, the trainer takes."""
  assert len(found) > 20
  for candidate in found:
    mesh = candidate.placed.mesh
    assert math.prod(mesh.sizes.values()) == 128
    where = sharding.Sharding(
      sharding.abstract_mesh(mesh), sharding.PRESETS[mesh.rules]
    )
    where.check(M2)
    where.check_batch(candidate.placed.micro_rows, LOAD.context)
    assert candidate.memory_bytes <= 95 * 2**30


def test_candidates_are_in_order(found):
  """The first is the fastest by the formula, and gathers in whole tiles."""
  seconds = [c.seconds for c in found]
  assert seconds == sorted(seconds)
  for candidate in found:
    mesh = candidate.placed.mesh
    assert M2.embed_dim // (mesh.fsdp * mesh.context) % 8 == 0


def test_remat_is_chosen_where_memory_asks_for_it(found):
  """Without it 62 layers' buffers of routing do not fit."""
  assert found[0].placed.workload.remat != 'none'
  small = dataclasses.replace(PLAN, model=dataclasses.replace(M2, num_layers=1))
  few = dataclasses.replace(LOAD, rows=16)
  (best, *_) = search.candidates(small, 'm2', few, fake.slice_(2, 2, 4))
  assert best.placed.workload.remat == 'none'


def test_nothing_fits():
  """Too small a slice says so, in words a person can act on."""
  with pytest.raises(ValueError, match="'m2': no mesh of 8 devices fits 95 GiB; take"):
    search.candidates(PLAN, 'm2', LOAD, fake.slice_(2, 2, 2))


def test_what_does_not_compile_is_skipped(found, monkeypatch):
  """The search goes on to the next mesh, and fails if none is left."""
  first, too_large, third = found[:3]

  def make(config, placed, topology, store):
    if placed is too_large.placed:
      raise compile_lib.DoesNotCompile('train_step does not compile: out of memory')
    return placed

  monkeypatch.setattr(search.plan, 'make', make)
  slice_ = fake.slice_(4, 4, 8)
  made = list(search.compiled(PLAN, found[:3], slice_))
  assert made == [first.placed, third.placed]
  with pytest.raises(compile_lib.DoesNotCompile, match='out of memory'):
    list(search.compiled(PLAN, [too_large], slice_))


def test_experts_apart_need_the_buffer_of_a_round():
  """What a device receives in one round, and no more, is what it needs memory for:
  1.25 times the mean, however many devices share the experts."""

  def memory(expert, top_k):
    cfg = dataclasses.replace(M2, experts_per_token=top_k)
    mesh = sharding.MeshConfig(fsdp=128 // expert, expert=expert)
    where = sharding.Sharding(sharding.abstract_mesh(mesh), sharding.PRESETS['fsdp_ep'])
    placed = workloads.Placed('m2', LOAD, mesh, 2)
    one = dataclasses.replace(PLAN, model=cfg)
    return search.formula(one, placed, where, fake.slice_(4, 4, 8))[1]

  more = {e: memory(e, 8) - memory(e, 2) for e in (1, 4, 8)}
  assert more[1] > 6 * 8192 * M2.embed_dim * 2
  assert more[4] == pytest.approx(1.25 * more[1])
  assert more[8] == more[4]


def equations(jaxpr, times=1):
  """(equation, its number of runs), those of loops with their lengths."""
  for eqn in jaxpr.eqns:
    yield eqn, times
    length = eqn.params['length'] if eqn.primitive.name == 'scan' else 1
    for value in eqn.params.values():
      for part in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(part, 'jaxpr', part)
        if hasattr(inner, 'eqns'):
          yield from equations(inner, times * length)


def communication(remat, training, split) -> dict[str, int]:
  """Collectives of a block in the traced program: those in its loops over layers."""
  mesh = sharding.MeshConfig(fsdp=2, expert=2, tensor=2)
  rules = dataclasses.replace(sharding.PRESETS['fsdp_ep'], dispatch='ragged')
  if not split:
    rules = dataclasses.replace(rules, residual=None)
  where = sharding.Sharding(sharding.abstract_mesh(mesh), rules)
  cfg = dataclasses.replace(
    config.tiny(), num_layers=3, num_mtp_modules=0, remat=remat, unroll_layers=False
  )
  variables = jax.eval_shape(
    lambda key: train_step.init_variables(cfg, key), jax.random.key(0)
  )
  batch = jax.eval_shape(lambda: forest.causal(jnp.zeros((4, 64), jnp.int32)))
  run = functools.partial(model.forward, cfg, sharding=where)
  if training:
    adam = optimizer.make(optimizer.OptimizerConfig())
    settings = train_step.StepConfig(micro_rows=4)
    run = train_step.programs(cfg, adam, train_step.nll, settings, where).micro
  found = collections.Counter()
  for eqn, times in equations(jax.make_jaxpr(run)(variables, batch).jaxpr):
    axes = eqn.params.get('axis_name', eqn.params.get('axes', ()))
    shape = max((v.aval.shape for v in (*eqn.invars, *eqn.outvars)), default=())
    if times < cfg.num_layers or shape[-1:] != (cfg.embed_dim,):
      continue
    if 'tensor' in axes:
      found[eqn.primitive.name] += times // cfg.num_layers
    elif eqn.primitive.name == 'ragged_all_to_all':
      found['exchange'] += times // cfg.num_layers
  return found


@pytest.mark.parametrize(
  ('remat', 'split'),
  [
    ('layer', True),
    pytest.param('none', True, marks=pytest.mark.long),
    pytest.param('attention', True, marks=pytest.mark.long),
    pytest.param('layer', False, marks=pytest.mark.long),
    pytest.param('none', False, marks=pytest.mark.long),
  ],
)
def test_collectives_of_a_block_are_those_of_its_program(remat, split):
  """The formula's counts, from the step as it is traced: a search that charges
  all-reduces for reduce-scatters, or exchanges that no step has, ranks other meshes."""
  found = communication(remat, True, split)
  n = search.counts(remat, True, split)
  assert found.get('all_gather', 0) == n.gathers
  assert found.get('reduce_scatter', 0) == n.scatters
  assert found.get('psum', 0) == n.sums
  assert found['exchange'] == n.exchanges


def test_collectives_of_a_served_block():
  """Forward alone: two sums, and there and back to the experts."""
  found, n = communication('none', False, False), search.counts('none', False, False)
  assert (found['psum'], found['exchange']) == (n.sums, n.exchanges) == (2, 2)


def test_meshes_split_the_torus():
  """Axes that are no products of whole sides still get a mesh."""
  config_ = sharding.MeshConfig(data=4, fsdp=32, rules='fsdp')
  mesh = sharding.make_mesh(config_, fake.slice_(4, 4, 8).devices)
  assert mesh.devices.shape == (4, 32, 1, 1, 1)
  assert len({d.id for d in mesh.devices.flat}) == 128
