"""Merging one sample after the other, plainly: what `forest.merge` must give exactly.

Walks the whole row for each sample, where the product plans first and writes slices.
"""

from __future__ import annotations

import numpy as np


def merge(samples, row_tokens: int, row_terms: int | None = None) -> list[dict]:
  """Rows as dicts of lists: tokens, parent, position, end, multiplicity, terms."""

  def count(sample):
    n = len(sample.tokens) - sample.prompt_length
    return n if sample.weights is None else int(np.count_nonzero(sample.weights))

  rows: list[dict] = []
  order = sorted(range(len(samples)), key=lambda i: list(samples[i].tokens))
  for index in order:
    sample, tokens = samples[index], list(samples[index].tokens)
    fitting = [
      row
      for row in rows
      if len(row['tokens']) + len(tokens) - _shared(row, tokens) <= row_tokens
      and (row_terms is None or len(row['terms']) + count(sample) <= row_terms)
    ]
    if fitting:
      row = max(fitting, key=lambda r: (_shared(r, tokens), len(r['tokens'])))
    else:
      row = dict(tokens=[], parent=[], position=[], multiplicity=[], terms=[], last=[])
      rows.append(row)
    _add(row, index, sample, tokens)
  for row in rows:
    row['end'] = [_end(row['parent'], i) for i in range(len(row['tokens']))]
  return rows


def _shared(row, tokens) -> int:
  """Tokens in common with the row's last path."""
  path = [row['tokens'][i] for i in row['last']]
  n = 0
  while n < min(len(path), len(tokens)) and path[n] == tokens[n]:
    n += 1
  return n


def _add(row, index, sample, tokens):
  path = row['last'][: _shared(row, tokens)]
  for token in tokens[len(path) :]:
    row['parent'].append(path[-1] if path else -1)
    row['position'].append(len(path))
    path.append(len(row['tokens']))
    row['tokens'].append(token)
    row['multiplicity'].append(0)
  for i in path:
    row['multiplicity'][i] += 1
  for offset, i in enumerate(path[sample.prompt_length :]):
    if sample.weights is None or sample.weights[offset]:
      row['terms'].append((i, index, offset))
  row['last'] = path


def _end(parent, i) -> int:
  """One past the last token below i."""
  end = i + 1
  while end < len(parent) and parent[end] >= i:
    end += 1
  return end
