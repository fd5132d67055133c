"""Documents and what is done to a source of them: choose, join, encode.

A source is anything with `len`, integer indexing and, where a saved position should be
refused when the data have changed, a `fingerprint`: what grain calls a random-access
data source. Sources of `Document`s are `text_files.TextFiles` and those of
`record_files`; `Encoded` makes token arrays of one, for `packing.DocumentRows`. Nothing
is read before it is asked for.
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
    text: all of it.
    name: where it is from, unique in its source: a path, or a file and a row.
    fields: what else its record says (its language, its repository).
  """

  text: str
  name: str
  fields: Mapping[str, Any] = {}


def fingerprint(*parts: Any) -> str:
  """16 hex digits that differ when a part does; parts are texts, numbers or arrays."""
  digest = hashlib.sha256()
  for part in parts:
    data = part.tobytes() if isinstance(part, np.ndarray) else str(part).encode()
    digest.update(b'%d:' % len(data) + data)
  return digest.hexdigest()[:16]


def fingerprint_of(source: Sequence[Any]) -> str | None:
  """A source's own fingerprint, if it has one."""
  return getattr(source, 'fingerprint', None)


class Subset(Sequence):
  """Some items of a source, in the order given; an index may come several times."""

  def __init__(self, source: Sequence[Any], indices: Iterable[int]):
    self._source = source
    self._indices = np.asarray(list(indices), np.int64)
    self.fingerprint = fingerprint(fingerprint_of(source), self._indices)

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> Any:
    return self._source[int(self._indices[index])]


class Chain(Sequence):
  """Several sources as one, one after the other."""

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
  """Groups of documents, each group as one long document.

  Its text is the members' texts, one after the other with `separator` between; its
  name and fields are the first one's.
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
      raise ValueError('a group to join has no documents')
    self.fingerprint = fingerprint(fingerprint_of(source), self._groups, separator)

  def __len__(self) -> int:
    return len(self._groups)

  def __getitem__(self, index: int) -> Document:
    members = [self._source[i] for i in self._groups[index]]
    text = self._separator.join(member.text for member in members)
    return members[0]._replace(text=text)


class Encoded(Sequence):
  """One token array [tokens] int32 a document, encoded when it is asked for."""

  def __init__(
    self, source: Sequence[Document], encode: Callable[[str], Sequence[int]]
  ):
    """Takes a source and `encode`: text to ids, with what separates documents."""
    self._source, self._encode = source, encode
    self.fingerprint = fingerprint_of(source)

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> np.ndarray:
    return np.asarray(self._encode(self._source[index].text), np.int32)


def held_out(name: str, share: float) -> bool:
  """Whether the document of this name is among the `share` in [0, 1] held out.

  It depends on the name only, so that documents that come later move no other one.
  """
  return zlib.crc32(name.encode()) < share * 2**32
