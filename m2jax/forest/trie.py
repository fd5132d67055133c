"""The trie of token sequences, as their sorted order and shared prefix lengths.

Sorted sequences are in depth-first order of their trie, and the lengths of the prefixes
that neighbours share determine its shape. Sorting compares bytes and reads each token a
few times at most, which is negligible; everything else is linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_BLOCK = 8192  # tokens compared at once


class Trie(NamedTuple):
  """Sequences in depth-first order of their trie.

  Attributes:
    order: [n] the sequences' indices.
    shared: [n] length of the common prefix with the previous one, in sorted order.
    lengths: [n] number of tokens, in sorted order.
  """

  order: np.ndarray
  shared: np.ndarray
  lengths: np.ndarray


def build(tokens: Sequence[np.ndarray]) -> Trie:
  """Sorts int32 sequences and computes shared prefix lengths. The sort is stable."""
  # Big-endian, so that bytes compare like the ids.
  keys = [t.astype('>i4').tobytes() for t in tokens]
  order = np.array(sorted(range(len(keys)), key=keys.__getitem__))
  pairs = zip(order[:-1], order[1:], strict=True)
  shared = [0] + [shared_length(tokens[a], tokens[b]) for a, b in pairs]
  return Trie(order, np.array(shared), np.array([len(tokens[i]) for i in order]))


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
  """Length of the common prefix of two sequences."""
  n = min(len(a), len(b))
  for start in range(0, n, _BLOCK):
    stop = min(start + _BLOCK, n)
    differs = a[start:stop] != b[start:stop]
    first = int(differs.argmax())
    if differs[first]:
      return start + first
  return n


def leaves_through(trie: Trie) -> list[np.ndarray]:
  """Number of root-to-leaf paths through each token, by sequence in sorted order.

  Equal sequences count as separate paths; a sequence that another one continues is not
  a path.
  """
  n = len(trie.order)
  leaf = np.ones(n, bool)
  for i in range(n - 2, -1, -1):
    if trie.shared[i + 1] == trie.lengths[i]:
      leaf[i] = trie.lengths[i + 1] == trie.lengths[i] and leaf[i + 1]
  out = []
  for i, length in enumerate(trie.lengths):
    before = np.minimum.accumulate(trie.shared[i:0:-1])[::-1]
    after = np.minimum.accumulate(trie.shared[i + 1 :])
    reach = np.concatenate([before, [length], after])[leaf]
    out.append(np.bincount(reach, minlength=length + 1)[:0:-1].cumsum()[::-1])
  return out
