"""Append-only records of a pipeline: JSON lines, one per candidate.

A record is written, flushed and synced after the task that it is about is in its place.
So after a kill at any moment a task without a record is incomplete and is removed; a
torn last line is cut off.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERSION = 1
ADMITTED, REJECTED, INVALID = 'admitted', 'rejected', 'invalid'
PASSED = 'passed'  # an earlier stage, such as an environment that was built


class Records:
  """Records in a file; reads those that are there.

  Raises:
    ValueError: a line, other than a torn last one, is not a record; names it.
  """

  def __init__(self, path: Path):
    self.path = path
    self.rows: list[dict[str, Any]] = []
    end = 0
    if path.exists():
      data = path.read_bytes()
      end = data.rfind(b'\n') + 1
      for number, line in enumerate(data[:end].splitlines(), 1):
        try:
          row = json.loads(line)
          if row['version'] != VERSION:
            raise ValueError(f'version {row["version"]}, only {VERSION} is supported')
          self.rows.append(row)
        except (ValueError, KeyError, TypeError) as error:
          raise ValueError(f'{path}, line {number}: not a record: {error!r}') from error
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = open(path, 'ab')
    self._file.truncate(end)

  def append(self, **fields: Any) -> Mapping[str, Any]:
    """Appends a record; it is on disk when this returns."""
    row = {'version': VERSION, 'time': time.time(), **fields}
    self._file.write(json.dumps(row, ensure_ascii=False).encode() + b'\n')
    self._file.flush()
    os.fsync(self._file.fileno())
    self.rows.append(row)
    return row

  def ids(self) -> set[str]:
    """Ids that were decided; those where the machine failed are tried again."""
    return {row['id'] for row in self.rows if row['outcome'] != INVALID}

  def admitted(self) -> list[dict[str, Any]]:
    """Records of admitted tasks."""
    return [row for row in self.rows if row['outcome'] == ADMITTED]

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
  """The records of a file, without opening it to write."""
  rows = []
  if path.exists():
    for line in path.read_bytes().splitlines():
      try:
        rows.append(json.loads(line))
      except ValueError:
        break  # torn
  return rows
