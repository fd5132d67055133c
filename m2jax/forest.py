"""Forest: tokens of many prefix trees in depth-first order, the one batch layout.

Laws 1–3 of the design; why merging is exact: facts/algorithms.md §6. Samples are sorted
by their tokens, which is the depth-first order of their trie, so one pass over the
sorted list builds rows, parents and subtree ends.

Axes: B rows, S tokens in a row, M loss terms in a row, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sample:
  """One token sequence and what its response tokens weigh in the loss.

  Attributes:
    tokens: int ids, prompt and response.
    prompt_length: leading tokens without a loss term.
    old_logprobs, advantages, weights, versions: one value per response token, length
      `len(tokens) - prompt_length`; None means 0, 1, 1 and 0. A token of weight 0 has
      no term.
    experts: [len(tokens), L, top_k] recorded expert ids, -1 where not recorded. Where
      samples share a token, the first record of it holds.
  """

  tokens: np.ndarray
  prompt_length: int = 0
  old_logprobs: np.ndarray | None = None
  advantages: np.ndarray | None = None
  weights: np.ndarray | None = None
  versions: np.ndarray | None = None
  experts: np.ndarray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forest:
  """Rows of prefix trees; token j is visible to token i iff `j <= i < subtree_end[j]`.

  Attributes:
    tokens: [B, S] int32.
    position: [B, S] int32, depth from the root: the RoPE index.
    parent: [B, S] int32, index in the row, -1 at a root and on padding.
    subtree_end: [B, S] int32, exclusive; 0 on padding, which sees and is seen by none.
    multiplicity: [B, S] int32, samples of this row that pass through the token.
    term_token: [B, M] int32, index in the row of the token a loss term belongs to.
    old_logprob, advantage, weight: [B, M] float32; weight 0 on padding.
    term_sample, term_offset: [B, M] int32, the sample a term came from and its offset
      in that sample's response; -1 on padding.
    experts: [B, S, L, top_k] int32 recorded expert ids (-1: route freely), or None.
  """

  tokens: np.ndarray
  position: np.ndarray
  parent: np.ndarray
  subtree_end: np.ndarray
  multiplicity: np.ndarray
  term_token: np.ndarray
  old_logprob: np.ndarray
  advantage: np.ndarray
  weight: np.ndarray
  term_sample: np.ndarray
  term_offset: np.ndarray
  experts: np.ndarray | None = None

  @property
  def num_tokens(self) -> int:
    """Tokens that are not padding."""
    return int(np.sum(np.asarray(self.subtree_end) > 0))


class _Row:
  """A row under construction: samples arrive in depth-first order."""

  def __init__(self, row_tokens: int):
    self.tokens = np.zeros(row_tokens, np.int32)
    self.position = np.zeros(row_tokens, np.int32)
    self.parent = np.full(row_tokens, -1, np.int32)
    self.subtree_end = np.zeros(row_tokens, np.int32)
    self.multiplicity = np.zeros(row_tokens, np.int32)
    self.path = np.zeros(
      row_tokens, np.int32
    )  # row index of each token of the last path
    self.path_length = 0
    self.shared = 0  # tokens the next sample shares with the last path
    self.used = 0
    self.num_terms = 0
    self.terms: list[tuple[np.ndarray, ...]] = []
    self.experts: np.ndarray | None = None

  def close(self, depth: int):
    """Ends the subtrees of the last path's tokens at `depth` and below."""
    self.subtree_end[self.path[depth : self.path_length]] = self.used

  def add(self, index: int, sample: Sample):
    shared, length = self.shared, len(sample.tokens)
    self.close(shared)
    new = slice(self.used, self.used + length - shared)
    self.tokens[new] = sample.tokens[shared:]
    self.position[new] = np.arange(shared, length)
    self.path[shared:length] = np.arange(new.start, new.stop)
    self.parent[new] = np.arange(new.start - 1, new.stop - 1)
    if new.stop > new.start:
      self.parent[new.start] = self.path[shared - 1] if shared else -1
    self.path_length, self.used = length, new.stop
    self.multiplicity[self.path[:length]] += 1
    if sample.experts is not None:
      if self.experts is None:
        shape = (len(self.tokens), *sample.experts.shape[1:])
        self.experts = np.full(shape, -1, np.int32)
      known = self.experts[self.path[:length]]  # what earlier samples recorded stays
      self.experts[self.path[:length]] = np.where(known < 0, sample.experts, known)
    self.terms.append(_terms(index, sample, self.path[:length]))
    self.num_terms += len(self.terms[-1][0])


def _terms(index: int, sample: Sample, path: np.ndarray) -> tuple[np.ndarray, ...]:
  """Term columns of one sample, in the order of Forest's term fields."""
  n = len(sample.tokens) - sample.prompt_length

  def column(values, default):
    return np.full(n, default, np.float32) if values is None else np.asarray(values)

  weight = column(sample.weights, 1.0)
  keep = np.flatnonzero(weight)
  return (
    path[sample.prompt_length + keep],
    column(sample.old_logprobs, 0.0)[keep],
    column(sample.advantages, 1.0)[keep],
    weight[keep],
    np.full(len(keep), index),
    keep,
  )


def _num_terms(sample: Sample) -> int:
  if sample.weights is None:
    return len(sample.tokens) - sample.prompt_length
  return int(np.count_nonzero(sample.weights))


def _validate(index: int, sample: Sample, row_tokens: int, row_terms: int | None):
  length = len(sample.tokens)
  if length == 0:
    raise ValueError(f'sample {index} has no tokens')
  if sample.tokens.ndim != 1:
    raise ValueError(f'sample {index}: tokens must be one-dimensional')
  if not np.issubdtype(sample.tokens.dtype, np.integer):
    raise ValueError(
      f'sample {index}: tokens must be integers, not {sample.tokens.dtype}'
    )
  if length > row_tokens:
    raise ValueError(
      f'sample {index} has {length} tokens, more than row_tokens={row_tokens}: '
      'raise row_tokens or shorten the sample'
    )
  if row_terms is not None and _num_terms(sample) > row_terms:
    raise ValueError(
      f'sample {index} has {_num_terms(sample)} loss terms, more than '
      f'row_terms={row_terms}: raise row_terms'
    )
  if not 0 <= sample.prompt_length <= length:
    raise ValueError(
      f'sample {index}: prompt_length={sample.prompt_length} outside [0, {length}]'
    )
  for name in ('old_logprobs', 'advantages', 'weights', 'versions'):
    values = getattr(sample, name)
    if values is not None and len(values) != length - sample.prompt_length:
      raise ValueError(
        f'sample {index}: {name} has length {len(values)}, the response has '
        f'{length - sample.prompt_length} tokens'
      )
  if sample.experts is not None and len(sample.experts) != length:
    raise ValueError(
      f'sample {index}: experts has length {len(sample.experts)}, not {length}'
    )


def _shared_length(a: np.ndarray, b: np.ndarray) -> int:
  n = min(len(a), len(b))
  differs = np.flatnonzero(a[:n] != b[:n])
  return int(differs[0]) if len(differs) else n


def _pack(
  samples: Sequence[Sample], row_tokens: int, row_terms: int | None, share: bool
) -> list[_Row]:
  """Puts each sample into the row that shares most with it, then the fullest."""
  order: Sequence[int] = range(len(samples))
  if share:
    keys = [np.asarray(s.tokens).astype('>i4').tobytes() for s in samples]
    order = sorted(order, key=keys.__getitem__)
  rows: list[_Row] = []
  previous = None
  for index in order:
    sample = samples[index]
    if share and previous is not None:
      common = _shared_length(previous.tokens, sample.tokens)
      for row in rows:
        row.shared = min(row.shared, common)
    previous = sample
    terms = _num_terms(sample)
    fitting = [
      row
      for row in rows
      if row.used + len(sample.tokens) - row.shared <= row_tokens
      and (row_terms is None or row.num_terms + terms <= row_terms)
    ]
    if fitting:
      row = max(fitting, key=lambda r: (r.shared, r.used))
    else:
      row = _Row(row_tokens)
      rows.append(row)
    row.add(index, sample)
    row.shared = len(sample.tokens) if share else 0
  for row in rows:
    row.close(0)
  return rows


def _stack(rows: list[_Row], num_rows: int | None, row_terms: int | None) -> Forest:
  """Rows as one Forest, padded to `num_rows` rows of `row_terms` terms."""
  terms = [[np.concatenate(c) for c in zip(*row.terms, strict=True)] for row in rows]
  longest = max((len(t[0]) for t in terms), default=0)
  row_terms = max(longest, 1) if row_terms is None else row_terms
  num_rows = len(rows) if num_rows is None else num_rows
  if len(rows) > num_rows:
    raise ValueError(f'the samples need {len(rows)} rows, more than rows={num_rows}')
  empty = _Row(len(rows[0].tokens))
  padded = rows + [empty] * (num_rows - len(rows))

  def term(column: int, dtype, fill):
    out = np.full((num_rows, row_terms), fill, dtype)
    for row, columns in zip(out, terms, strict=False):
      row[: len(columns[column])] = columns[column]
    return out

  experts = None
  recorded = [r.experts for r in rows if r.experts is not None]
  if recorded:
    none = np.full_like(recorded[0], -1)
    experts = np.stack([none if r.experts is None else r.experts for r in padded])
  return Forest(
    tokens=np.stack([r.tokens for r in padded]),
    position=np.stack([r.position for r in padded]),
    parent=np.stack([r.parent for r in padded]),
    subtree_end=np.stack([r.subtree_end for r in padded]),
    multiplicity=np.stack([r.multiplicity for r in padded]),
    term_token=term(0, np.int32, 0),
    old_logprob=term(1, np.float32, 0),
    advantage=term(2, np.float32, 0),
    weight=term(3, np.float32, 0),
    term_sample=term(4, np.int32, -1),
    term_offset=term(5, np.int32, -1),
    experts=experts,
  )


def merge(
  samples: Sequence[Sample],
  *,
  row_tokens: int,
  rows: int | None = None,
  row_terms: int | None = None,
) -> Forest:
  """Merges the samples' shared prefixes exactly and packs the trees into rows.

  A tree larger than a row is split by repeating the path to the split; each sample, and
  so each of its terms and its unit of multiplicity, lives in one row.

  Args:
    samples: any samples; prefixes are matched on token ids only.
    row_tokens: S.
    rows: pad to this many rows; None takes what is needed.
    row_terms: M: no row gets more terms, and all are padded to it (fixed shapes compile
      once); None takes what is needed.

  Returns:
    Forest of [rows, row_tokens].

  Raises:
    ValueError: a sample is empty, longer than a row or inconsistent in its lengths, or
      the samples do not fit `rows`.

  Example:
    >>> f = merge([Sample([5, 6, 7], 2), Sample([5, 6, 8], 2)], row_tokens=4)
    >>> f.tokens.tolist(), f.parent.tolist(), f.subtree_end.tolist()
    ([[5, 6, 7, 8]], [[-1, 0, 1, 1]], [[4, 4, 3, 4]])
  """
  samples = [dataclasses.replace(s, tokens=np.asarray(s.tokens)) for s in samples]
  if not samples:
    raise ValueError('merge needs at least one sample')
  for index, sample in enumerate(samples):
    _validate(index, sample, row_tokens, row_terms)
  packed = _pack(samples, row_tokens, row_terms, share=True)
  return _stack(packed, rows, row_terms)


def chain(
  documents: Sequence[np.ndarray],
  *,
  row_tokens: int,
  rows: int | None = None,
  row_terms: int | None = None,
) -> Forest:
  """Packs documents into rows as chains, nothing shared; every token but the first of a
  document is a loss term of weight 1. Arguments and errors as `merge`."""
  documents = [Sample(np.asarray(d), prompt_length=min(1, len(d))) for d in documents]
  if not documents:
    raise ValueError('chain needs at least one document')
  for index, document in enumerate(documents):
    _validate(index, document, row_tokens, row_terms)
  packed = _pack(documents, row_tokens, row_terms, share=False)
  return _stack(packed, rows, row_terms)


def causal(tokens: jax.Array) -> Forest:
  """Rows [B, S] of one whole chain each, with a term on every token but the first."""
  xp = np if isinstance(tokens, np.ndarray) else jax.numpy
  batch, length = tokens.shape
  index = xp.broadcast_to(xp.arange(length, dtype=xp.int32), (batch, length))
  ones = xp.ones((batch, length), xp.int32)
  terms = index[:, 1:]
  floats = xp.ones(terms.shape, xp.float32)
  return Forest(
    tokens=tokens,
    position=index,
    parent=index - 1,
    subtree_end=length * ones,
    multiplicity=ones,
    term_token=terms,
    old_logprob=0 * floats,
    advantage=floats,
    weight=floats,
    term_sample=xp.broadcast_to(xp.arange(batch, dtype=xp.int32)[:, None], terms.shape),
    term_offset=terms - 1,
  )
