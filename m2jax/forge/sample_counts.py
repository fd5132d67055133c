"""Counts trajectories by age, length, latency and outcome, for histograms.

Of those that were generated, trained and dropped, so that a bias of what is trained
against what is generated shows (`observe.sample_names`). Each is counted once along the
surviving lineage: `state` is a part of the checkpoint.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from m2jax.observe import sample_names
from m2jax.pool.data_pool import DataPool, Ended
from m2jax.records import Completion
from m2jax.rl import rewards


class SampleCounts:
  """Counts since the last `pop`; called from the learner's thread."""

  def __init__(self, pool: DataPool):
    self._pool = pool
    self._row, self._head = 0, 0  # where to look for ended ones, and for failed items
    self._failed: set[int] = set()  # items from the head on that were counted
    self._counts: collections.Counter[str] = collections.Counter()

  @property
  def state(self) -> dict[str, Any]:
    """For the checkpoint, as JSON values."""
    return {'row': self._row, 'head': self._head, 'failed': sorted(self._failed)}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues from a checkpoint's state; an empty one is the start."""
    self._row, self._head = state.get('row', 0), state.get('head', 0)
    self._failed = set(state.get('failed', ()))

  def take(
    self,
    groups: Sequence[rewards.Group],
    credits_: Sequence[rewards.GroupCredit],
    age: Callable[[Completion], np.ndarray],
  ) -> None:
    """Counts groups that were taken.

    Args:
      groups: as the pool returned them.
      credits_: the learner's credits.
      age: updates between the weights of a completion's tokens and the present ones.
    """
    for group, credit in zip(groups, credits_, strict=True):
      for (t, completions), one in zip(group, credit.credits, strict=True):
        trained = not credit.dropped and one.trained
        ages = [age(c).max() for c in completions if len(c.response_ids)]
        self._add(
          'trained' if trained else 'dropped',
          age=max(ages, default=None),
          length=sum(len(c.response_ids) for c in completions),
          latency=t.wall_s,
          outcome=sample_names.outcome(t.end_reason, t.success),
        )

  def pop(self, head: int) -> dict[str, int]:
    """All counts since the last call; `head` is the queue's."""
    for ended in self._pool.ended(after=self._row):
      self._row = ended.row
      self._add_ended('generated', ended)
      if ended.superseded:
        self._add_ended('dropped', ended)
    failed = self._pool.items('failed', first=self._head)
    new = {item.index for item in failed} - self._failed
    for ended in self._pool.ended(items=sorted(new)):
      if not ended.superseded:
        self._add_ended('dropped', ended)
    self._head = head
    self._failed = {i for i in self._failed | new if i >= head}
    counts, self._counts = dict(self._counts), collections.Counter()
    return counts

  def _add_ended(self, kind: str, ended: Ended) -> None:
    versions = ended.versions
    self._add(
      kind,
      age=versions[1] - versions[0] if versions else None,
      length=ended.response_tokens,
      latency=ended.wall_s,
      outcome=sample_names.outcome(ended.end_reason, ended.success),
    )

  def _add(self, kind: str, *, outcome: str, **values: float | None) -> None:
    self._counts[sample_names.name(kind, 'outcome', outcome)] += 1
    for quantity, value in values.items():
      if value is not None:
        bin_ = sample_names.label(quantity, value)
        self._counts[sample_names.name(kind, quantity, bin_)] += 1
