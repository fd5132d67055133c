"""Child of test_kill: publishes versions until it is killed.

  python -m tests.checkpoint.published.publish_loop DIRECTORY COUNT [KILL_AT KILL_COUNT]

Dies as `tests.checkpoint.save_loop` does. The values of a version follow from its step,
so that a reader can tell a whole one from a mixture. Prints 'published STEP'.
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

from m2jax.checkpoint import published
from tests.checkpoint import save_loop

FULL_EVERY = 3


def variables(step: int):
  """Arrays of which some change at every step, some at some, some never."""
  rng = np.random.default_rng(0)
  w = rng.normal(size=(64, 32)).astype(ml_dtypes.bfloat16)
  w.view(np.uint16)[step % 64, :] ^= np.uint16(step)
  return {
    'params': {'layers': {'q': w, 'o': np.full((3, 5), step // 2, np.float32)}},
    'router': {'layers': np.full((2, 4), step, np.float32)},
    'never': np.arange(6, dtype=np.int32),
  }


def check(found, step: int) -> None:
  """Raises AssertionError unless every bit is that of the step."""
  want = variables(step)
  assert bits(found) == bits(want), step


def bits(tree):
  if isinstance(tree, tuple):
    return tuple(map(bits, tree))
  if isinstance(tree, dict):
    return {name: bits(leaf) for name, leaf in tree.items()}
  array = np.asarray(tree)
  return str(array.dtype), array.shape, array.tobytes()


def main(directory, count, pattern='', kill_count='0'):
  publisher = published.Publisher(directory, full_every=FULL_EVERY)
  latest = published.Reader(directory).latest()
  first = 1 if latest is None else latest.step + 1
  if pattern:
    save_loop.kill_at(pattern, int(kill_count))
  for step in range(first, first + int(count)):
    publisher.publish(variables(step), step)
    print(f'published {step}', flush=True)
  publisher.close()


if __name__ == '__main__':
  main(*sys.argv[1:])
