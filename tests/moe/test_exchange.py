"""Experts of other devices in rounds: exact for every routing, in bounded buffers."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import sharding
from m2jax.moe import dispatch, exchange
from tests import processes
from tests.jaxprs import equations
from tests.moe import exchange_worker as worker

ROUTINGS = worker.routings()


@functools.cache
def run(*ways):
  """What the worker printed, by method, factor and routing."""
  child = processes.run('tests.moe.exchange_worker', *ways)
  lines = [json.loads(line) for line in child.stdout.splitlines()]
  assert len(lines) == len(ways) // 2 * len(ROUTINGS), child.stderr[-3000:]
  return {(line['method'], line['factor'], line['routing']): line for line in lines}


def found(method, factor, routing):
  """A line of it; the smaller buffers only where they are asked for."""
  ways = ('padded', 0.3) if factor == 0.3 else ('padded', 1.25, 'gather', 1.25)
  return run(*ways)[method, factor, routing]


def rounds(ids, factor):
  """Those of the fullest device, from the definition."""
  received = np.bincount(ids.reshape(-1) // worker.LOCAL, minlength=worker.DEVICES)
  return math.ceil(received.max() / math.ceil(factor * worker.TOKENS * worker.TOP_K))


@pytest.mark.parametrize('routing', ROUTINGS)
@pytest.mark.parametrize('factor', [1.25, pytest.param(0.3, marks=pytest.mark.long)])
def test_exact_for_every_routing(routing, factor):
  """Value and all gradients are one device's and, within rounding, those of `gather`,
  in as many rounds as the fullest device needs and no more."""
  line = found('padded', factor, routing)
  assert max(line['errors'].values()) < 1e-12, line
  assert max(found('gather', 1.25, routing)['errors'].values()) < 1e-12
  assert line['rounds'] == rounds(ROUTINGS[routing], factor)


def test_balanced_needs_one_round():
  """The usual case costs no more than one exchange, the worst case n / factor."""
  assert found('padded', 1.25, 'balanced')['rounds'] == 1
  assert found('padded', 1.25, 'own')['rounds'] == 1
  assert found('padded', 1.25, 'one device')['rounds'] == math.ceil(4 / 1.25)


def programs(devices, tokens=4096, width=8, top_k=8, remat=False):
  """The jaxpr of forward and backward with a ragged all-to-all."""
  abstract = sharding.abstract_mesh(sharding.MeshConfig(expert=devices))
  rules = dataclasses.replace(sharding.PRESETS['fsdp_ep'], dispatch='ragged')
  where = sharding.Sharding(abstract, rules)

  def loss(x, weights, gate, up, down, ids):
    run = functools.partial(dispatch.apply, sharding=where)
    return jnp.sum(run(x, ids, weights, gate, up, down))  # as added to a residual

  split = rules.spec('rows', 'experts')
  grads = jax.grad(jax.checkpoint(loss) if remat else loss, argnums=(0, 1, 2, 3, 4))
  run = where.shard_map(grads, (split,) * 6, split)
  local = 256 // devices
  shapes = [(tokens, width), (tokens, top_k), *[(local, width, 4)] * 2]
  shapes += [(local, 4, width)]
  arrays = [
    jax.ShapeDtypeStruct((devices * first, *rest), jnp.float32)
    for first, *rest in shapes
  ]
  ids = jax.ShapeDtypeStruct((devices * tokens, top_k), jnp.int32)
  return jax.make_jaxpr(run)(*arrays, ids)


@pytest.mark.parametrize('devices', [4, 32])
def test_buffer_does_not_grow_with_devices(devices):
  """1.25·T·k rows are received, whatever n; in the worst case n·T·min(k, El) = n·T·k
  come. Nothing else has more, up to the tiles of the CPU's experts."""
  tokens, width, top_k = 4096, 8, 8
  assignments = tokens * top_k
  shapes = [
    (eqn.primitive.name == 'ragged_all_to_all', out.aval.shape)
    for eqn in equations(programs(devices, tokens, width, top_k).jaxpr)
    for out in eqn.outvars
    if eqn.primitive.name != 'shard_map' and out.aval.shape[1:] == (width,)
  ]
  most = math.ceil(1.25 * assignments)
  assert {shape[0] for sent, shape in shapes if sent} == {most, assignments}
  assert max(shape[0] for _, shape in shapes) <= most + 256 // devices * 256


def test_remat_does_not_exchange_twice():
  """The backward pass needs nothing of the forward pass but its inputs, so that a
  block that is recomputed sends no rows a second time: 2 forward, and backward rows,
  weights and cotangents there, and two gradients back."""
  for remat in (False, True):
    found = equations(programs(4, remat=remat).jaxpr)
    names = [eqn.primitive.name for eqn in found]
    assert names.count('ragged_all_to_all') == 2 + 5, remat


def test_buffer_rows():
  """Bounded by what may come, and not split for less than it is worth."""
  m2 = functools.partial(exchange.buffer_rows, 8192, 8)
  assert m2(32, 8, 1.25) == 1.25 * 8192 * 8
  assert m2(32, 8, 1e9) == 32 * 8192 * 8
  assert m2(2, 1, 1.25) == 2 * 8192
  assert exchange.buffer_rows(16, 8, 32, 8, 1.25) == exchange.MIN_ROWS
  assert exchange.buffer_rows(1, 8, 32, 8, 1.25) == 32 * 8
