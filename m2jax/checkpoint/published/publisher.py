"""The learner's side: writes and announces versions, deletes old ones."""

from __future__ import annotations

import dataclasses
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from m2jax.checkpoint import leaves as leaves_lib
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.checkpoint.published import delta, layout
from m2jax.checkpoint.published.dtypes import dtype_of
from m2jax.checkpoint.published.layout import Version

# Of a process's arrays: (leaf, start of the part) → values.
_Parts = dict[tuple[str, tuple[int, ...]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Published:
  """What `publish` has written.

  Attributes:
    version: its name.
    raw_bytes: size of the arrays.
    whole_bytes: size of the files of the whole version; 0 if it was not written.
    delta_bytes: size of the files of the difference; 0 if there is none.
    values: dtype → [values, changed values, compressed bytes of the difference]; empty
      if there is no difference.
    seconds: time that it took.
  """

  version: Version
  raw_bytes: int
  whole_bytes: int
  delta_bytes: int
  values: Mapping[str, list[int]]
  seconds: float


class Publisher:
  """Writes versions into a directory; one publisher at a time may.

  With several processes all of them make one and call `publish`, in the thread that
  starts their programs. Each has a copy in host memory of what it writes, of the last
  version.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    dtype: str | None = None,
    full_every: int = 16,
    keep_full: int = 2,
  ):
    """Opens a directory; deletes what a killed publisher has left unfinished.

    Args:
      directory: on storage that the readers share: a local path, or a URL that Orbax
        can write.
      dtype: dtype of the activations (`dtype_of`); None publishes the weights as they
        are.
      full_every: every n-th version is also written as a whole.
      keep_full: whole versions to keep, and the differences after the oldest of them.
    """
    for name, value in (('full_every', full_every), ('keep_full', keep_full)):
      if value < 1:
        raise ValueError(f'Publisher.{name}={value}: must be at least 1')
    self._root = layout.root(directory)
    self._dtype, self._full_every, self._keep_full = dtype, full_every, keep_full
    self._several, self._process = jax.process_count() > 1, jax.process_index()
    if self._process == 0:
      self._clear()
    self._barrier('open')
    # After that: the manager does not look at the directory again.
    self._whole = CheckpointManager(layout.whole_dir(self._root), keep=None)
    self._serial = max(layout.serials(self._root), default=0)
    self._since_full = 0
    self._before: _Parts | None = None  # of the last version; None: unknown
    self._placements: dict[str, Any] = {}  # of the last version's leaves

  def publish(self, variables: Any, version: int, lineage: int = 0) -> Published:
    """Writes and announces a version; the arrays may be donated afterwards.

    Args:
      variables: the weights, of any placement.
      version: step of the policy.
      lineage: number of the weights' lineage (`records.Lineages`).

    Raises:
      ValueError: the structure differs from that of the version before.
      FileExistsError: another publisher writes to the directory.
      OSError: the version could not be written, and is not announced.
    """
    started_s = time.monotonic()
    self._serial += 1
    this = Version(self._serial, lineage, version)
    path = layout.version_dir(self._root, this.serial)
    if self._process == 0:
      _claim(path)
    self._barrier(f'claim {this.serial}')
    before, self._before = self._before, None  # unknown if this fails
    table = leaves_lib.table(variables)
    placements = {name: getattr(leaf, 'sharding', None) for name, leaf in table.items()}
    if placements != self._placements and self._several:
      before = None  # a process has other parts of the version before
    self._placements = placements
    whole = before is None or self._since_full + 1 >= self._full_every
    now = self._write_parts(path, table, before, whole)
    if whole:
      self._write_whole(this.serial, table, now)
    self._barrier(f'written {this.serial}')
    if self._process == 0:
      self._announce(path, this, table)
    self._barrier(f'announced {this.serial}')
    self._before = now
    self._since_full = 0 if whole else self._since_full + 1
    if self._process == 0:
      try:
        self._prune()
      except OSError as error:  # the next one tries again
        logging.warning('old versions in %s were not deleted: %s', self._root, error)
    seconds = time.monotonic() - started_s
    return _result(layout.announcement(self._root, this.serial), seconds)

  def close(self) -> None:
    """Stops the threads."""
    self._whole.close()

  def __enter__(self) -> Publisher:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _write_parts(
    self, path: epath.Path, table: Mapping[str, Any], before: _Parts | None, whole: bool
  ) -> _Parts:
    """Writes this process's differences and checksums; returns its host copies."""
    now, me = {}, self._process
    writer = _DeltaWriter() if before is not None else None
    checksums = []
    for name, leaf in table.items():
      for start, array in self._parts(name, leaf):
        old = None if writer is None else before.pop((name, start), None)
        if writer is not None and (old is None or old.shape != array.shape):
          raise ValueError(
            f'{name}: not in the version before, or of another shape: a publisher '
            'needs variables of one structure'
          )
        for box in delta.boxes(array.shape, array.dtype.itemsize):
          at = delta.shifted(box, start)
          if writer is not None:
            writer.add(name, at, old[box], array[box])
          if whole:
            checksums.append(delta.entry(name, at, array[box]))
        now[name, start] = array
        if writer is not None:
          writer.flush(path / f'delta.{me}.bin')
    if writer is not None:
      layout.write(path / f'delta.{me}.json', writer.index())
    if whole:
      layout.write(path / f'whole.{me}.json', delta.encode_index(checksums, {}))
    return now

  def _parts(
    self, name: str, leaf: Any
  ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """(start, values) of what this process writes of a leaf: all, or its shards."""
    dtype = dtype_of(name, leaf, self._dtype)
    if not isinstance(leaf, jax.Array):
      yield (0,) * np.ndim(leaf), np.array(leaf, dtype)
      return
    # On the devices: half the bytes cross to the host. It needs no collective, for
    # which another thread's programs could wait in another order.
    leaf = leaf.astype(dtype)
    if leaf.is_fully_addressable:
      yield (0,) * leaf.ndim, np.array(leaf)
      return
    for shard in leaf.addressable_shards:
      if shard.replica_id == 0:
        yield tuple(s.start or 0 for s in shard.index), np.array(shard.data)

  def _write_whole(self, serial: int, table: Mapping[str, Any], now: _Parts) -> None:
    """Saves the version with Orbax and waits for it."""
    arrays = {name: array for (name, _), array in now.items()}
    if self._several:  # Orbax needs to know which process writes what
      arrays = {
        name: leaf.astype(dtype_of(name, leaf, self._dtype))
        for name, leaf in table.items()
      }
    self._whole.save(serial, leaves_lib.nest(arrays))
    self._whole.wait()

  def _announce(
    self, path: epath.Path, version: Version, table: Mapping[str, Any]
  ) -> None:
    """The step after which the version exists."""
    names = sorted(file.name for file in path.iterdir())
    files = {name: layout.describe(path / name) for name in names}
    deltas = [n for n in names if n.startswith('delta') and n.endswith('.json')]
    counts = [delta.decode_index((path / n).read_bytes())[1] for n in deltas]
    whole = [n for n in names if n.startswith('whole')]
    saved = layout.whole_dir(self._root) / str(version.serial)
    content = {
      **version._asdict(),
      'time_s': time.time(),
      'deltas': [n.removesuffix('.json') for n in deltas],
      'delta_bytes': sum(
        file['size_bytes'] for n, file in files.items() if n.startswith('delta')
      ),
      'whole': whole,
      'whole_bytes': layout.size_bytes(saved) if whole else 0,
      'values': delta.total(counts),
      'leaves': {
        name: [list(leaf.shape), str(dtype_of(name, leaf, self._dtype))]
        for name, leaf in table.items()
      },
      'files': files,
    }
    layout.announce(self._root, content)

  def _clear(self) -> None:
    """Deletes what is not announced: unfinished, or half deleted."""
    announced = set(layout.serials(self._root))
    for parent in (self._root / 'versions', layout.whole_dir(self._root)):
      parent.mkdir(parents=True, exist_ok=True)
      for path in parent.iterdir():
        if path.name.isdigit() and int(path.name) not in announced:
          logging.warning('deleting %s, which is not announced', path)
          path.rmtree()

  def _prune(self) -> None:
    """Deletes the versions before the oldest whole one that is kept."""
    steps = self._whole.steps()
    oldest = steps[-self._keep_full :][0]
    for serial in layout.serials(self._root):
      if serial < oldest:
        path = layout.version_dir(self._root, serial)
        # First, so that nothing announced is incomplete.
        (path / layout.ANNOUNCEMENT).unlink()
        path.rmtree()
    for serial in steps:
      if serial < oldest:
        (layout.whole_dir(self._root) / str(serial)).rmtree()

  def _barrier(self, name: str) -> None:
    if self._several:
      from jax.experimental import multihost_utils

      multihost_utils.sync_global_devices(f'published {name}')


class _DeltaWriter:
  """Collects the differences of a process's boxes and appends them to a file."""

  def __init__(self):
    self._entries: list[delta.Entry] = []
    self._counts: dict[str, list[int]] = {}
    self._payloads: list[bytes] = []
    self._offset = 0

  def add(self, name: str, at: delta.Box, old: np.ndarray, new: np.ndarray) -> None:
    counts = self._counts.setdefault(str(new.dtype), [0, 0, 0])
    counts[0] += new.size
    found = delta.encode(old, new)
    if found is None:
      return
    payload, changed = found
    counts[1] += changed
    counts[2] += len(payload)
    entry = delta.entry(name, at, new)
    self._entries.append(
      dataclasses.replace(
        entry,
        offset=self._offset,
        size=len(payload),
        payload_crc32=zlib.crc32(payload),
      )
    )
    self._offset += len(payload)
    self._payloads.append(payload)

  def flush(self, path: epath.Path) -> None:
    with path.open('ab') as file:
      for payload in self._payloads:
        file.write(payload)
    self._payloads.clear()

  def index(self) -> bytes:
    return delta.encode_index(self._entries, self._counts)


def _claim(path: epath.Path) -> None:
  try:
    path.mkdir()
  except FileExistsError as error:
    raise FileExistsError(
      f'{path} exists: another publisher writes to the directory; end one of them'
    ) from error


def _result(content: Mapping[str, Any], seconds: float) -> Published:
  raw = sum(
    int(np.prod(shape, dtype=np.int64)) * jnp.dtype(dtype).itemsize
    for shape, dtype in content['leaves'].values()
  )
  return Published(
    version=Version(content['serial'], content['lineage'], content['step']),
    raw_bytes=raw,
    whole_bytes=content['whole_bytes'],
    delta_bytes=content['delta_bytes'],
    values=content['values'],
    seconds=seconds,
  )
