r"""Record files as sources of documents: JSON lines, Parquet, ArrayRecord.

A record is a mapping with the text in one of its fields. In JSON lines (`.jsonl`) it is
a line, in Parquet (`.parquet`) a row, in ArrayRecord (`.array_record`, read by grain)
a UTF-8 JSON object. Parquet needs pyarrow, an extra: `pip install 'm2jax[parquet]'`.
All sources have random access and are thread-safe: opening a file builds an index of
its lines or row groups, and indexing reads one record. JSON lines with
`training: false` (`m2jax_pipelines.llm`) are skipped, as `data.chats` skips them.
"""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from m2jax.data import documents
from m2jax.data.documents import Document
from m2jax.text import json_lines


class JsonLines(Sequence):
  """One document per line of a file; blank lines and untrained ones are skipped."""

  def __init__(self, path: str | os.PathLike, *, text_field: str = 'text'):
    """Reads the file once to find the start of its lines."""
    self._path, self._text_field = pathlib.Path(path), text_field
    starts, lines, offset, untrained = [], [], 0, 0
    with open(self._path, 'rb') as file:
      for number, line in json_lines.lines(file):
        if _untrained(line):
          untrained += 1
        elif line.strip():
          starts.append(offset)
          lines.append(number)
        offset += len(line)
    if untrained:
      logging.warning(
        '%s: %d lines with training: false are skipped', self._path, untrained
      )
    self._starts, self._lines = np.array(starts, np.int64), np.array(lines, np.int64)
    self.fingerprint = documents.fingerprint(self._path.name, offset, self._starts)

  def __len__(self) -> int:
    return len(self._starts)

  def name(self, index: int) -> str:
    """The name of a document, without reading it."""
    return f'{self._path.name}:{self._lines[index]}'

  def __getitem__(self, index: int) -> Document:
    index = range(len(self))[index]
    with open(self._path, 'rb') as file:
      file.seek(int(self._starts[index]))
      line = file.readline(json_lines.MAX_LINE_BYTES)
    return _parse(line, self._text_field, self.name(index), str(self._path))


class ArrayRecords(Sequence):
  """One document per record of an ArrayRecord file, each a UTF-8 JSON object."""

  def __init__(self, path: str | os.PathLike, *, text_field: str = 'text'):
    from grain import sources  # takes 0.5 s, and is only needed here

    self._path, self._text_field = pathlib.Path(path), text_field
    size = self._path.stat().st_size
    self._records = sources.ArrayRecordDataSource(str(self._path))
    self.fingerprint = documents.fingerprint(self._path.name, size, len(self))

  def __len__(self) -> int:
    return len(self._records)

  def name(self, index: int) -> str:
    """The name of a document, without reading it."""
    return f'{self._path.name}:{index}'

  def __getitem__(self, index: int) -> Document:
    index = range(len(self))[index]
    record = self._records[index]
    return _parse(record, self._text_field, self.name(index), str(self._path))


class Parquet(Sequence):
  """One document per row of a Parquet file.

  The latest row group stays in memory: sequential access reads each group once, random
  access reads one per document. If that is too slow, write smaller groups.
  """

  def __init__(self, path: str | os.PathLike, *, text_field: str = 'text'):
    """Reads the file's footer.

    Raises:
      ModuleNotFoundError: pyarrow is not installed.
    """
    try:
      from pyarrow import parquet
    except ModuleNotFoundError as error:
      raise ModuleNotFoundError(
        f"{path}: Parquet needs pyarrow: pip install 'm2jax[parquet]'"
      ) from error
    self._path, self._text_field = pathlib.Path(path), text_field
    self._file = parquet.ParquetFile(self._path)
    metadata = self._file.metadata
    groups = range(metadata.num_row_groups)
    self._ends = np.cumsum([metadata.row_group(g).num_rows for g in groups])
    size = self._path.stat().st_size
    self.fingerprint = documents.fingerprint(self._path.name, size, self._ends)
    self._group, self._rows = -1, None
    self._lock = threading.Lock()  # a ParquetFile crashes if two threads read it

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def name(self, index: int) -> str:
    """The name of a document, without reading it."""
    return f'{self._path.name}:{index}'

  def __getitem__(self, index: int) -> Document:
    index = range(len(self))[index]
    group = int(np.searchsorted(self._ends, index, side='right'))
    with self._lock:
      if group != self._group:
        self._rows, self._group = self._file.read_row_group(group), group
      rows = self._rows
    start = int(self._ends[group - 1]) if group else 0
    (record,) = rows.slice(index - start, 1).to_pylist()
    return _document(record, self._text_field, self.name(index), str(self._path))


READERS: Mapping[str, Callable[..., Sequence[Document]]] = {
  '.jsonl': JsonLines,
  '.parquet': Parquet,
  '.array_record': ArrayRecords,
}


def _untrained(line: bytes) -> bool:
  """Whether a line is a record with `training: false`."""
  if b'"training"' not in line:
    return False
  try:
    record = json_lines.loads(line)
  except ValueError:  # named when it is read
    return False
  return isinstance(record, dict) and record.get('training') is False


def _parse(data: bytes, text_field: str, name: str, path: str) -> Document:
  try:
    record = json_lines.loads(data)
  except ValueError as error:
    raise ValueError(f'{path}: {name} is not a JSON record: {error}') from error
  return _document(record, text_field, name, path)


def _document(record: Any, text_field: str, name: str, path: str) -> Document:
  if isinstance(record, dict) and not isinstance(record.get(text_field, ''), str):
    value = record[text_field]
    what = 'null' if value is None else f'of type {type(value).__name__}'
    raise ValueError(
      f'{path}: {name}: the field {text_field!r} is {what}, not text: leave such '
      'records out'
    )
  if not isinstance(record, dict) or text_field not in record:
    has = ', '.join(map(str, record)) if isinstance(record, dict) else 'no fields'
    raise ValueError(
      f'{path}: {name} has no text in the field {text_field!r}; it has {has}; set '
      'text_field'
    )
  try:
    record[text_field].encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f'{path}: {name}: the field {text_field!r} is not valid Unicode at character '
      f'{error.start}: a lone surrogate'
    ) from None
  fields = {key: value for key, value in record.items() if key != text_field}
  return Document(record[text_field], name, fields)
