"""Few shapes for rows of many lengths, because each shape is compiled once.

Axes: B rows, S tokens in a row, M loss terms in a row.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from m2jax.forest.types import Forest, select


def sizes(least: int, most: int, ratio: float = 2.0) -> tuple[int, ...]:
  """least, about least·ratio, … up to `most`; multiples of `least`, except `most`.

  Rounding up to a size costs at most a factor of `ratio`, and there are about
  log(most / least) / log(ratio) sizes.

  Raises:
    ValueError: not 0 < least <= most, or a ratio of at most 1.
  """
  if not 0 < least <= most:
    raise ValueError(
      f'sizes: least={least}, most={most}: must satisfy 0 < least <= most'
    )
  if ratio <= 1:
    raise ValueError(f'sizes: ratio={ratio} must be above 1')
  out = [least]
  while out[-1] < most:
    units = max(int(out[-1] * ratio) // least, out[-1] // least + 1)
    out.append(min(units * least, most))
  return tuple(out)


def fit(size: int, buckets: Sequence[int], what: str) -> int:
  """The smallest bucket of at least `size`.

  Raises:
    ValueError: there is none; the message starts with `what`.
  """
  for bucket in buckets:
    if size <= bucket:
      return bucket
  raise ValueError(f'{what}: {size} exceeds the largest bucket, {buckets[-1]}')


def by_bucket(
  batch: Forest, row_tokens: Sequence[int], row_terms: Sequence[int] | None = None
) -> list[Forest]:
  """Groups the rows of a host batch by the smallest shape that fits each.

  Rows of the same shape keep their order. There are at most len(row_tokens) ·
  len(row_terms) shapes, which bounds the compilations of a step with a fixed number of
  rows (`StepConfig.micro_rows`).

  Args:
    batch: the result of `merge` or `chain`; rows that are only padding are dropped.
    row_tokens, row_terms: ascending sizes, for example from `sizes`; None is M.

  Raises:
    ValueError: a row has more tokens or terms than the largest size.
  """
  row_terms = (batch.weight.shape[1],) if row_terms is None else row_terms
  used = np.count_nonzero(batch.subtree_end, axis=1)
  terms = np.count_nonzero(batch.weight, axis=1)
  shapes = collections.defaultdict(list)
  for row in np.flatnonzero(used):
    tokens = fit(int(used[row]), row_tokens, 'by_bucket: tokens of a row')
    shapes[tokens, fit(int(terms[row]), row_terms, 'by_bucket: terms of a row')].append(
      row
    )
  return [
    select(batch, rows, row_tokens=tokens, row_terms=terms)
    for (tokens, terms), rows in sorted(shapes.items())
  ]
