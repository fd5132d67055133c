"""Recorded expert ids in forest order, with one canonical record per shared token.

Samples that share a token may have different records of it (from another replica or
policy version). The record of a sample that *sampled* the token takes precedence over
those of samples with the token in their prompt; among equals the first sample's does.
It is the same in every row that repeats the token. If all records agree, replay on the
merged forest is exact; `disagreement` measures how often they do not.

Axes: B rows, S tokens in a row, L layers, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from m2jax.forest import trie
from m2jax.forest.types import Sample


class Disagreement(NamedTuple):
  """Frequency of different records among samples that share a token.

  Attributes:
    compared: number of records replaced by another sample's canonical record.
    tokens: number of these whose set of experts differs in some layer.
    choices: (token, layer) pairs with a different set of experts.
    rate: tokens / compared; 0 if nothing was compared.
  """

  compared: int
  tokens: int
  choices: int

  @property
  def rate(self) -> float:
    return self.tokens / max(self.compared, 1)


def disagreement(samples: Sequence[Sample]) -> Disagreement:
  """Compares every record of a shared token with the canonical one, as sets."""
  tokens = [np.asarray(s.tokens, np.int32) for s in samples]
  recorded = [_recorded(s) for s in samples]
  compared = different = choices = 0
  for index, source in zip(*_sources(samples, trie.build(tokens)), strict=True):
    given = samples[index].experts
    if given is None:
      continue
    other = recorded[index] & (source != index)
    for start, stop in _runs(np.where(other, source, -1)):
      if not other[start]:
        continue
      mine = np.sort(given[start:stop], axis=-1)
      theirs = np.sort(samples[source[start]].experts[start:stop], axis=-1)
      differs = np.any(mine != theirs, axis=-1)
      compared += stop - start
      choices += int(np.sum(differs))
      different += int(np.sum(np.any(differs, axis=-1)))
  return Disagreement(compared, different, choices)


def canonical(samples, found: trie.Trie, paths, shape) -> np.ndarray:
  """[B, S, L, k] canonical ids of every token, -1 if none was recorded.

  `paths` has (place, first new token, row index of each token) of every sample in
  sorted order.
  """
  like = next(s.experts for s in samples if s.experts is not None)
  out = np.full((*shape, *like.shape[1:]), -1, np.int32)
  sources = _sources(samples, found)[1]
  for (place, first, path), source in zip(paths, sources, strict=True):
    new = path >= first
    for start, stop in _runs(np.where(new, source, -1)):
      if new[start] and source[start] >= 0:
        to = slice(path[start], path[start] + stop - start)
        out[place.row, to] = samples[source[start]].experts[start:stop]
  return out


def _sources(samples, found: trie.Trie):
  """Sample indices in sorted order, and for each the samples of the canonical records.

  The second list has an array [tokens] of sample indices per sample, -1 if none.
  """
  total = int(np.sum(found.lengths - found.shared))
  source = np.full(total, -1)  # of each node of the trie
  rank = np.full(total, np.iinfo(np.int64).max)  # the lowest is canonical
  path = np.zeros(int(found.lengths.max()), np.int64)  # node of each token
  paths, nodes = [], 0
  for index, shared, length in zip(*map(np.ndarray.tolist, found), strict=True):
    path[shared:length] = np.arange(nodes, nodes + length - shared)
    nodes += length - shared
    here = path[:length].copy()
    paths.append(here)
    if samples[index].experts is None:
      continue
    sampled = np.arange(length) >= samples[index].prompt_length
    mine = np.where(sampled, index, len(samples) + index)
    better = _recorded(samples[index]) & (mine < rank[here])
    source[here[better]] = index
    rank[here[better]] = mine[better]
  return found.order.tolist(), [source[p] for p in paths]


def _recorded(sample: Sample) -> np.ndarray | None:
  """[len(tokens)] bool: whether a token has a record; None without any."""
  if sample.experts is None:
    return None
  return np.any(np.asarray(sample.experts) >= 0, axis=(1, 2))


def _runs(values: np.ndarray):
  """(start, stop) of each run of equal values."""
  cuts = np.flatnonzero(np.diff(values)) + 1
  return zip([0, *cuts.tolist()], [*cuts.tolist(), len(values)], strict=True)
