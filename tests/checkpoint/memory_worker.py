"""One process of several that start from released weights on one mesh.

  python -m tests.checkpoint.memory_worker ID COUNT PORT SMALL LARGE

Reads SMALL, so that what a first call allocates is there, then LARGE. Prints the bytes
of LARGE that this process holds, the bytes that it read from files, and by how much its
memory was above that before.
"""

import gc
import pathlib
import re
import sys

import jax
import numpy as np

from m2jax import sharding
from m2jax.checkpoint import initial

FSDP = sharding.MeshConfig(data=1, fsdp=4)


def memory(field: str) -> int:
  """A field of this process's status, in bytes."""
  status = pathlib.Path('/proc/self/status').read_text()
  return int(re.search(rf'^{field}:\s+(\d+) kB$', status, re.MULTILINE)[1]) * 1024


def bytes_read() -> int:
  """By this process until now, of files and sockets."""
  return int(re.match(r'rchar: (\d+)', pathlib.Path('/proc/self/io').read_text())[1])


def main():
  process, count, port = map(int, sys.argv[1:4])
  small, large = sys.argv[4:]
  jax.config.update('jax_num_cpu_devices', 4 // count)
  sharding.join(f'127.0.0.1:{port}', count, process)
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()).reshape(1, 4, 1, 1, 1), sharding.MESH_AXES
  )
  placed = sharding.Sharding(mesh, sharding.PRESETS['fsdp_ep'])
  initial.load(small, sharding=placed)
  gc.collect()
  before, read = memory('VmRSS'), bytes_read()
  pathlib.Path('/proc/self/clear_refs').write_text('5')  # the peak starts again
  found = initial.load(large, sharding=placed)
  peak, read = memory('VmHWM') - before, bytes_read() - read
  leaves = jax.tree.leaves(found.variables)
  held = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
  print('held', held, 'read', read, 'peak', peak)


if __name__ == '__main__':
  main()
