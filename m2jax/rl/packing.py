"""Packs the groups of one update into rows, and large groups into chunks.

A group is a tree: its samples share the task. Trees that fit are packed into rows of
one shape. A larger one is either split over rows, which repeats the path to each split,
or trained in chunks (`train.chunks`), which run the forward pass of its trunk twice and
pad every chunk: whichever costs less. Both are exact (law 3). Memory is bounded by the
size of a row or of a chunk. `python -m benchmarks.prefix_tree` compares the estimate
with the time taken (docs/prefix_tree.md).

Axes: n rows, S tokens of a row, M loss terms of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from m2jax import forest
from m2jax.train import hosts as hosts_lib


class Batch(NamedTuple):
  """The samples of the groups of one update, each exactly once.

  Attributes:
    rows: Forest of [n, S], or None if no group is in rows.
    plan: chunks of the other groups, or None.
    chunked: number of groups in chunks.
  """

  rows: forest.Forest | None
  plan: forest.Plan | None
  chunked: int

  @property
  def empty(self) -> bool:
    """Whether there is nothing to train."""
    return self.rows is None and self.plan is None

  @property
  def num_tokens(self) -> int:
    """Tokens after merging, including those that rows repeat."""
    rows = self.rows.num_tokens if self.rows is not None else 0
    return rows + (self.plan.tokens if self.plan is not None else 0)


def pack(
  groups: Sequence[Sequence[forest.Sample]],
  *,
  row_tokens: int,
  row_terms: int,
  buckets: forest.Buckets,
) -> Batch:
  """Chooses rows or chunks for each group, and merges.

  Recorded expert ids of a token shared between groups (a system prompt) are unified
  among the groups in rows, and separately among those in chunks.

  Args:
    groups: samples of each group, their weights already normalised.
    row_tokens, row_terms: S and M.
    buckets: shapes of the chunks.

  Raises:
    ValueError: a path of a chunked group is longer than the stack.
  """
  in_rows, in_chunks = [], []
  for group in groups:
    fits = _suits_rows(group, row_tokens, row_terms, buckets)
    (in_rows if fits else in_chunks).append(group)
  rows = plan = None
  if in_rows:
    samples = list(itertools.chain.from_iterable(in_rows))
    rows = forest.merge(samples, row_tokens=row_tokens, row_terms=row_terms)
  if in_chunks:
    samples = list(itertools.chain.from_iterable(in_chunks))
    plan = forest.cut(forest.merge(samples), buckets)
  return Batch(rows, plan, len(in_chunks))


def _suits_rows(group, row_tokens, row_terms, buckets) -> bool:
  """Whether the group fits into rows and costs no more there than in chunks."""
  longest = max(len(s.tokens) for s in group)
  most_terms = max(len(s.tokens) - s.prompt_length for s in group)
  if longest > row_tokens or most_terms > row_terms:
    return False
  size = forest.measure(group, row_tokens=row_tokens, row_terms=row_terms)
  if size.rows == 1:
    return True
  plan = forest.cut(forest.merge(group), buckets)
  return size.tokens <= plan.cost_tokens


def parts(batch: Batch, micro_rows: int, hosts: int) -> list[Batch]:
  """The batch of each host: its rows of every micro-batch, and the whole plan.

  Args:
    micro_rows: rows of a micro-batch of all hosts.
    hosts: their number, which divides `micro_rows`.
  """
  if batch.rows is None:
    return [batch] * hosts
  return [
    batch._replace(rows=hosts_lib.part(batch.rows, micro_rows, host, hosts))
    for host in range(hosts)
  ]
