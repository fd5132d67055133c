"""Page faults of a call of a program with 64 MB of temporaries: prints the median.

python -m tests.train.host_memory_worker keep|give_back

The first 20 calls are not counted: the process still grows in some of them, where
a small allocation has split the room that the last call left.
"""

import resource
import statistics
import sys

from m2jax.train import host_memory


def main(keep):
  if keep == 'keep' and not host_memory.keep_freed():
    sys.exit(3)
  import jax
  import jax.numpy as jnp

  f = jax.jit(lambda x, y: (x @ y) @ y.T)
  x, y = jnp.ones((1 << 14, 8)), jnp.ones((8, 1 << 10))

  def call():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(x, y).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

  faults = [call() for _ in range(40)]
  print(statistics.median(faults[20:]))


if __name__ == '__main__':
  main(sys.argv[1])
