"""Reads a record for the page: in parts, also while it is written.

Rounds are folded (`fold`) as lines are added; the texts of a round are read again from
their places on request. A line above 8 MiB is left out, and one call reads at most
64 MiB, so that no record makes a page wait long.
"""

from __future__ import annotations

import hashlib
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from m2jax.evolve import record
from m2jax.evolve.page import detail
from m2jax.evolve.page.fold import Fold, Place
from m2jax.text import json_lines
from m2jax.train.workdir import in_use

MAX_LINE_BYTES, PART_BYTES = 8 << 20, 64 << 20
_BLOCK = 1 << 20
_BEGINNING = 128  # bytes that identify a record: they have the time of its first line


class Source:
  """One record; any thread may call it."""

  def __init__(self, workdir: pathlib.Path):
    """Opens it.

    Raises:
      ValueError: the workdir has no record.
    """
    self.workdir, self.title = workdir, workdir.absolute().name
    self._path = workdir / record.FILE_NAME
    if not self._path.is_file():
      raise ValueError(
        f'--workdir={workdir}: no {record.FILE_NAME}; give the workdir of '
        'experiments.evolve'
      )
    self._lock = threading.Lock()
    self._restart('')

  def _restart(self, identity: str) -> None:
    self._identity, self._fold = identity, Fold()
    self._offset = self._line = 0
    self._final: tuple[int, dict[str, Any]] | None = None

  def page(self, after: int = 0, identity: str = '') -> dict[str, Any]:
    """`Fold.summary` with title, status and rows.

    Args:
      after: the number of rows that the caller has.
      identity: that of the record which they are from.

    Returns: also `rows`, those that are missing, of which `first` is the first: all of
      them if the record is another one; and `reading`, the share of the file that is
      read: below 1, ask again.
    """
    with self._lock:
      reading = self._read()
      first = min(after, len(self._fold.rows)) if identity == self._identity else 0
      status = 'live' if in_use(self.workdir) else 'stopped'
      found = self._fold.summary()
      return found | {
        'title': self.title,
        'status': 'finished' if found['sealed'] else status,
        'identity': self._identity,
        'first': first,
        'rows': self._fold.rows[first:],
        'reading': reading,
      }

  def round(self, number: int) -> dict[str, Any] | None:
    """Everything of one round; None if there is none."""
    with self._lock:
      self._read()
      places = self._fold.places.get(number, [])
      if self._fold.begin is None or not places:
        return None
      try:
        if number == 0:
          return detail.start(*self._lines([self._fold.begin]), self._lines(places))
        return detail.of_round(self._lines(places), self._fold.config)
      except (OSError, ValueError):  # another record has just replaced this one
        return None

  def final(self) -> dict[str, Any]:
    """From the start to the incumbent; see `detail.final`."""
    with self._lock:
      self._read()
      keeps = self._fold.keeps
      if self._final is None or self._final[0] != len(keeps):
        kept = []
        for number in keeps:
          lines = self._lines(self._fold.places[number])
          kept += [line for line in lines if line['kind'] == 'proposal'][:1]
        begin = self._lines([self._fold.begin]) if self._fold.begin else [{}]
        same = {'files': begin[0].get('files')}
        last = [line for line in kept if line['round'] == keeps[-1]] or [same]
        self._final = len(keeps), detail.final(begin[0], last[0], kept)
      return self._final[1]

  def _lines(self, places: Sequence[Place]) -> list[Mapping[str, Any]]:
    found = []
    with self._path.open('rb') as file:
      for place in places:
        file.seek(place.offset)
        found.append(json_lines.loads(file.read(place.length)))
    return found

  def _read(self) -> float:
    """Folds what was added, up to `PART_BYTES`; returns the share that is read."""
    try:
      file = self._path.open('rb')
    except FileNotFoundError:  # `--fresh` has just deleted it
      return 1.0
    with file:
      identity = hashlib.sha256(file.read(_BEGINNING)).hexdigest()[:16]
      size = file.seek(0, 2)
      if identity != self._identity or size < self._offset:
        self._restart(identity)
      file.seek(self._offset)
      most = self._offset + PART_BYTES
      while self._offset < min(size, most) and (line := _next(file)) is not None:
        text, length = line
        place = Place(self._offset, length)
        self._offset, self._line = self._offset + length, self._line + 1
        if text is None:
          why = f'longer than {MAX_LINE_BYTES >> 20} MiB'
          self._fold.problem(self._line, why)
          continue
        try:
          value = json_lines.loads(text)
        except ValueError as error:
          self._fold.problem(self._line, f'no JSON: {error}')
          continue
        self._fold.apply(value, place, self._line)
    return 1.0 if self._offset < most else min(self._offset / max(size, 1), 1.0)


def _next(file: BinaryIO) -> tuple[bytes | None, int] | None:
  """The next whole line and its length; its text is None if it is too long."""
  text = file.readline(MAX_LINE_BYTES)
  if text.endswith(b'\n'):
    return text, len(text)
  length, block = len(text), text
  while len(block) and not block.endswith(b'\n'):
    block = file.readline(_BLOCK)
    length += len(block)
  return (None, length) if block else None
