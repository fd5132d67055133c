"""The search proposes meshes that exist, fit and are in order."""

from __future__ import annotations

import dataclasses
import math

import pytest

from m2jax import config, sharding
from m2jax.plan import search, workloads
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
  assert found[0].remat != 'none'
  small = dataclasses.replace(PLAN, model=dataclasses.replace(M2, num_layers=1))
  few = dataclasses.replace(LOAD, rows=128)
  (best, *_) = search.candidates(small, 'm2', few, fake.slice_(4, 4, 8))
  assert best.remat == 'none'


def test_nothing_fits():
  """Too small a slice says so, in words a person can act on."""
  with pytest.raises(ValueError, match="'m2': no mesh of 8 devices fits 95 GiB; take"):
    search.candidates(PLAN, 'm2', LOAD, fake.slice_(2, 2, 2))


def test_experts_apart_cost_their_worst_case():
  """Every device of the expert axis may send all its assignments to one: of the memory
  for them a device needs as many times as much as the axis is long."""

  def memory(expert, top_k):
    cfg = dataclasses.replace(M2, experts_per_token=top_k)
    mesh = sharding.MeshConfig(fsdp=128 // expert, expert=expert)
    where = sharding.Sharding(sharding.abstract_mesh(mesh), sharding.PRESETS['fsdp_ep'])
    placed = workloads.Placed('m2', LOAD, mesh, 2)
    one = dataclasses.replace(PLAN, model=cfg)
    return search.formula(one, placed, where, fake.slice_(4, 4, 8))[1]

  alone, apart = (memory(expert, 8) - memory(expert, 2) for expert in (1, 4))
  assert alone > 6 * 8192 * M2.embed_dim * 2
  assert apart == pytest.approx(4 * alone)


def test_meshes_split_the_torus():
  """Axes that are no products of whole sides still get a mesh."""
  config_ = sharding.MeshConfig(data=4, fsdp=32, rules='fsdp')
  mesh = sharding.make_mesh(config_, fake.slice_(4, 4, 8).devices)
  assert mesh.devices.shape == (4, 32, 1, 1, 1)
  assert len({d.id for d in mesh.devices.flat}) == 128
