"""The engine's side: finds, reads and checks versions."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from m2jax.checkpoint import leaves as leaves_lib
from m2jax.checkpoint.errors import (
  CheckpointError,
  CheckpointMismatch,
  CorruptCheckpoint,
  MissingCheckpoint,
)
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.checkpoint.published import delta, layout
from m2jax.checkpoint.published.layout import Version

# What this process has of each leaf: boxes and their values, which never change.
_Held = dict[str, list[tuple[delta.Box, np.ndarray]]]


class Reader:
  """Reads versions of a directory; any number may, while a publisher writes.

  It has a copy in host memory of the last version that it has read, to which the next
  differences apply. Used by one thread. With several processes each has a reader of its
  own, and all have to load the same versions.
  """

  def __init__(self, directory: str | os.PathLike, *, poll_s: float = 0.1):
    """Reads nothing yet; the directory may not exist yet.

    Args:
      directory: see `Publisher`.
      poll_s: seconds between two looks of `wait`.
    """
    self._root, self._poll_s = layout.root(directory), poll_s
    self._held: _Held = {}
    self._serial = 0  # of what is held; 0 is nothing
    self._boxes: dict[str, list[delta.Box]] = {}
    self.read_bytes = 0

  def latest(self) -> Version | None:
    """The newest announced version; None if there is none."""
    for serial in reversed(layout.serials(self._root)):
      try:
        content = layout.announcement(self._root, serial)
      except MissingCheckpoint:  # deleted meanwhile, so there are newer ones
        return self.latest()
      except CorruptCheckpoint as error:
        logging.warning('%s', error)
        continue
      return Version(serial, content['lineage'], content['step'])
    return None

  def versions(self) -> Iterator[Version]:
    """The announced versions that can be read, newest first."""
    for serial in reversed(layout.serials(self._root)):
      try:
        content = layout.announcement(self._root, serial)
      except (MissingCheckpoint, CorruptCheckpoint):
        continue
      yield Version(serial, content['lineage'], content['step'])

  def wait(self, after: Version | None, timeout_s: float) -> Version | None:
    """The newest version once there is one after `after`; None if time runs out."""
    end_s = time.monotonic() + timeout_s
    while True:
      found = self.latest()
      if found is not None and (after is None or found.serial > after.serial):
        return found
      left_s = end_s - time.monotonic()
      if left_s <= 0:
        return None
      time.sleep(min(self._poll_s, left_s))

  def load(self, version: Version, like: Any = None) -> Any:
    """Reads a version, bit for bit as it was published.

    Args:
      version: a result of `latest` or `wait`.
      like: pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes,
        dtypes and, as `.sharding`, the placement of the result (`published.like`).
        numpy leaves give numpy arrays, which are read-only. None gives nested dicts of
        numpy arrays.

    Raises:
      MissingCheckpoint: the version was deleted: take a newer one.
      CheckpointMismatch: `like` does not match; names every differing leaf.
      CorruptCheckpoint: no way to this version can be read.
    """
    content = layout.announcement(self._root, version.serial)
    specs = {
      name: leaves_lib.LeafSpec(tuple(shape), dtype)
      for name, (shape, dtype) in content['leaves'].items()
    }
    if like is None:
      like = leaves_lib.nest(
        {n: np.empty(s.shape, jnp.dtype(s.dtype)) for n, s in specs.items()}
      )
    asked = leaves_lib.table(like)
    have = {name: leaves_lib.spec(leaf) for name, leaf in asked.items()}
    if wrong := leaves_lib.differences(specs, have, partial=False):
      raise CheckpointMismatch(
        f'version {version.serial} in {self._root} does not match what was asked for:'
        f'\n{wrong}'
      )
    boxes = {name: _boxes(leaf) for name, leaf in asked.items()}
    if boxes != self._boxes:
      self._held, self._serial, self._boxes = {}, 0, boxes
    self._held = self._reach(content, asked)
    self._serial = version.serial
    arrays = [_assemble(leaf, self._held[name]) for name, leaf in asked.items()]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)

  def _reach(self, content: Mapping[str, Any], asked: Mapping[str, Any]) -> _Held:
    """The values of a version, by the way with the least to read that is intact."""
    tried, errors = set(), []
    for near in (True, False):  # usually the ways nearby are enough
      for size, start, chain in sorted(self._ways(content, near), key=lambda w: w[:2]):
        if (size, start) in tried:
          continue
        tried.add((size, start))
        try:
          return self._follow(start, chain, asked)
        except CorruptCheckpoint as error:
          logging.warning('%s; trying another way', error)
          errors.append(str(error))
    raise CorruptCheckpoint(
      f'version {content["serial"]} in {self._root} cannot be read: '
      + ('; '.join(errors) or 'no whole version before it, with all differences after')
    )

  def _ways(
    self, content: Mapping[str, Any], near: bool
  ) -> Iterator[tuple[int, int, list[Mapping[str, Any]]]]:
    """(bytes to read, serial to start from, announcements of the differences).

    Args:
      content: the version's announcement.
      near: stop once earlier versions can hardly be less to read.
    """
    chain, size, serial, least = [], 0, content['serial'], None
    while True:
      whole = content['whole_bytes'] if content['whole'] else None
      for cost, possible in ((0, serial == self._serial), (whole, whole is not None)):
        if possible:
          least = size + cost if least is None else min(least, size + cost)
          yield size + cost, serial, list(reversed(chain))
      enough = least is not None and (not self._serial or size >= least)
      if not content['deltas'] or (near and (enough or serial <= self._serial)):
        return
      chain.append(content)
      size += content['delta_bytes']
      serial -= 1
      try:
        content = layout.announcement(self._root, serial)
      except CheckpointError:
        if serial == self._serial:  # what is held needs no announcement
          yield size, serial, list(reversed(chain))
        return

  def _follow(
    self, start: int, chain: list[Mapping[str, Any]], asked: Mapping[str, Any]
  ) -> _Held:
    """Values of version `start`, held or read as a whole, after the differences."""
    if start == self._serial:
      held, own = dict(self._held), set()
    else:
      held, own = self._read_whole(start, asked), set(asked)
    for content in chain:
      for stem in content['deltas']:
        self._apply(content, stem, held, own)
    return held

  def _read_whole(self, serial: int, asked: Mapping[str, Any]) -> _Held:
    manager = CheckpointManager(layout.whole_dir(self._root), read_only=True)
    content = layout.announcement(self._root, serial)
    like = {name: _as_stored(leaf) for name, leaf in asked.items()}
    try:
      state = manager.restore(serial, leaves_lib.nest(like)).state
    except CheckpointError as error:
      raise layout.failed(self._root, serial, str(error)) from error
    held = {
      name: _values(leaf, self._boxes[name])
      for name, leaf in leaves_lib.table(state).items()
    }
    self.read_bytes += content['whole_bytes']
    for name in content['whole']:
      entries, _ = delta.decode_index(layout.read_file(self._root, content, name))
      for entry in entries:
        self._check(serial, entry, held[entry.name])
    return held

  def _apply(
    self, content: Mapping[str, Any], stem: str, held: _Held, own: set[str]
  ) -> None:
    """Applies the differences that one process has written.

    Args:
      own: leaves whose values are not shared and may be changed in place.
    """
    serial = content['serial']
    index = layout.read_file(self._root, content, f'{stem}.json')
    entries, _ = delta.decode_index(index)
    self.read_bytes += len(index)
    path = layout.version_dir(self._root, serial) / f'{stem}.bin'
    try:
      with path.open('rb') as file:
        for entry in entries:
          parts = [
            (box, common)
            for box, _ in held[entry.name]
            if (common := delta.intersection(entry.box, box)) is not None
          ]
          if not parts:
            continue
          xor = _read_box(file, entry, held[entry.name][0][1].dtype)
          self.read_bytes += entry.size
          if entry.name not in own:
            held[entry.name] = [(b, a.copy()) for b, a in held[entry.name]]
            own.add(entry.name)
          by_box = {_bounds(box): array for box, array in held[entry.name]}
          for box, common in parts:
            values = delta.bits(by_box[_bounds(box)])
            inside = delta.shifted(common, [s.start for s in box], -1)
            values[inside] ^= xor[delta.shifted(common, entry.start, -1)]
          self._check(serial, entry, held[entry.name])
    except (OSError, ValueError) as error:
      raise layout.failed(self._root, serial, f'{path.name}: {error}') from error

  def _check(self, serial: int, entry: delta.Entry, parts) -> None:
    """Compares a box with its checksum, in each part that has all of it."""
    for box, array in parts:
      if delta.intersection(entry.box, box) == entry.box:
        inside = delta.shifted(entry.box, [s.start for s in box], -1)
        if delta.crc32(array[inside]) != entry.crc32:
          raise layout.failed(
            self._root, serial, f'{entry.name}: CRC-32 differs from what was published'
          )


def _read_box(file, entry: delta.Entry, dtype) -> np.ndarray:
  file.seek(entry.offset)
  payload = file.read(entry.size)
  if len(payload) != entry.size or zlib.crc32(payload) != entry.payload_crc32:
    raise ValueError(f'the difference of {entry.name} is not what was written')
  shape = [b - a for a, b in zip(entry.start, entry.stop, strict=True)]
  return delta.decode(payload, shape, dtype)


def _whole_box(shape) -> delta.Box:
  return tuple(slice(0, n) for n in shape)


def _bounds(box: delta.Box) -> tuple[tuple[int, int], ...]:
  return tuple((s.start, s.stop) for s in box)


def _placement(leaf: Any) -> jax.sharding.Sharding | None:
  """Where a leaf of `like` goes; None is numpy."""
  if isinstance(leaf, np.ndarray | np.generic):
    return None
  default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return leaf.sharding or default


def _boxes(leaf: Any) -> list[delta.Box]:
  """The parts of a leaf that this process needs: all, or those of its devices."""
  place, shape = _placement(leaf), tuple(leaf.shape)
  if place is None or place.is_fully_addressable:
    return [_whole_box(shape)]
  found = place.addressable_devices_indices_map(shape).values()
  boxes = {_bounds(_normal(index, shape)): _normal(index, shape) for index in found}
  return [boxes[key] for key in sorted(boxes)]


def _normal(index, shape) -> delta.Box:
  return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))


def _as_stored(leaf: Any) -> Any:
  """What to restore for a leaf: numpy, unless other processes have part of it."""
  place = _placement(leaf)
  if place is None or place.is_fully_addressable:
    return np.empty(leaf.shape, leaf.dtype)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _values(leaf: Any, boxes: list[delta.Box]):
  if not isinstance(leaf, jax.Array):
    return [(boxes[0], np.require(leaf, requirements=['C', 'W']))]
  shards = {
    _bounds(_normal(s.index, leaf.shape)): s.data for s in leaf.addressable_shards
  }
  return [(box, np.array(shards[_bounds(box)])) for box in boxes]


def _assemble(leaf: Any, parts) -> Any:
  """The array that was asked for, of this process's parts."""
  place, by_box = _placement(leaf), {_bounds(box): array for box, array in parts}
  for array in by_box.values():
    array.setflags(write=False)
  if place is None:
    return parts[0][1]
  shape = tuple(leaf.shape)
  if place.is_fully_addressable:
    return jax.device_put(parts[0][1], place)
  return jax.make_array_from_callback(
    shape, place, lambda index: by_box[_bounds(_normal(index, shape))]
  )
