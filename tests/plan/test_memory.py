"""Memory that the plan reports is what specs say and what the compiler allocates."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import pytest

from m2jax import config, sharding
from m2jax.plan import programs, workloads
from m2jax.train import step as train_step
from tests import processes


def lowest(specs, shapes, sizes) -> int:
  """Bytes of a tree by hand: each array's over the devices of the axes in its spec."""
  total = 0
  leaves = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, jax.P))
  for spec, leaf in zip(leaves, jax.tree.leaves(shapes), strict=True):
    axes = [
      a
      for entry in spec
      if entry
      for a in ((entry,) if isinstance(entry, str) else entry)
    ]
    total += (
      math.prod(leaf.shape) * leaf.dtype.itemsize // math.prod(sizes[a] for a in axes)
    )
  return total


@pytest.mark.parametrize(
  'mesh',
  [
    sharding.MeshConfig(data=4, fsdp=128, rules='fsdp'),
    sharding.MeshConfig(fsdp=64, expert=8),
    sharding.MeshConfig(data=8, fsdp=16, tensor=4, rules='fsdp'),
  ],
  ids=['data fsdp', 'fsdp expert', 'data fsdp tensor'],
)
def test_state_of_a_chip_is_the_sum_over_its_specs(mesh):
  """The full model's parameters and Adam's moments, each array by hand. What a chip
  must hold before a step begins decides whether a pod is large enough."""
  cfg = config.m2()
  plan = workloads.PlanConfig(cfg, {})
  rules = sharding.PRESETS[mesh.rules]
  where = sharding.Sharding(sharding.abstract_mesh(mesh), rules)
  state = programs.train_state(plan, where)
  optimizer = programs.optimizer_lib.make(plan.optimizer)
  specs = train_step.state_specs(cfg, optimizer, rules)
  parameters, moments = map(programs.device_bytes, (state.variables, state.opt_state))
  sizes = mesh.sizes
  assert parameters == lowest(specs.variables, state.variables, sizes)
  assert moments == lowest(specs.opt_state, state.opt_state, sizes)
  # fp32, and twice as much for Adam; norms, router biases and counts are on every chip
  assert 2 * parameters - moments < 0.01 * moments
  shards = 512 // mesh.data
  total = sum(math.prod(x.shape) for x in jax.tree.leaves(state.variables['params']))
  assert total > 228_689_764_864
  few = 1.2 if mesh.expert == 1 else 1.6  # dense weights are copied along `expert`
  assert 4 * total / shards <= parameters < few * 4 * total / shards


@pytest.fixture(scope='module')
def compiled():
  child = processes.start('tests.plan.memory_worker')
  ((out, err),) = processes.finish([child])
  lines = [json.loads(line) for line in out.splitlines()]
  assert len(lines) == 4, err[-3000:]
  return {line['name']: line for line in lines}


def test_arguments_are_what_the_compiler_takes(compiled):
  """On one device of eight: parameters, moments and gradients of a step in two passes
  are the compiler's own figures, and what waits for another program is added."""
  micro, add, apply = (compiled[name] for name in ('micro', 'add', 'apply'))
  assert (micro['runs'], add['runs'], apply['runs']) == (2, 1, 1)
  parameters, moments = apply['state']
  gradients = micro['outputs']
  assert apply['arguments'] == apply['expected']
  assert add['arguments'] == add['expected']
  # a pass takes parameters and its forest, of which two arrays are not used
  rows, terms = 1, 48
  assert micro['expected'] - micro['arguments'] == 2 * 4 * rows * terms
  # beside it wait the moments, the step and the sums of the pass before
  assert abs(micro['resident'] - moments - gradients) < 1000
  assert abs(apply['arguments'] - parameters - moments - gradients) < 1000
  assert apply['outputs'] < 2000  # the state takes the place of the old one


def test_saved_activations_are_the_inputs_of_the_layers(compiled):
  """With remat only each block's input waits for the backward pass, and what the router
  reports of each layer: a few numbers a token, beside 128 of the input."""
  cfg, tokens = config.tiny(), 64
  inputs = cfg.num_layers * tokens * cfg.embed_dim * 4
  assert inputs <= compiled['micro']['saved'] < 1.06 * inputs
  assert compiled['apply']['saved'] == 0


def test_several_passes_need_their_sums():
  """One pass holds no sums; the second makes `add` part of the step."""
  mesh = sharding.MeshConfig(data=2, fsdp=4, rules='fsdp')
  where = sharding.Sharding(sharding.abstract_mesh(mesh), sharding.PRESETS['fsdp'])
  load = workloads.Workload('pretrain', 16, 64, meshes=(mesh,))
  model = dataclasses.replace(config.tiny(), unroll_layers=False)
  plan = workloads.PlanConfig(model, {'tiny': load})
  one = programs.train(plan, workloads.place('tiny', load, 8), where)
  twice = dataclasses.replace(load, passes=(2,))
  two = programs.train(plan, workloads.place('tiny', twice, 8), where)
  assert [p.name for p in one] == ['micro', 'apply']
  assert [(p.name, p.runs) for p in two] == [('micro', 2), ('add', 1), ('apply', 1)]
  gradients = programs.device_bytes(two[1].arguments) // 2
  more = programs.device_bytes(two[0].resident) - programs.device_bytes(one[0].resident)
  assert more == gradients


def test_chunks_are_the_learners(compiled):
  """Push, leaf and pop are planned for the arrays that the learner passes when a tree
  in chunks is trained on a mesh: shapes, dtypes and places."""
  assert compiled['chunks']['kinds'] == ['leaf', 'pop', 'push']
  assert compiled['chunks']['differences'] == []
