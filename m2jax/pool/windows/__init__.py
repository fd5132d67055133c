"""The rule of which completed items the learner may take: `rl.window`.

A rule gives the first index that may not be taken, as a function of the queue
(`WindowConfig.end`); lower ones may be taken, lowest first, as they complete. The head
may always be taken.

  strict   the head alone
  window   the W items from the head on, by default 0.3 N (facts/m2-and-forge.md §4.5)
  greedy   all

A kind is a module with `Config`, a `WindowConfig`: one of this package, an entry point
of the group `m2jax.pool.windows`, or an import path (`m2jax.kinds`). docs/scheduling.md
has an example.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple

from m2jax import kinds

KINDS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


class Queue(NamedTuple):
  """What a rule knows of the queue.

  Attributes:
    head: oldest index that has not retired; next_index if nothing is live.
    next_index: index of the next submission.
    capacity: N.
    age: items taken since the head was submitted, across restarts.
    per_update: items that an update takes, at least (`rl.groups_per_step`).
  """

  head: int
  next_index: int
  capacity: int
  age: int
  per_update: int


@dataclasses.dataclass(frozen=True)
class WindowConfig:
  """A rule with its settings.

  Attributes:
    kind: module that defines it (`m2jax.kinds`).
  """

  kind: str

  def end(self, queue: Queue) -> int | None:
    """The first index that may not be taken, above the head; None: all may."""
    raise NotImplementedError

  def items(self, capacity: int) -> int | None:
    """W, if the rule is always that of a window of W items."""
    return None


# Kinds and their settings as a config has them: W; None is greedy; 'default' is 0.3 N;
# a kind; or a kind with its settings.
Window = int | str | Mapping[str, Any] | WindowConfig | None


def default_window(capacity: int) -> int:
  """W = max(1, ⌊0.3 N⌋), the report's setting (facts/m2-and-forge.md §4.5)."""
  return max(1, 3 * capacity // 10)


def make(window: Window) -> WindowConfig:
  """The rule that a config names.

  Raises:
    ValueError: an unknown kind, or a bad setting.

  Example:
    >>> make(4).end(Queue(head=10, next_index=30, capacity=20, age=0, per_update=1))
    14
  """
  if isinstance(window, WindowConfig):
    return window
  if window is None:
    window = 'greedy'
  elif window == 'default':
    window = 'window'
  elif isinstance(window, int) or (isinstance(window, str) and window.isdecimal()):
    window = dict(kind='window', width=int(window))
  settings = {'kind': window} if isinstance(window, str) else window
  kind = settings.get('kind') if isinstance(settings, Mapping) else None
  if not isinstance(kind, str):
    raise ValueError(
      f'window={window!r}: must be a number of items, None (greedy), a kind '
      f'({", ".join(KINDS)}, or an import path), or a dict with `kind`'
    )
  config = kinds.module(__name__, kind).Config
  known = [field.name for field in dataclasses.fields(config)]
  if unknown := ', '.join(sorted(set(settings) - set(known))):
    has = ', '.join(known)
    raise ValueError(f'window: kind {kind!r} has no field {unknown}; it has {has}')
  return config(**settings)
