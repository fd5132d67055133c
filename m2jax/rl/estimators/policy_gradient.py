"""REINFORCE (Williams, 1992), −weight · Â · log π, without an importance weight."""

from __future__ import annotations

import dataclasses

from m2jax.axes import Array, Float
from m2jax.rl import estimators
from m2jax.rl import terms as terms_lib


@dataclasses.dataclass(frozen=True)
class Config(estimators.EstimatorConfig):
  """The policy gradient: exact on-policy only."""

  kind: str = 'policy_gradient'

  def loss(self, terms: terms_lib.Terms) -> Float[Array, '*M']:
    logprob, advantage = terms_lib.masked(terms.weight, terms.logprob, terms.advantage)
    return -terms.weight * advantage * logprob
