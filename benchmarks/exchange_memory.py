"""Memory of M2's experts on many chips, compiled for v5p without one.

  python -m benchmarks.exchange_memory
  python -m benchmarks.exchange_memory --topologies=v5p:4x4x2 --factors=1.25,32 --json

Claim: experts split over more chips need no more memory to exchange rows. Forward and
backward of one block's experts (`moe.dispatch`, 'ragged'), compiled with libtpu for all
chips of a topology as the expert axis. `buffer` is what one device can receive in a
round, `temporaries` what the compiler allocates beside arguments and results.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from m2jax import config, sharding
from m2jax.moe import dispatch, exchange

M2 = config.m2()
GIB = 2**30


def compiled(topology: str, tokens: int, factor: float):
  """One program, the number of chips, and the rows of a buffer."""
  chips = topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
  shape = [len(chips) if axis == 'expert' else 1 for axis in sharding.MESH_AXES]
  rules = dataclasses.replace(
    sharding.PRESETS['fsdp_ep'], dispatch='ragged', exchange_factor=factor
  )
  mesh = Mesh(np.array(chips).reshape(shape), sharding.MESH_AXES)
  where = sharding.Sharding(mesh, rules)

  def one(x, weights, gate, up, down, ids, d_out):
    run = functools.partial(dispatch.apply, sharding=where)
    out, vjp = jax.vjp(lambda x, w, *m: run(x, ids, w, *m), x, weights, gate, up, down)
    return out, vjp(d_out)

  split = rules.spec('rows', 'experts')
  rows, k = tokens * len(chips), M2.experts_per_token
  x, experts = (rows, M2.embed_dim), (M2.num_experts, M2.embed_dim, M2.expert_dim)
  down = (experts[0], experts[2], experts[1])
  shapes = [x, (rows, k), experts, experts, down, (rows, k), x]
  dtypes = [jnp.bfloat16] * 7
  dtypes[1], dtypes[5] = jnp.float32, jnp.int32
  arrays = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split))
    for shape, dtype in zip(shapes, dtypes, strict=True)
  ]
  run = jax.jit(where.shard_map(one, (split,) * 7, split))
  local = M2.num_experts // len(chips)
  buffer = exchange.buffer_rows(tokens, k, len(chips), local, factor)
  return run.lower(*arrays).compile(), len(chips), buffer


def measure(topology: str, tokens: int, factor: float) -> dict:
  program, chips, rows = compiled(topology, tokens, factor)
  memory = program.memory_analysis()
  return dict(
    topology=topology,
    chips=chips,
    tokens=tokens,
    factor=factor,
    buffer_rows=rows,
    buffer_bytes=rows * M2.embed_dim * 2,
    temp_bytes=memory.temp_size_in_bytes,
    exchanges=program.as_text().count(' ragged-all-to-all('),
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n', maxsplit=1)[0])
  parser.add_argument('--topologies', default='v5p:2x2x1,v5p:4x4x2')
  parser.add_argument('--tokens', type=int, default=24576, help='of a device')
  parser.add_argument('--factors', default='1.25', help='of the buffer over the mean')
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5p-8')
  if not args.json:
    print('chips  factor  buffer rows  buffer GiB  temporaries GiB  exchanges')
  for topology in args.topologies.split(','):
    for factor in map(float, args.factors.split(',')):
      found = measure(topology, args.tokens, factor)
      if args.json:
        print(json.dumps(found), flush=True)
        continue
      print(
        f'{found["chips"]:5d} {factor:7.2f} {found["buffer_rows"]:12d} '
        f'{found["buffer_bytes"] / GIB:11.2f} {found["temp_bytes"] / GIB:16.2f} '
        f'{found["exchanges"]:10d}',
        flush=True,
      )


if __name__ == '__main__':
  main()
