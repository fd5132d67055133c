"""Samples → forest: exact merge of shared prefixes and packing into rows.

Why merging is exact: facts/algorithms.md §6. Rows are planned from lengths only; then
each array is written once, by slices. Counts are differences of cumulative sums.

Axes: B rows, S tokens in a row, M loss terms in a row, L layers, n samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from m2jax.forest import replay, trie
from m2jax.forest.types import FIELDS, OPTIONAL, SAMPLED, Forest, Sample, padding

LOSSES = ('response', 'path')


class _Place(NamedTuple):
  """The row of a sample, and the length it shares with that row's last path."""

  index: int  # type: ignore[assignment]  # tuples have a method index
  row: int
  shared: int


def merge(
  samples: Sequence[Sample],
  *,
  row_tokens: int | None = None,
  rows: int | None = None,
  row_terms: int | None = None,
  loss: str = 'response',
) -> Forest:
  """Merges the samples' shared prefixes exactly and packs the trees into rows.

  A tree larger than a row is split, and the path to the split repeated; each sample,
  and therefore each of its terms and its unit of multiplicity, is in one row. (`cut`
  splits a tree without repetition.)

  Args:
    samples: any samples; prefixes are matched on token ids only.
    row_tokens: S; None gives one row as long as the merged samples.
    rows: number of rows to pad to; None gives as few as possible.
    row_terms: M, the maximum terms of a row, to which all rows are padded (fixed shapes
      compile once); None gives as few as possible.
    loss: which of two losses that are called tree training, for samples that are
      completions, each with earlier responses as context:
      'response': each response is trained once, in its own sample (Forge);
      'path': each root-to-leaf path is a row that trains all responses on it, so that a
      term's weight is multiplied by the number of paths through its token. Samples that
      are whole paths already, with a term on every response in them, need 'response'.

  Returns:
    Forest of [rows, row_tokens].

  Raises:
    ValueError: a sample is empty, longer than a row or has inconsistent lengths, the
      samples do not fit into `rows`, or the loss is unknown.

  Example:
    >>> f = merge([Sample([5, 6, 7], 2), Sample([5, 6, 8], 2)], row_tokens=4)
    >>> f.tokens.tolist(), f.parent.tolist(), f.subtree_end.tolist()
    ([[5, 6, 7, 8]], [[-1, 0, 1, 1]], [[4, 4, 3, 4]])
  """
  if loss not in LOSSES:
    raise ValueError(f'merge: loss={loss!r}: must be one of {LOSSES}')
  if not samples:
    raise ValueError('merge needs at least one sample')
  samples = _checked(samples, row_tokens, row_terms)
  found = trie.build([s.tokens for s in samples])
  if row_tokens is None:
    row_tokens = int(np.sum(found.lengths - found.shared))
  places = _place(found, [_num_terms(s) for s in samples], row_tokens, row_terms)
  if loss == 'path':
    paths = trie.leaves_through(found)
    for i, index in enumerate(found.order):
      samples[index] = _reweighted(samples[index], paths[i])
  batch, paths = _fill(samples, places, row_tokens, rows, row_terms)
  if any(s.experts is not None for s in samples):
    experts = replay.canonical(samples, found, paths, batch.tokens.shape)
    batch = dataclasses.replace(batch, experts=experts)
  return batch


class Size(NamedTuple):
  """What `merge` would make: rows, and tokens in them, repeated paths included."""

  rows: int
  tokens: int


def measure(samples: Sequence[Sample], *, row_tokens: int, row_terms: int) -> Size:
  """The size of `merge(samples, …)`, from lengths alone. Errors as `merge`."""
  samples = _checked(samples, row_tokens, row_terms)
  found = trie.build([s.tokens for s in samples])
  places = _place(found, [_num_terms(s) for s in samples], row_tokens, row_terms)
  new = (len(samples[p.index].tokens) - p.shared for p in places)
  return Size(1 + max(p.row for p in places), sum(new))


def chain(
  documents: Sequence[np.ndarray],
  *,
  row_tokens: int,
  rows: int | None = None,
  row_terms: int | None = None,
) -> Forest:
  """Packs documents into rows as chains that share nothing.

  Every token of a document except the first is a loss term of weight 1. Arguments and
  errors are those of `merge`.
  """
  if not documents:
    raise ValueError('chain needs at least one document')
  samples = [Sample(np.asarray(d), prompt_length=min(1, len(d))) for d in documents]
  samples = _checked(samples, row_tokens, row_terms)
  lengths = np.array([len(s.tokens) for s in samples])
  separate = trie.Trie(np.arange(len(samples)), np.zeros_like(lengths), lengths)
  places = _place(separate, [_num_terms(s) for s in samples], row_tokens, row_terms)
  return _fill(samples, places, row_tokens, rows, row_terms)[0]


def _checked(samples, row_tokens: int | None, row_terms: int | None) -> list[Sample]:
  """Validates the samples; converts tokens to int32, and experts to arrays."""
  out = []
  for index, sample in enumerate(samples):
    sample = dataclasses.replace(sample, tokens=np.asarray(sample.tokens))
    _validate(index, sample, row_tokens, row_terms)
    tokens = np.ascontiguousarray(sample.tokens, np.int32)
    experts = None if sample.experts is None else np.asarray(sample.experts)
    out.append(dataclasses.replace(sample, tokens=tokens, experts=experts))
  return out


def _validate(index: int, sample: Sample, row_tokens, row_terms):
  length = len(sample.tokens)
  if length == 0:
    raise ValueError(f'sample {index} has no tokens')
  if sample.tokens.ndim != 1:
    raise ValueError(f'sample {index}: tokens must be one-dimensional')
  if not np.issubdtype(sample.tokens.dtype, np.integer):
    raise ValueError(
      f'sample {index}: tokens must be integers, not {sample.tokens.dtype}'
    )
  if row_tokens is not None and length > row_tokens:
    raise ValueError(
      f'sample {index} has {length} tokens, more than row_tokens={row_tokens}: '
      'raise row_tokens or shorten the sample'
    )
  if not 0 <= sample.prompt_length <= length:
    raise ValueError(
      f'sample {index}: prompt_length={sample.prompt_length}: must be in [0, {length}]'
    )
  for name in (*SAMPLED.values(), 'versions'):
    values = getattr(sample, name)
    if values is not None and len(values) != length - sample.prompt_length:
      raise ValueError(
        f'sample {index}: {name} has length {len(values)}, the response has '
        f'{length - sample.prompt_length} tokens'
      )
  if row_terms is not None and _num_terms(sample) > row_terms:
    raise ValueError(
      f'sample {index} has {_num_terms(sample)} loss terms, more than '
      f'row_terms={row_terms}: raise row_terms'
    )
  if sample.experts is not None and len(sample.experts) != length:
    raise ValueError(
      f'sample {index}: experts has length {len(sample.experts)}, not {length}'
    )


def _num_terms(sample: Sample) -> int:
  if sample.weights is None:
    return len(sample.tokens) - sample.prompt_length
  return int(np.count_nonzero(sample.weights))


def _reweighted(sample: Sample, paths: np.ndarray) -> Sample:
  """Multiplies each term's weight by the number of paths [len(tokens)] through it."""
  weights = 1.0 if sample.weights is None else np.asarray(sample.weights)
  return dataclasses.replace(sample, weights=weights * paths[sample.prompt_length :])


def _place(
  found: trie.Trie, num_terms: Sequence[int], row_tokens: int, row_terms: int | None
) -> list[_Place]:
  """Puts each sample into the row with the longest shared prefix, then the fullest."""
  n = len(found.order)
  row_terms = sum(num_terms) if row_terms is None else row_terms
  # By row: tokens, terms, and the prefix that its last path shares with the sample.
  used, terms, common = np.zeros((3, n), np.int64)
  places, rows = [], 0
  for index, shared, length in zip(*map(np.ndarray.tolist, found), strict=True):
    open_rows = common[:rows]
    np.minimum(open_rows, shared, out=open_rows)
    fits = used[:rows] + length - open_rows <= row_tokens
    fits &= terms[:rows] + num_terms[index] <= row_terms
    score = np.where(fits, open_rows * (row_tokens + 1) + used[:rows], -1)
    row = int(score.argmax()) if rows else 0
    if rows == 0 or score[row] < 0:
      row, rows = rows, rows + 1
    places.append(_Place(index, row, int(common[row])))
    used[row] += length - common[row]
    terms[row] += num_terms[index]
    common[row] = length
  return places


class _Row:
  """The state of a row while it is filled."""

  def __init__(self, row_tokens: int):
    self.path = np.zeros(row_tokens, np.int32)  # row index of the last path's tokens
    self.length = 0  # of the last path
    self.used = 0
    self.terms = 0


def _fill(
  samples: Sequence[Sample],
  places: Sequence[_Place],
  row_tokens: int,
  rows: int | None,
  row_terms: int | None,
) -> tuple[Forest, list]:
  """The forest, and (place, first new token, path of row indices) by place.

  The paths are empty unless some sample has recorded experts.
  """
  needed = 1 + max(p.row for p in places)
  if rows is not None and needed > rows:
    raise ValueError(f'the samples need {needed} rows, more than rows={rows}')
  if row_terms is None:
    counts = np.zeros(needed, np.int64)
    for p in places:
      counts[p.row] += _num_terms(samples[p.index])
    row_terms = max(int(counts.max()), 1)
  out = padding(needed if rows is None else rows, row_tokens, row_terms)
  for name in SAMPLED.keys() & set(OPTIONAL):
    if any(getattr(sample, SAMPLED[name]) is not None for sample in samples):
      of = FIELDS[name]
      values = np.full(out.weight.shape, of['fill'], of['dtype'])
      out = dataclasses.replace(out, **{name: values})
  ends = np.zeros(
    (needed, row_tokens + 1), np.int32
  )  # number of samples that end at a token
  iota = np.arange(max(row_tokens, row_terms), dtype=np.int32)
  cursors = [_Row(row_tokens) for _ in range(needed)]
  keep_paths = any(s.experts is not None for s in samples)
  paths = []
  for place in places:
    sample, row = samples[place.index], cursors[place.row]
    shared, length = place.shared, len(sample.tokens)
    out.subtree_end[place.row, row.path[shared : row.length]] = row.used
    start, stop = row.used, row.used + length - shared
    if stop > start:
      out.tokens[place.row, start:stop] = sample.tokens[shared:]
      out.position[place.row, start:stop] = iota[shared:length]
      out.parent[place.row, start + 1 : stop] = iota[start : stop - 1]
      out.parent[place.row, start] = row.path[shared - 1] if shared else -1
      row.path[shared:length] = iota[start:stop]
    row.used, row.length = stop, length
    ends[place.row, row.path[length - 1]] += 1
    row.terms = _fill_terms(out, place, sample, row, iota)
    if keep_paths:
      paths.append((place, start, row.path[:length].copy()))
  for r, cursor in enumerate(cursors):
    out.subtree_end[r, cursor.path[: cursor.length]] = cursor.used
    # The samples through a token are those that end in its subtree.
    before = np.concatenate([[0], np.cumsum(ends[r, : cursor.used])])
    end = out.subtree_end[r, : cursor.used]
    out.multiplicity[r, : cursor.used] = before[end] - before[: cursor.used]
  return out, paths


def _fill_terms(out: Forest, place: _Place, sample: Sample, row: _Row, iota) -> int:
  """Writes the sample's terms; returns the index of the row's next term."""
  n = len(sample.tokens) - sample.prompt_length
  nonzero: slice | np.ndarray = slice(None)
  if sample.weights is not None and np.count_nonzero(sample.weights) < n:
    nonzero = np.flatnonzero(sample.weights)
  offset = iota[:n][nonzero]
  to = place.row, slice(row.terms, row.terms + len(offset))
  out.term_token[to] = row.path[sample.prompt_length : len(sample.tokens)][nonzero]
  for name, in_sample in SAMPLED.items():
    if getattr(out, name) is None:
      continue
    values, default = getattr(sample, in_sample), FIELDS[name]['default']
    found = default if values is None else np.asarray(values)[nonzero]
    getattr(out, name)[to] = found
  out.term_sample[to] = place.index
  out.term_offset[to] = offset
  return row.terms + len(offset)
