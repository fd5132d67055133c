"""Weighted mixtures: the number of copies of each document in an epoch of given size.

The rule up-samples good documents and preserves diversity. Document i has a size n_i
(tokens or bytes), a domain d (its origin), a category c (its topic) and a quality q_i >
0. Let T be the size of the mixture's epoch, w_d the weights of the domains and N = Σ
n_i over the domains of positive weight. The repetition of a document, its expected
number of copies in an epoch, is

  r_i = min(cap, λ · v_i),   v_i = w_d · q_i / Σ_{j in d} n_j q_j,   λ such that
  Σ n_i r_i = T,

A domain's share of the epoch is therefore w_d / Σ w, and within a domain documents are
repeated in proportion to q. No document has more than `cap` copies; the excess goes to
all others in proportion. In addition, every category has a floor, `floor` · T · n_c /
N: a category below it is filled up to it by the same rule over its own documents, and
the other categories share the rest. (The report states that high-quality data were
up-sampled and categories kept diverse, but not how: the rule and its numbers are ours.)

An epoch is drawn by systematic sampling: a document has ⌊r⌋ or ⌈r⌉ copies, and any run
of one category's documents of one domain, in source order, has its sum of r to within
one copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from m2jax.checks import require
from m2jax.data.documents import fingerprint, fingerprint_of


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
  """Parameters of the rule.

  Attributes:
    cap: maximum copies of a document in an epoch.
    floor: minimum share of a category, relative to its natural share; in [0, 1].
    gain: q of the best document over q of the worst; 1 ignores quality.
    epoch: T / N, the size of an epoch relative to every document once.
  """

  cap: float = 4.0
  floor: float = 0.5
  gain: float = 4.0
  epoch: float = 1.0

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.cap > 0, 'cap', 'positive')
    check(0 <= self.floor <= 1, 'floor', 'in [0, 1]')
    check(self.gain >= 1, 'gain', 'at least 1')
    check(0 < self.epoch <= self.cap, 'epoch', f'in (0, cap={self.cap}]')


def quality(ranks: np.ndarray, gain: float) -> np.ndarray:
  """q = gain^rank, rank in [0, 1]: 1 for the worst document, `gain` for the best."""
  return np.asarray(gain, np.float64) ** np.asarray(ranks, np.float64)


def repetitions(
  sizes: Sequence[float],
  domains: Sequence[int],
  categories: Sequence[int],
  qualities: Sequence[float],
  weights: Sequence[float],
  config: MixtureConfig,
) -> np.ndarray:
  """The repetition r of every document, by the rule above.

  Args:
    sizes: [n] positive.
    domains: [n] in [0, len(weights)).
    categories: [n] non-negative.
    qualities: [n] positive.
    weights: the domains' weights, non-negative; a domain of weight 0 is excluded.
    config: cap, floor and epoch.

  Returns:
    [n] float64 in [0, cap], with Σ sizes · r = T unless the cap prevents it.

  Raises:
    ValueError: there are no documents, or a value is out of range.
  """
  sizes = np.asarray(sizes, np.float64)
  domains, categories = np.asarray(domains), np.asarray(categories)
  qualities, weights = np.asarray(qualities, float), np.asarray(weights, float)
  if not len(sizes) or np.any(sizes <= 0) or np.any(qualities <= 0):
    raise ValueError('a mixture needs documents with positive sizes and qualities')
  if np.any(weights < 0) or not np.any(weights[domains] > 0):
    raise ValueError(
      f'domain weights {weights.tolist()}: none may be negative, and at least one '
      'domain with documents must be positive'
    )
  mass = np.bincount(domains, sizes * qualities, len(weights))
  density = weights[domains] * qualities / mass[domains]
  used = density > 0
  natural = np.bincount(categories, np.where(used, sizes, 0.0))
  total = config.epoch * natural.sum()
  floors = config.floor * config.epoch * natural
  pinned = np.zeros(len(natural), bool)
  while True:  # at most one pass per category: pinned ones stay pinned
    free = used & ~pinned[categories]
    found = np.zeros(len(sizes))
    rest = total - floors[pinned].sum()
    found[free] = _fill(density[free], sizes[free], rest, config.cap)
    for category in np.flatnonzero(pinned):
      mine = used & (categories == category)
      found[mine] = _fill(density[mine], sizes[mine], floors[category], config.cap)
    reached = np.bincount(categories, sizes * found, len(natural))
    low = ~pinned & (reached < floors * (1 - 1e-9))
    if not low.any():
      return found
    pinned |= low


def _fill(density, sizes, total: float, cap: float) -> np.ndarray:
  """r = min(cap, λ·density) with Σ sizes · r = total, or r = cap for all."""
  if len(sizes) == 0 or cap * sizes.sum() <= total:
    return np.full(len(sizes), cap)
  order = np.argsort(-density, kind='stable')  # those that reach the cap first
  size, dense = sizes[order], density[order]
  at_cap = cap * (np.cumsum(size) - size)  # of the documents before, all at the cap
  below = np.cumsum((size * dense)[::-1])[::-1]  # of this document and those after
  scale = (total - at_cap) / below
  first = int(np.argmax(scale * dense <= cap))  # the first below the cap
  return np.minimum(cap, max(scale[first], 0.0) * density)


def counts(repetition: np.ndarray, groups: np.ndarray, seed: int) -> np.ndarray:
  """Copies of each document in one epoch, ⌊r⌋ or ⌈r⌉, by systematic sampling.

  Args:
    repetition: [n] r, the mean number of copies of each document.
    groups: [n] any keys; documents of a group are adjacent in the sampling order.
    seed: seed of the one random number.

  Returns:
    [n] int64. The copies of any consecutive documents of one group add up to the sum of
    their r, to within one.
  """
  key = np.array([seed, 0], np.uint64)
  word = int(np.random.Philox(key=key).random_raw(1)[0])
  order = np.argsort(groups, kind='stable')
  # Sum whole copies and remainders separately: a sum of many r would lose small ones.
  whole = np.floor(repetition)
  ends = np.cumsum((repetition - whole)[order]) + word / 2.0**64
  extra = np.diff(np.floor(np.concatenate([[word / 2.0**64], ends])))
  found = whole.astype(np.int64)
  found[order] += extra.astype(np.int64)
  return found


class Mixture(Sequence):
  """A source with `counts[i]` copies of document i of another source, in its order."""

  def __init__(self, source: Sequence[Any], counts: Sequence[int]):
    self._source = source
    self._ends = np.cumsum(np.asarray(counts, np.int64))
    if len(self._ends) != len(source):
      raise ValueError(f'{len(self._ends)} counts for {len(source)} documents')
    self.fingerprint = fingerprint(fingerprint_of(source), self._ends)

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def __getitem__(self, index: int) -> Any:
    index = range(len(self))[index]
    return self._source[int(np.searchsorted(self._ends, index, side='right'))]
