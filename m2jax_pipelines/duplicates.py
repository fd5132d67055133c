"""Near-duplicates by MinHash, and decontamination by runs of words.

Two candidates are near-duplicates if the Jaccard similarity of their features reaches a
threshold (Broder 1997). Features are runs of three words of a text; where statements
come from a template, they are the facts that its tasks differ in. `datasketch` has the
hashes and the index that proposes pairs; the similarity of a pair is exact.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path

_PERMUTATIONS = 128
_RUN_WORDS = 3
# The index should miss few pairs (first weight: of pairs that it proposes wrongly).
_WEIGHTS = (0.01, 0.99)
_CONTAMINATED_WORDS = 13
_WORD = re.compile(r'\w+|[^\w\s]')


class NearDuplicates:
  """An index of sets of features by name.

  Args:
    threshold: similarity from which two are near-duplicates; above 1 nothing is.
  """

  def __init__(self, threshold: float):
    import datasketch

    self._threshold = threshold
    self._sets: dict[str, frozenset[str]] = {}
    self._index = None
    if threshold <= 1:
      self._index = datasketch.MinHashLSH(
        threshold, num_perm=_PERMUTATIONS, weights=_WEIGHTS
      )

  def find(self, features: Collection[str]) -> str | None:
    """Name of a set in the index that is a near-duplicate of `features`, or None."""
    if self._index is None or not features:
      return None
    ours = frozenset(features)
    for name in sorted(self._index.query(_signature(ours))):
      theirs = self._sets[name]
      if len(ours & theirs) >= self._threshold * len(ours | theirs):
        return name
    return None

  def add(self, name: str, features: Collection[str]) -> None:
    """Adds a set."""
    if self._index is not None and features:
      self._sets[name] = frozenset(features)
      self._index.insert(name, _signature(self._sets[name]))


def runs(text: str) -> frozenset[str]:
  """The features of a text: its runs of three words; none of an empty text."""
  words = _WORD.findall(text)
  starts = range(max(1, len(words) - _RUN_WORDS + 1)) if words else ()
  return frozenset('\0'.join(words[i : i + _RUN_WORDS]) for i in starts)


def _signature(features: frozenset[str]):
  import datasketch

  found = datasketch.MinHash(num_perm=_PERMUTATIONS)
  found.update_batch([feature.encode() for feature in features])
  return found


class Contamination:
  """Texts of evaluations; `find` says which one a candidate repeats.

  Args:
    paths: JSON-lines files, gzipped if the name ends with .gz; all strings of a record
      are its text.

  Raises:
    ValueError: a file cannot be read, or a line is not JSON; names it.
  """

  def __init__(self, paths: Iterable[str]):
    self._runs: dict[tuple[str, ...], str] = {}
    for path in paths:
      for number, line in enumerate(_lines(path), 1):
        if not line.strip():
          continue
        try:
          record = json.loads(line)
        except ValueError as error:
          raise ValueError(f'{path}, line {number}: not JSON: {error}') from error
        for run in _long_runs(' '.join(_strings(record))):
          self._runs.setdefault(run, f'{Path(path).name}:{number}')

  def find(self, text: str) -> str | None:
    """The evaluation record that shares a run of 13 words with `text`, or None."""
    if not self._runs:
      return None
    return next((self._runs[r] for r in _long_runs(text) if r in self._runs), None)


def _lines(path: str) -> list[str]:
  try:
    data = Path(path).read_bytes()
    text = (gzip.decompress(data) if path.endswith('.gz') else data).decode()
  except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
    raise ValueError(f'decontaminate: {path}: {error}') from error
  return text.split('\n')


def _long_runs(text: str):
  words = re.findall(r'\w+', text.lower())
  n = _CONTAMINATED_WORDS
  return (tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _strings(value):
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict | list):
    for item in value.values() if isinstance(value, dict) else value:
      yield from _strings(item)
