"""Near-duplicates by MinHash, and decontamination by runs of words.

A text is the set of its runs of three words; the share of equal MinHash values
estimates the Jaccard similarity of two sets (Broder 1997). `datasketch` has the hashes
and the index.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

_PERMUTATIONS = 128
_RUN_WORDS = 3
_CONTAMINATED_WORDS = 13
_WORD = re.compile(r'\w+|[^\w\s]')


class NearDuplicates:
  """An index of texts by name.

  Args:
    threshold: similarity from which texts are near-duplicates; above 1 nothing is.
  """

  def __init__(self, threshold: float):
    import datasketch

    self._threshold = threshold
    self._hashes = {}
    self._index = None
    if threshold <= 1:
      self._index = datasketch.MinHashLSH(threshold, num_perm=_PERMUTATIONS)

  def find(self, text: str) -> str | None:
    """Name of a text in the index that is a near-duplicate of `text`, or None."""
    if self._index is None or not text:
      return None
    ours = signature(text)
    for name in sorted(self._index.query(ours)):
      if self._hashes[name].jaccard(ours) >= self._threshold:
        return name
    return None

  def add(self, name: str, text: str) -> None:
    """Adds a text."""
    if self._index is not None and text:
      self._hashes[name] = signature(text)
      self._index.insert(name, self._hashes[name])


def signature(text: str):
  """The MinHash of a text."""
  import datasketch

  words = _WORD.findall(text)
  runs = {
    '\0'.join(words[i : i + _RUN_WORDS]).encode()
    for i in range(max(1, len(words) - _RUN_WORDS + 1))
  }
  found = datasketch.MinHash(num_perm=_PERMUTATIONS)
  found.update_batch(sorted(runs))
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
