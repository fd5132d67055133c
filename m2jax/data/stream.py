"""An endless, shuffled, resumable order over a random-access source.

The order is a pure function of (seed, epoch, number of items): the state of a stream is
one integer, and any process on any machine continues it alike. A source is anything
with `len` and integer indexing: a list, `text_files.TextFiles`, a grain data source or
a finite `grain.MapDataset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_STATE_VERSION = 1
_ORDERS_KEPT = 2  # lanes side by side pass from one epoch to the next at other times


class StateMismatch(ValueError):
  """A saved position belongs to other data, another seed or another format."""


class Stream:
  """Items of `source`, epoch after epoch, by position from 0.

  Args:
    source: not empty, and unchanged while the stream and its states live.
    seed: each epoch has its own permutation; None keeps the source's order.
    epochs: passes over the source; None is endless.
  """

  def __init__(self, source: Sequence[Any], *, seed: int | None, epochs: int | None):
    if len(source) == 0:
      raise ValueError('the data source has no items')
    if epochs is not None and epochs < 1:
      raise ValueError(f'epochs={epochs}: must be at least 1, or None for no end')
    self.source = source
    self.seed = seed
    self.epochs = epochs
    self._orders: dict[int, np.ndarray] = {}  # of the last epochs asked for

  def index(self, position: int) -> int | None:
    """Which item of the source lies at `position`; None past the last epoch."""
    epoch, at = divmod(position, len(self.source))
    if self.epochs is not None and epoch >= self.epochs:
      return None
    if self.seed is None:
      return at
    if epoch not in self._orders:
      # Raw Philox words are the same in every NumPy; Generator's methods may change.
      key = np.array([self.seed, epoch], np.uint64)
      words = np.random.Philox(key=key).random_raw(len(self.source))
      if len(self._orders) == _ORDERS_KEPT:
        del self._orders[next(iter(self._orders))]
      self._orders[epoch] = np.argsort(words, kind='stable')
    return int(self._orders[epoch][at])

  def identity(self) -> dict[str, Any]:
    """What a saved position is only valid for; JSON-able."""
    return {
      'version': _STATE_VERSION,
      'seed': self.seed,
      'items': len(self.source),
      'fingerprint': getattr(self.source, 'fingerprint', None),
    }

  def check(self, state: dict[str, Any]):
    """Raises StateMismatch, naming what differs, unless `state` is of this stream."""
    lines = [
      f'{name}: saved {state.get(name)!r}, now {now!r}'
      for name, now in self.identity().items()
      if state.get(name) != now
    ]
    if lines:
      raise StateMismatch('the saved data position does not fit: ' + '; '.join(lines))
