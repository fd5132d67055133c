"""Keeps memory that a program on a CPU frees.

XLA's CPU backend allocates a program's temporaries anew in every call. glibc takes
allocations above 32 MB from the kernel and gives them back when they are freed, so that
every step clears the same pages again, a fifth of the CPU time of a small model's step:
`python -m benchmarks.prefix_tree --workloads "verl B" --kinds a f --clock cpu`, with
`--no-keep_memory` and without. mallopt(3) describes the settings.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = -1


def keep_freed() -> bool:
  """From now on freed memory stays with the process, which grows to its largest need.

  Call it before jax starts its threads: those that have an arena of their own by then
  do not take part.

  Returns:
    Whether the C library is glibc, which has the settings.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (OSError, AttributeError):
    return False
  settings = {_M_ARENA_MAX: 1, _M_TRIM_THRESHOLD: _NEVER, _M_MMAP_MAX: 0}
  return all(mallopt(name, value) for name, value in settings.items())
