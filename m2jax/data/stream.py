"""An endless, shuffled, resumable order over a random-access source.

The order is a pure function of (seed, epoch, number of items): the state of a stream is
one integer, and any process on any machine continues it identically. A source is
anything with `len` and integer indexing: a list, `text_files.TextFiles`, a grain data
source or a finite `grain.MapDataset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_STATE_VERSION = 1
_CACHED_ORDERS = 2  # parallel token streams enter the next epoch at different times


class StateMismatch(ValueError):
  """A saved position is of other data, another seed or another format."""


class Stream:
  """The items of `source`, over epochs, by position from 0.

  Args:
    source: not empty; must not change during the lifetime of the stream and its states.
    seed: gives each epoch a different permutation; None uses the source's order.
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
    self._orders: dict[int, np.ndarray] = {}  # of the latest epochs

  def index(self, position: int) -> int | None:
    """The index of the item at `position`; None after the last epoch."""
    epoch, at = divmod(position, len(self.source))
    if self.epochs is not None and epoch >= self.epochs:
      return None
    if self.seed is None:
      return at
    if epoch not in self._orders:
      # Raw Philox words are the same in every NumPy; Generator's methods may change.
      key = np.array([self.seed, epoch], np.uint64)
      words = np.random.Philox(key=key).random_raw(len(self.source))
      if len(self._orders) == _CACHED_ORDERS:
        del self._orders[next(iter(self._orders))]
      self._orders[epoch] = np.argsort(words, kind='stable')
    return int(self._orders[epoch][at])

  def identity(self) -> dict[str, Any]:
    """The properties that a saved position depends on; JSON-serialisable."""
    return {
      'version': _STATE_VERSION,
      'seed': self.seed,
      'items': len(self.source),
      'fingerprint': getattr(self.source, 'fingerprint', None),
    }

  def check(self, state: dict[str, Any]):
    """Raises StateMismatch, which lists the differences, if `state` does not match."""
    lines = [
      f'{name}: saved {state.get(name)!r}, now {now!r}'
      for name, now in self.identity().items()
      if state.get(name) != now
    ]
    if lines:
      raise StateMismatch('the saved data position does not match: ' + '; '.join(lines))
