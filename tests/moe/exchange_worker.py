"""Experts over 4 virtual CPU devices, all-to-all in rounds; prints JSON, a line a case.

python -m tests.moe.exchange_worker METHOD FACTOR [METHOD FACTOR…]

One program of each method runs every routing. A line has the method, the routing, the
number of rounds that ran, forward and backward, and the largest error of the output and
of each gradient against `experts.apply` on one device with all tokens and experts.
"""

import collections
import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import platforms, sharding
from m2jax.moe import dispatch, exchange, experts

DEVICES, TOKENS, MODEL, EXPERTS, HIDDEN, TOP_K = 4, 24, 6, 8, 5, 2  # tokens of a device
LOCAL = EXPERTS // DEVICES
NAMES = ('out', 'd_x', 'd_weights', 'd_gate', 'd_up', 'd_down')


def routings():
  """ids [n·T, k] by name, different experts for a token."""
  rng = np.random.default_rng(0)
  tokens = np.arange(DEVICES * TOKENS)[:, None]
  random = np.argsort(rng.random((len(tokens), EXPERTS)))[:, :TOP_K]
  skewed = np.where(rng.random((len(tokens), 1)) < 0.7, [[5, 4]], random)
  return {
    # the mean for every device, and every expert
    'balanced': (TOP_K * tokens + np.arange(TOP_K)) % EXPERTS,
    'random': random,
    'skewed': skewed,
    # one device's two experts get everything: n times the mean
    'one device': np.tile([[7, 6]], (len(tokens), 1)),
    # one expert gets every token, and the second choice is random
    'one expert': np.concatenate([0 * tokens, 1 + random[:, :1] % 7], axis=1),
    # each device only its own experts: nothing crosses
    'own': LOCAL * (tokens // TOKENS) + np.arange(LOCAL),
  }


def tensors():
  """x, weights, gate, up, down, and a cotangent of the output, in float64."""
  rng = np.random.default_rng(1)
  x, d_out = rng.normal(size=(2, DEVICES * TOKENS, MODEL))
  gate, up = rng.normal(size=(2, EXPERTS, MODEL, HIDDEN))
  down = rng.normal(size=(EXPERTS, HIDDEN, MODEL))
  return x, rng.random((len(x), TOP_K)), gate, up, down, d_out


def gradients(run, x, weights, gate, up, down, d_out, ids):
  """The output, and the cotangents of everything but ids under d_out."""
  out, vjp = jax.vjp(
    lambda x, w, *matrices: run(x, ids, w, *matrices), x, weights, gate, up, down
  )
  return out, *vjp(d_out)


def on_mesh(method, factor):
  where = sharding.make(sharding.MeshConfig(expert=DEVICES))
  rules = dataclasses.replace(where.rules, dispatch=method, exchange_factor=factor)
  where = dataclasses.replace(where, rules=rules)
  split = where.rules.spec('rows', 'experts')
  run = functools.partial(dispatch.apply, sharding=where)
  mesh = where.shard_map(functools.partial(gradients, run), (split,) * 7, split)
  return jax.jit(mesh)


def main():
  platforms.own_only()
  jax.config.update('jax_enable_x64', True)
  jax.config.update('jax_num_cpu_devices', DEVICES)
  exchange.MIN_ROWS = 1
  calls = collections.Counter()
  padded = exchange.padded_all_to_all

  def counting(operand, output, **more):
    """Counts the all-to-alls of rows of x that run, on all devices."""
    if operand.shape[1] == MODEL:
      jax.debug.callback(lambda: calls.update(all_to_all=1))
    return padded(operand, output, **more)

  exchange.padded_all_to_all = counting
  arrays = tensors()
  one_device = jax.jit(functools.partial(gradients, experts.apply))
  for method, factor in zip(sys.argv[1::2], map(float, sys.argv[2::2]), strict=True):
    run = on_mesh(method, factor)
    for name, ids in routings().items():
      calls.clear()
      got = jax.block_until_ready(run(*arrays, jnp.asarray(ids, jnp.int32)))
      jax.effects_barrier()
      want = one_device(*arrays, jnp.asarray(ids, jnp.int32))
      errors = {
        key: float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for key, a, b in zip(NAMES, got, want, strict=True)
      }
      # forward there and back; backward two there and one back
      rounds = calls['all_to_all'] / (5 * DEVICES)
      line = dict(method=method, factor=factor, routing=name, rounds=rounds)
      print(json.dumps(line | dict(errors=errors)), flush=True)


if __name__ == '__main__':
  main()
