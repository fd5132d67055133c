r"""Files of records as sources of documents: JSON lines, Parquet, ArrayRecord.

A record is a mapping with the text in one of its fields. In JSON lines (`.jsonl`) it is
a line, in Parquet (`.parquet`) a row, in ArrayRecord (`.array_record`, read by grain)
one UTF-8 JSON object. Parquet needs pyarrow, an extra: `pip install 'm2jax[parquet]'`.
All are random access, from any thread: an index of where lines or row groups begin is
made when a file is opened, and a record is read when it is asked for.
"""

from __future__ import annotations

import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from m2jax.data import documents
from m2jax.data.documents import Document


class JsonLines(Sequence):
  """One document a line of one file; blank lines are passed over."""

  def __init__(self, path: str | os.PathLike, *, text_field: str = 'text'):
    """Reads the file once, to know where its lines begin."""
    self._path, self._text_field = pathlib.Path(path), text_field
    starts, lines, offset = [], [], 0
    with open(self._path, 'rb') as file:
      for number, line in enumerate(file, 1):
        if line.strip():
          starts.append(offset)
          lines.append(number)
        offset += len(line)
    self._starts, self._lines = np.array(starts, np.int64), np.array(lines, np.int64)
    self.fingerprint = documents.fingerprint(self._path.name, offset, self._starts)

  def __len__(self) -> int:
    return len(self._starts)

  def name(self, index: int) -> str:
    """The document's name, without reading it."""
    return f'{self._path.name}:{self._lines[index]}'

  def __getitem__(self, index: int) -> Document:
    index = range(len(self))[index]
    with open(self._path, 'rb') as file:
      file.seek(int(self._starts[index]))
      line = file.readline()
    return _parse(line, self._text_field, self.name(index), str(self._path))


class ArrayRecords(Sequence):
  """One document a record of one ArrayRecord file: a UTF-8 JSON object."""

  def __init__(self, path: str | os.PathLike, *, text_field: str = 'text'):
    from grain import sources  # 0.5 s, and only needed here

    self._path, self._text_field = pathlib.Path(path), text_field
    size = self._path.stat().st_size
    self._records = sources.ArrayRecordDataSource(str(self._path))
    self.fingerprint = documents.fingerprint(self._path.name, size, len(self))

  def __len__(self) -> int:
    return len(self._records)

  def name(self, index: int) -> str:
    """The document's name, without reading it."""
    return f'{self._path.name}:{index}'

  def __getitem__(self, index: int) -> Document:
    index = range(len(self))[index]
    record = self._records[index]
    return _parse(record, self._text_field, self.name(index), str(self._path))


class Parquet(Sequence):
  """One document a row of one Parquet file.

  The row group read last stays in memory: documents side by side cost one reading,
  documents in random order one each. Where that is too slow, write smaller groups.
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
    self._lock = threading.Lock()  # a ParquetFile crashes when two threads read it

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def name(self, index: int) -> str:
    """The document's name, without reading it."""
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


def write_array_record(
  path: str | os.PathLike, records: Iterable[Mapping[str, Any]]
) -> None:
  """Writes records as `ArrayRecords` reads them, one to a group for random access."""
  from array_record.python import array_record_module

  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for record in records:
    writer.write(json.dumps(record, ensure_ascii=False).encode())
  writer.close()


def _parse(data: bytes, text_field: str, name: str, path: str) -> Document:
  try:
    record = json.loads(data)
  except ValueError as error:
    raise ValueError(f'{path}: {name} is not a JSON record: {error}') from error
  return _document(record, text_field, name, path)


def _document(record: Any, text_field: str, name: str, path: str) -> Document:
  if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
    has = ', '.join(map(str, record)) if isinstance(record, dict) else 'no fields'
    raise ValueError(
      f'{path}: {name} has no text in its field {text_field!r}; it has {has}'
    )
  fields = {key: value for key, value in record.items() if key != text_field}
  return Document(record[text_field], name, fields)
