"""One of two processes that publish and read shards; prints JSON.

python -m tests.checkpoint.published.mesh_worker FIELDS    (JSON: `processes.together`)
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHAPE = (8, 12)


def values(step: int) -> np.ndarray:
  out = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
  out[step, step:] += step
  return out


def placed(array, mesh, *spec):
  sharding = NamedSharding(mesh, PartitionSpec(*spec))
  return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def main(fields):
  jax.config.update('jax_num_cpu_devices', 2)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(
    fields['coordinator'], fields['processes'], fields['process']
  )
  from m2jax.checkpoint import published

  devices = np.array(jax.devices()).reshape(2, 2)
  learner = Mesh(devices, ('x', 'y'))
  engine = Mesh(devices.T.reshape(4), ('z',))
  follows, wrong = published.Reader(fields['directory']), []
  with published.Publisher(fields['directory'], full_every=2) as publisher:
    for step in range(1, 5):
      w = values(step)
      tree = {
        'split': placed(w, learner, 'x', 'y'),
        'copied': placed(w, learner, None, 'x'),
      }
      wrote = publisher.publish(tree, step)
      like = {
        'split': placed(w, engine, None, 'z'),
        'copied': placed(w, engine, 'z', None),
      }
      for reader in (follows, published.Reader(fields['directory'])):
        found = reader.load(wrote.version, like)
        for name, leaf in found.items():
          if leaf.sharding != like[name].sharding:
            wrong.append(f'{step} {name} placement')
          for shard in leaf.addressable_shards:
            if np.asarray(shard.data).tobytes() != w[shard.index].tobytes():
              wrong.append(f'{step} {name} {shard.index}')
  if fields['process'] == 1:  # process 0 does not: nobody waits for it
    published.Reader(fields['directory']).load(wrote.version, like)
  held = sum(a.nbytes for parts in follows._held.values() for _, a in parts)
  print(json.dumps({'wrong': wrong, 'held_bytes': held}), flush=True)


if __name__ == '__main__':
  main(json.loads(sys.argv[1]))
