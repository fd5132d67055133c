"""Converts judged rollout groups to samples for a forest (laws 1, 2).

One sample per completion: its recorded prompt and response ids, exactly as fed and as
sampled (law 4). Every response token is a loss term with the sampling log-probability,
the completion's advantage and the weight of the batch's normaliser; prompt tokens,
which include tool outputs, have no term. Expert ids are included where recorded.
`rl.packing` then merges shared prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from m2jax import forest
from m2jax.records import Completion
from m2jax.rl import rewards, terms

# (domain) → number of its teacher, or -1
TeacherOf = Callable[[str], int]
# (completion) → updates since the weights that sampled each of its tokens
Lags = Callable[[Completion], np.ndarray]


def from_groups(
  groups: Sequence[rewards.GroupCredit],
  normaliser: str = 'prompt',
  lags: Lags | None = None,
  trajectories: bool = False,
  teacher_of: TeacherOf | None = None,
) -> list[list[forest.Sample]]:
  """Samples of a batch, without dropped groups and masked trajectories.

  Args:
    groups: results of `rewards.advantages`, one per taken work item.
    normaliser: see `terms.weights`.
    lags: None: unknown.
    trajectories: the samples have the number of their trajectory.
    teacher_of: gives each sample its teacher; None: they have none.

  Returns:
    The samples of each remaining group, in order of trajectory and turn.
  """
  trained = [g for g in groups if not g.dropped]
  lengths = [
    [sum(len(c.response_ids) for c in credit.completions) for credit in g.credits]
    for g in trained
  ]
  weights = terms.weights(lengths, normaliser)
  out, first = [], 0
  for group, of_group in zip(trained, weights, strict=True):
    number = first if trajectories else None
    out.append(from_group(group, of_group, lags, number, teacher_of))
    first += len(group.credits)
  return out


def from_group(
  group: rewards.GroupCredit,
  weights: Sequence[float],
  lags: Lags | None = None,
  first: int | None = None,
  teacher_of: TeacherOf | None = None,
) -> list[forest.Sample]:
  """Samples of one group.

  Args:
    group: the group.
    weights: one per trajectory of the group, for each of its terms.
    lags: None: unknown.
    first: number of the first trajectory; None: they have none.
    teacher_of: as in `from_groups`.

  Raises:
    ValueError: the numbers of weights and trajectories differ.
  """
  if len(weights) != len(group.credits):
    raise ValueError(f'{len(weights)} weights for {len(group.credits)} trajectories')
  return [
    forest.Sample(
      tokens=c.tokens,
      prompt_length=len(c.prompt_ids),
      old_logprobs=c.logprobs,
      advantages=np.full(len(c.response_ids), advantage, np.float32),
      weights=np.full(len(c.response_ids), weight, np.float32),
      versions=c.versions,
      lags=None if lags is None else _of_keys(lags(c)),
      trajectories=None if first is None else np.full(len(c.response_ids), first + k),
      teachers=None
      if teacher_of is None
      else np.full(len(c.response_ids), teacher_of(credit.trajectory.domain)),
      experts=c.experts,
    )
    for k, (credit, weight) in enumerate(zip(group.credits, weights, strict=True))
    for c, advantage in zip(credit.completions, credit.advantages, strict=True)
  ]


def _of_keys(lags: np.ndarray) -> np.ndarray:
  """Marks tokens of these weights in responses begun by others (`Forest.lag`)."""
  return np.where((lags == 0) & lags.any(), forest.OLDER_KEYS, lags)
