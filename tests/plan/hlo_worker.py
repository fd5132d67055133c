"""Compiles small programs of known collectives on 8 virtual CPU devices; prints JSON.

Its own process: the number of devices is set before jax starts.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

ROWS, WIDTH, TURNS, INNER = 64, 128, 5, 3


def gather_in_a_loop(x, w):
  """A weight in pieces over `a`, gathered in each of TURNS turns."""

  def turn(x, w):
    whole = lax.all_gather(w, 'a', axis=0, tiled=True)
    return jnp.tanh(x @ whole), None

  x, _ = lax.scan(turn, x, w)
  return lax.psum(jnp.sum(x), ('a', 'b'))


def nested(x, w):
  """A permutation in a loop in a loop."""
  links = [(i, (i + 1) % 4) for i in range(4)]

  def inner(_, x):
    return lax.ppermute(x, 'a', links) * 2

  def outer(x, w):
    return lax.fori_loop(0, INNER, inner, x) + w[0, 0], None

  return lax.psum(jnp.sum(lax.scan(outer, x, w)[0]), ('a', 'b'))


def exchange(x, w):
  """An all-to-all and a reduce-scatter over `b`."""
  x = lax.all_to_all(x, 'b', 1, 0, tiled=True)
  x = x @ w[0, :, : x.shape[1]].T
  x = lax.psum_scatter(x, 'b', scatter_dimension=0, tiled=True)
  return lax.psum(jnp.sum(x), ('a', 'b'))


PROGRAMS = {
  'gather_in_a_loop': gather_in_a_loop,
  'nested': nested,
  'exchange': exchange,
}


def main(names):
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 8)
  from m2jax.plan import collectives, hlo

  mesh = jax.make_mesh((4, 2), ('a', 'b'), (AxisType.Auto,) * 2)
  x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
  w = jax.ShapeDtypeStruct((TURNS, WIDTH, WIDTH), jnp.float32)
  for name in names:
    specs = (P(('a', 'b')), P(None, 'a'))
    mapped = jax.shard_map(
      PROGRAMS[name], mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
    )
    f = jax.grad(mapped, argnums=1) if name == 'gather_in_a_loop' else mapped
    compiled = jax.jit(f).lower(x, w).compile()
    found = collectives.find(hlo.parse(compiled.as_text()), 8)
    rows = [[c.kind, c.bytes, sorted(c.group), c.times, c.asynchronous] for c in found]
    print(json.dumps({'case': name, 'found': rows}), flush=True)


if __name__ == '__main__':
  main(sys.argv[1:] or PROGRAMS)
