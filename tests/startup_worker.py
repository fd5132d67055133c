"""Prints what `m2jax.startup` has done to this process.

python -m tests.startup_worker faults keep|give_back | prepared DEVICES | huge
"""

import ctypes
import os
import pathlib
import re
import resource
import statistics
import sys

from m2jax import startup


def faults(keep: str) -> None:
  """Page faults of a call of a program with 64 MB of temporaries, the median.

  The first 20 calls are not counted: the process still grows in some of them, where
  a small allocation has split the room that the last call left.
  """
  if keep == 'keep' and not startup.keep_freed():
    sys.exit(3)
  import jax
  import jax.numpy as jnp

  f = jax.jit(lambda x, y: (x @ y) @ y.T)
  x, y = jnp.ones((1 << 14, 8)), jnp.ones((8, 1 << 10))

  def call():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(x, y).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

  print(statistics.median([call() for _ in range(40)][20:]))


def prepared(devices: str) -> None:
  """Devices of jax, and the flags of XLA."""
  startup.prepare(int(devices))
  import jax

  print(jax.device_count(), ','.join(os.environ['XLA_FLAGS'].split()))


def huge() -> None:
  """The part of 256 MB, written, that is in huge pages."""
  if not startup.keep_freed():
    sys.exit(3)
  size = 256 << 20
  libc = ctypes.CDLL(None)
  libc.malloc.restype = ctypes.c_void_p
  ctypes.memset(libc.malloc(ctypes.c_size_t(size)), 1, size)
  rollup = pathlib.Path('/proc/self/smaps_rollup').read_text()
  print(int(re.search(r'AnonHugePages: *(\d+) kB', rollup).group(1)) * 1024 / size)


if __name__ == '__main__':
  {'faults': faults, 'prepared': prepared, 'huge': huge}[sys.argv[1]](*sys.argv[2:])
