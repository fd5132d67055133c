"""Runs cases of test_mesh.py over virtual CPU devices; prints JSON, one line a case.

python -m tests.sharding.mesh_worker NAME…
(of CASES; steps:, update: or resume:OPTIMIZER)

A line has the largest relative error of any gradient, metric or load against one
device, and the collectives of the compiled program as [operation, [shape, …]].
"""

import dataclasses
import functools
import json
import math
import re
import sys
import tempfile
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from m2jax import model, platforms, sharding
from m2jax.checkpoint import CheckpointManager
from m2jax.moe import exchange as exchange_lib
from m2jax.moe import experts, tiled
from m2jax.optim import optimizer as optimizer_lib
from m2jax.train import step as train_step
from tests import quick
from tests.sharding import small

_COLLECTIVE = re.compile(
  r' = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)'
  r'(?:-start)?\(.*?replica_groups=(mesh\[.*?\] \{.*?\}|\{\{.*?\}|\[[\d,]*\])'
)
ROWS = 8


@dataclasses.dataclass(frozen=True)
class Case:
  """A mesh, how tokens reach experts, what is unusual about the model, how experts are
  computed: as on TPU and GPU ('grouped') or as on CPU ('tiled'), and by how much the
  buffer of an exchange exceeds the mean."""

  mesh: dict[str, Any]
  dispatch: str | None = None
  model: dict[str, Any] = dataclasses.field(default_factory=dict)
  experts: str = 'grouped'
  exchange_factor: float = 1.25


CASES = {
  'all axes': Case(
    dict(data=2, fsdp=2, expert=2, tensor=2, context=2), 'padded', experts='tiled'
  ),
  # long
  'data': Case(dict(data=8, rules='data'), experts='tiled'),
  'fsdp': Case(dict(fsdp=4)),
  'tensor': Case(dict(tensor=4), experts='tiled'),
  'context': Case(dict(context=4), experts='tiled'),
  'expert': Case(dict(expert=4), 'padded'),
  'expert, gathered': Case(dict(expert=4), 'gather'),
  # thorough
  'fsdp expert': Case(dict(fsdp=2, expert=4), 'padded'),
  'tensor context': Case(dict(tensor=2, context=4)),
  'serve': Case(dict(data=2, expert=2, tensor=2, rules='serve')),
  'unrolled': Case(
    dict(fsdp=2, context=2, tensor=2),
    model=dict(unroll_layers=True, remat='attention'),
  ),
  'few experts a device': Case(dict(expert=8), 'padded', exchange_factor=0.4),
  'float32': Case(
    dict(fsdp=2, expert=2, tensor=2),
    'padded',
    dict(dtype='float32', param_dtype='float32', remat='layer'),
  ),
  # no MTP modules: their experts cannot be fixed, and rounding may choose others
  'bfloat16': Case(
    dict(fsdp=4, tensor=2),
    model=dict(dtype='bfloat16', param_dtype='float32', num_mtp_modules=0),
  ),
}


@functools.cache
def variables(cfg):
  """Norms, biases and weights away from their initial values."""
  return quick.variables(cfg, 0, noise=0.1, bias=0.1)


@functools.cache
def reference(cfg):
  """Batch and outcome on one device; float32 and less fix the trunk's expert ids."""
  batch = small.batch(0, ROWS)
  if cfg.dtype != 'float64':
    free = jax.jit(functools.partial(model.forward, cfg))(variables(cfg), batch)
    batch = dataclasses.replace(batch, experts=np.asarray(free.experts))
  return batch, outcome(cfg, sharding.ONE_DEVICE, batch)[0]


def outcome(cfg, where, batch):
  """Gradients, metrics and loads of a batch, and the compiled program's text."""
  config = train_step.StepConfig(micro_rows=ROWS, activation_max=True)
  run = train_step.programs(cfg, optax.sgd(1.0), train_step.nll, config, where).micro
  specs = sharding.param_specs(cfg, where.rules)
  arguments = (
    where.place(variables(cfg), specs),
    where.place(batch, sharding.batch_specs(where.rules)),
  )
  compiled = run.lower(*arguments).compile()
  return jax.device_get(compiled(*arguments)), compiled.as_text()


def relative_errors(got, want) -> dict[str, float]:
  """‖got − want‖₂ / ‖want‖₂ of each leaf."""
  pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
  errors = {}
  for (path, a), b in pairs:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12)
    errors[jax.tree_util.keystr(path)] = float(error)
  return errors


def collectives(hlo: str) -> list[tuple[str, list[str]]]:
  """Those between two devices or more: XLA for CPU keeps sums over groups of one."""
  found = []
  for shapes, operation, groups in _COLLECTIVE.findall(hlo):
    if group_size(groups) > 1:
      found.append((operation, re.findall(r'[a-z]+\d+\[[\d,]*\]', shapes)))
  return found


def group_size(groups: str) -> int:
  """Devices of a replica group in one of three notations: mesh['x'=4,'y'=2] {'x'},
  {{0,1},{2,3}} (cut after the first group) and [groups,size]<=…."""
  if groups.startswith('mesh'):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups))
    used = re.findall(r"'(\w+)'", groups[groups.index('] {') :])
    return math.prod(int(sizes[axis]) for axis in used)
  numbers = re.findall(r'\d+', groups)
  return len(numbers) if groups.startswith('{') else int(numbers[-1])


def run(case: Case) -> dict[str, Any]:
  cfg = small.config(**case.model)
  where = sharding.make(sharding.MeshConfig(**case.mesh))
  rules = dataclasses.replace(
    where.rules, dispatch=case.dispatch, exchange_factor=case.exchange_factor
  )
  where = dataclasses.replace(where, rules=rules)
  where.check(cfg)
  batch, want = reference(cfg)
  tiles = lambda *arrays_and_matmuls: tiled.experts(*arrays_and_matmuls[:6])
  run = {'grouped': experts.grouped, 'tiled': tiles}[case.experts]
  with mock.patch.object(experts, 'apply', run):
    got, hlo = outcome(cfg, where, batch)
  errors = relative_errors(got, want)
  if cfg.dtype == 'bfloat16':  # a few tokens of the batch, decided by rounding
    errors.pop(".metrics['rerouted']")
  worst = max(errors, key=errors.get)
  return {
    'leaves': len(errors),
    'worst': [worst, errors[worst]],
    'loads': relative_errors(got[2], want[2]),
    'collectives': collectives(hlo),
  }


def steps(name: str) -> dict[str, Any]:
  """Two optimizer steps of two micro-batches each, from the seed on."""
  cfg = small.config()
  settings = small.optimizer(name)
  config = train_step.StepConfig(micro_rows=4, bias_update_rate=1e-2)

  def train(where):
    optimizer = optimizer_lib.make(settings, cfg, where)
    step = train_step.make_step(cfg, optimizer, train_step.nll, config, where)
    start = optimizer_lib.initializer(settings, cfg, where)
    state = train_step.new_state(cfg, optimizer, jax.random.key(0), where, start)
    for number in range(2):
      batch = small.batch(number, ROWS)
      state, metrics = step(state, batch)
    return state, metrics

  where = sharding.make(sharding.MeshConfig(fsdp=2, expert=2, tensor=2))
  got, want = train(where), train(sharding.ONE_DEVICE)
  optimizer = optimizer_lib.make(settings, cfg, where)
  places = where.named(train_step.state_specs(cfg, optimizer, where.rules))
  moved = [
    jax.tree_util.keystr(path)
    for (path, leaf), place in zip(
      jax.tree.leaves_with_path(got[0]), jax.tree.leaves(places), strict=True
    )
    if not leaf.sharding.is_equivalent_to(place, leaf.ndim)
  ]
  errors = relative_errors(jax.device_get(got), jax.device_get(want))
  worst = max(errors, key=errors.get)
  return {'worst': [worst, errors[worst]], 'moved': moved}


def update(name: str) -> dict[str, Any]:
  """Three updates of a block's parameters over 8 devices: errors, and collectives."""
  params, gradients = block()
  found = []
  for where in (sharding.ONE_DEVICE, three_axes()):
    job = Update(name, where, params)
    state, now = job.begin()
    *result, compiled = job.advance(state, now, gradients)
    found.append(jax.device_get(result))
  return {
    **compared(*found),
    'loads': {},
    'collectives': collectives(compiled.as_text()),
  }


def resume(name: str) -> dict[str, Any]:
  """Two updates over 8 devices, a checkpoint, a third over 4 of another mesh: errors
  against three on one device."""
  params, gradients = block()
  one = Update(name, sharding.ONE_DEVICE, params)
  want = one.advance(*one.begin(), gradients)[:3]
  first = Update(name, three_axes(), params)
  now, _, state, _ = first.advance(*first.begin(), gradients[:2])
  other = sharding.make(sharding.MeshConfig(fsdp=4), jax.devices()[:4])
  second = Update(name, other, params)
  like = jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    (state, now),
    other.named((second.state_specs(state), second.specs)),
  )
  with tempfile.TemporaryDirectory() as directory:
    with CheckpointManager(directory) as manager:
      manager.save(2, (state, now))
    with CheckpointManager(directory, read_only=True) as manager:
      state, now = manager.restore(like=like).state
  got = second.advance(state, now, gradients[2:])[:3]
  return {**compared(*jax.device_get((want, got))), 'loads': {}}


def three_axes() -> sharding.Sharding:
  return sharding.make(sharding.MeshConfig(fsdp=2, expert=2, tensor=2))


def block():
  """A block's parameters, one of those that compile alike, and gradients of 3 steps."""
  params = {'layers': dict(variables(small.config())['params']['layers'])}
  for leaf in ('v', 'up', 'attn_norm', 'moe_norm'):
    del params['layers'][leaf]
  rng = np.random.default_rng(0)
  return params, [
    jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    for _ in range(3)
  ]


class Update:
  """An optimizer of a tree of parameters, without a model."""

  def __init__(self, name: str, where: sharding.Sharding, params):
    cfg = small.config()
    self.where, self.params = where, params
    self.tx = optimizer_lib.make(small.optimizer(name), cfg, where)
    every = sharding.param_specs(cfg, where.rules)['params']['layers']
    self.specs = {'layers': {leaf: every[leaf] for leaf in params['layers']}}

  def state_specs(self, state):
    return sharding.like_params(state, self.params, self.specs)

  def begin(self):
    """The optimizer's state and the parameters, placed."""
    now = self.where.place(self.params, self.specs)
    state = jax.jit(self.tx.init)(now)
    return self.where.place(state, self.state_specs(state)), now

  def advance(self, state, now, gradients):
    """Parameters, last updates and state after the gradients; the program."""
    compiled, specs = None, self.state_specs(state)
    for gradient in gradients:
      arguments = self.where.place(gradient, self.specs), state, now
      compiled = compiled or jax.jit(self.tx.update).lower(*arguments).compile()
      updates, state = compiled(*arguments)
      state = self.where.place(state, specs)
      now = self.where.place(optax.apply_updates(now, updates), self.specs)
    return now, updates, state, compiled


def compared(want, got) -> dict[str, Any]:
  """Number of leaves, and the one with the largest relative error."""
  errors = relative_errors(got, want)
  # What the solver leaves, 1e-9 of the direction, is rounding; so is part of the slope
  # between the points that it tried last, which are as near. The next search starts by
  # it, and must find the same.
  rounding = ('residual', 'slope')
  errors = {
    name: error
    for name, error in errors.items()
    if not any(part in name for part in rounding)
  }
  worst = max(errors, key=errors.get)
  return {'worst': [worst, errors[worst]], 'leaves': len(errors)}


def main(names):
  platforms.own_only()
  jax.config.update('jax_enable_x64', True)
  jax.config.update('jax_num_cpu_devices', 32)
  exchange_lib.MIN_ROWS = 1  # so that there is more than one round
  for name in names:
    kind, _, argument = name.partition(':')
    if argument:
      result = {'steps': steps, 'update': update, 'resume': resume}[kind](argument)
    else:
      result = run(CASES[name])
    print(json.dumps({'case': name, **result}), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:])
