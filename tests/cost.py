"""What two calls cost beside each other, for tests of what a kernel must not do.

The least CPU time of several rounds, the calls taking turns: other work on the machine
delays a call's wall clock by any factor, and one call more than the other.
"""

import time
from collections.abc import Callable

import jax


def ratio(first: Callable, second: Callable, rounds: int = 6) -> float:
  """CPU time of `first()` over that of `second()`, after a round that compiles them."""
  best = [float('inf'), float('inf')]
  for i in range(rounds + 1):
    for which, call in enumerate((first, second)):
      started = time.process_time()
      jax.block_until_ready(call())
      if i:
        best[which] = min(best[which], time.process_time() - started)
  return best[0] / best[1]
