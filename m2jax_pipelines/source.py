"""A grain data source over the admitted tasks of a dataset."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from m2jax.data import documents
from m2jax.tasks import harbor


class Tasks(Sequence):
  """The tasks of a split, by name: random access, as grain's data sources are.

  Items are `tasks.harbor.HarborTask`s; reading one reads its directory.

  Example:
    >>> import grain, tempfile
    >>> source = Tasks(tempfile.mkdtemp(), 'train')
    >>> dataset = grain.MapDataset.source(source).shuffle(seed=0)
    >>> len(dataset)
    0
  """

  def __init__(self, dataset: str | Path, split: str = 'train'):
    self._root = Path(dataset).resolve() / 'tasks' / split
    self._split = split
    self._names = sorted(
      path.name
      for path in (self._root.iterdir() if self._root.is_dir() else ())
      if not path.name.startswith('.')
    )
    self.fingerprint = documents.fingerprint(split, *self._names)

  def __len__(self) -> int:
    return len(self._names)

  def __getitem__(self, index: int) -> harbor.HarborTask:
    name = self._names[range(len(self))[index]]
    return _task(self._root / name, self._split)


@functools.lru_cache(maxsize=256)
def _task(path: Path, split: str) -> harbor.HarborTask:
  return harbor.of_directory(harbor.read(path), split=split)
