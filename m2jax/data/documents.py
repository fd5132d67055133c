"""Documents, and operations on sources of documents: select, join, encode.

A source is anything with `len` and integer indexing (grain's random-access data
source), and optionally a `fingerprint`, so that a saved position raises an error if the
data have changed. `text_files.TextFiles` and the classes of `record_files` are sources
of `Document`s; `Encoded` converts one to token arrays, for `packing.DocumentRows`.
Sources read a document only when it is indexed.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Document(NamedTuple):
  """One text.

  Attributes:
    text: the whole text.
    name: a path, or a file and a row; unique in its source.
    fields: the other fields of its record, such as language or repository.
  """

  text: str
  name: str
  fields: Mapping[str, Any] = {}


def fingerprint(*parts: Any) -> str:
  """A hash of 16 hex digits over parts: texts, numbers or arrays."""
  digest = hashlib.sha256()
  for part in parts:
    data = part.tobytes() if isinstance(part, np.ndarray) else str(part).encode()
    digest.update(b'%d:' % len(data) + data)
  return digest.hexdigest()[:16]


def fingerprint_of(source: Sequence[Any]) -> str | None:
  """The fingerprint of a source, if it has one."""
  return getattr(source, 'fingerprint', None)


class Subset(Sequence):
  """Some items of a source, in the given order; indices may repeat."""

  def __init__(self, source: Sequence[Any], indices: Iterable[int]):
    self._source = source
    self._indices = np.asarray(list(indices), np.int64)
    self.fingerprint = fingerprint(fingerprint_of(source), self._indices)

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> Any:
    return self._source[int(self._indices[index])]


class Chain(Sequence):
  """The concatenation of several sources."""

  def __init__(self, sources: Sequence[Sequence[Any]]):
    self._sources = list(sources)
    self._ends = np.cumsum([len(source) for source in self._sources])
    self.fingerprint = fingerprint(*map(fingerprint_of, self._sources), self._ends)

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def __getitem__(self, index: int) -> Any:
    index = range(len(self))[index]
    part = int(np.searchsorted(self._ends, index, side='right'))
    start = int(self._ends[part - 1]) if part else 0
    return self._sources[part][index - start]


class Joined(Sequence):
  """Groups of documents, each as one long document.

  The text is the members' texts joined by `separator`; name and fields are those of the
  first member.
  """

  def __init__(
    self,
    source: Sequence[Document],
    groups: Sequence[Sequence[int]],
    separator: str = '\n\n',
  ):
    self._source = source
    self._groups = [tuple(map(int, group)) for group in groups]
    self._separator = separator
    if not all(self._groups):
      raise ValueError('a group of documents to join is empty')
    self.fingerprint = fingerprint(fingerprint_of(source), self._groups, separator)

  def __len__(self) -> int:
    return len(self._groups)

  def __getitem__(self, index: int) -> Document:
    members = [self._source[i] for i in self._groups[index]]
    text = self._separator.join(member.text for member in members)
    return members[0]._replace(text=text)


class Encoded(Sequence):
  """A token array [tokens] int32 per document, encoded when it is indexed."""

  def __init__(
    self, source: Sequence[Document], encode: Callable[[str], Sequence[int]]
  ):
    """`encode` converts a text to ids, including any document separator."""
    self._source, self._encode = source, encode
    self.fingerprint = fingerprint_of(source)

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> np.ndarray:
    return np.asarray(self._encode(self._source[index].text), np.int32)


def held_out(name: str, share: float) -> bool:
  """Whether the document of this name is in the held-out fraction `share` in [0, 1].

  It depends on the name only, so that adding documents does not move others.
  """
  return zlib.crc32(name.encode()) < share * 2**32
