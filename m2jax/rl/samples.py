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
from m2jax.rl import cispo, rewards

# (completion) → updates since the weights that sampled each of its tokens
Lags = Callable[[Completion], np.ndarray]


def from_groups(
  groups: Sequence[rewards.GroupCredit],
  normaliser: str = 'prompt',
  lags: Lags | None = None,
) -> list[list[forest.Sample]]:
  """Samples of a batch, without dropped groups and masked trajectories.

  Args:
    groups: from `rewards.advantages`, one per taken work item.
    normaliser: see `cispo.weights`.
    lags: None: unknown.

  Returns:
    The samples of each remaining group, in order of trajectory and turn.
  """
  trained = [g for g in groups if not g.dropped]
  lengths = [
    [len(c.response_ids) for credit in g.credits for c in credit.completions]
    for g in trained
  ]
  weights = cispo.weights(lengths, normaliser)
  return [from_group(g, w, lags) for g, w in zip(trained, weights, strict=True)]


def from_group(
  group: rewards.GroupCredit, weights: Sequence[float], lags: Lags | None = None
) -> list[forest.Sample]:
  """Samples of one group.

  Args:
    group: the group.
    weights: one per completion of the group, in order of trajectory and turn, for each
      of the completion's terms.
    lags: None: unknown.

  Raises:
    ValueError: the numbers of weights and completions differ.
  """
  terms = [
    (completion, advantage)
    for credit in group.credits
    for completion, advantage in zip(credit.completions, credit.advantages, strict=True)
  ]
  if len(weights) != len(terms):
    raise ValueError(f'{len(weights)} weights for {len(terms)} completions')
  return [
    forest.Sample(
      tokens=c.tokens,
      prompt_length=len(c.prompt_ids),
      old_logprobs=c.logprobs,
      advantages=np.full(len(c.response_ids), advantage, np.float32),
      weights=np.full(len(c.response_ids), weight, np.float32),
      versions=c.versions,
      lags=None if lags is None else lags(c),
      experts=c.experts,
    )
    for (c, advantage), weight in zip(terms, weights, strict=True)
  ]
