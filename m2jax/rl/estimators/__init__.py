"""Estimators of the policy gradient: one module each, found by name or import path.

An estimator is a module with `Config`, an `EstimatorConfig`: its parameters, the
normaliser of terms, the scale of advantages, and the loss of each term. A name without
a dot is a module of this package, or an entry point of the group `m2jax.rl.estimators`
(`m2jax.kinds`). docs/add_an_estimator.md has an example, docs/rl.md a table.

  name              gradient of a term / (Â ∇ log π)            default normaliser
  cispo             sg(clip(r, w_min, w_max))                   prompt
  grpo              r, or 0 outside of 1 ± ε                    trajectory
  dapo              r, or 0 outside of [1 − ε_low, 1 + ε_high]  token
  gspo              as grpo, r that of the whole sequence       trajectory
  policy_gradient   1: exact on-policy only                     prompt
  expert_iteration  1, with Â = 1 for successes alone           prompt

r = π/π_old. Dynamic sampling, DAPO's other half, is `rl.refill_factor` and applies to
all; DAPO's penalty of long responses is not implemented.

Axes: *M loss terms.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from typing import Any, ClassVar

from m2jax import kinds
from m2jax.axes import Array, Float
from m2jax.checks import require
from m2jax.rl import rewards
from m2jax.rl import terms as terms_lib

KINDS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
# What a loss may use beside the log-probabilities of its own terms.
INPUTS = ('entropy', 'reference', 'completion', 'trajectory')


@dataclasses.dataclass(frozen=True)
class EstimatorConfig:
  """An estimator: the parameters that every kind has, and its functions.

  Attributes:
    kind: module that defines it (`m2jax.kinds`).
    normaliser: how terms are averaged (`terms.weights`).
    reference_kl: weight of the KL penalty towards the weights that RL starts from
      (`terms.reference_kl`); above 0 the learner keeps a copy of them, and computes
      their log-probabilities in one more forward pass for each update.
    kl_estimate: 'k3' or 'k2', see there.
    entropy_bonus: weight of the entropy of the distribution that a term's token was
      drawn from; positive values keep it high.
  """

  # What advantages are divided by in its paper (`rewards.RewardConfig.normalise`).
  normalise: ClassVar[str] = 'none'
  # Those of INPUTS that `loss` reads; a further pass computes all but the entropy.
  needs: ClassVar[tuple[str, ...]] = ()

  kind: str
  normaliser: str = 'prompt'
  reference_kl: float = 0.0
  kl_estimate: str = 'k3'
  entropy_bonus: float = 0.0

  def __post_init__(self):
    known = self.normaliser in terms_lib.NORMALISERS
    require(self, known, 'normaliser', f'one of {terms_lib.NORMALISERS}')
    known = self.kl_estimate in terms_lib.KL_ESTIMATES
    require(self, known, 'kl_estimate', f'one of {terms_lib.KL_ESTIMATES}')
    require(self, self.reference_kl >= 0, 'reference_kl', 'at least 0')
    if unknown := set(self.needs) - set(INPUTS):
      raise ValueError(f'{self.kind}: needs {sorted(unknown)}; there are {INPUTS}')

  @classmethod
  def of_kind(cls, kind: str) -> type[EstimatorConfig]:
    """The config class of a kind. Raises ValueError for an unknown kind."""
    return kinds.module(__name__, kind).Config

  @classmethod
  def kinds(cls) -> list[type[EstimatorConfig]]:
    """The config classes of this package, whose fields flags can set."""
    return list(map(cls.of_kind, KINDS))

  @property
  def inputs(self) -> frozenset[str]:
    """Those of INPUTS that it uses, for its loss or for a penalty."""
    used = {'reference': self.reference_kl, 'entropy': self.entropy_bonus}
    return frozenset(self.needs) | {name for name, weight in used.items() if weight}

  @property
  def own_credit(self) -> bool:
    """Whether its credit is not the rewards' own."""
    return type(self).credit is not EstimatorConfig.credit

  def credit(self, group: rewards.GroupCredit) -> rewards.GroupCredit:
    """The group with the advantages that are trained; by default as rewards gave it."""
    return group

  def loss(self, terms: terms_lib.Terms) -> Float[Array, '*M']:
    """The loss of each term, times its weight; the learner minimises the sum.

    Terms of weight 0 are padding, whose other values may be anything: `terms.masked`.
    """
    raise NotImplementedError

  def metrics(self, terms: terms_lib.Terms) -> dict[str, Array]:
    """Off-policy metrics, sums over terms; see `terms.metrics`."""
    return terms_lib.metrics(terms.logprob, terms.old_logprob, terms.weight)

  def penalised(self, terms: terms_lib.Terms) -> Float[Array, '*M']:
    """The loss of each term with the KL penalty and the entropy bonus."""
    loss = self.loss(terms)
    if self.reference_kl:
      loss += self.reference_kl * terms_lib.reference_kl(terms, self.kl_estimate)
    if self.entropy_bonus:
      assert terms.entropy is not None  # an input (`inputs`)
      (entropy,) = terms_lib.masked(terms.weight, terms.entropy)
      loss -= self.entropy_bonus * (terms.weight * entropy)
    return loss


def make(kind: str, **parameters: Any) -> EstimatorConfig:
  """The estimator of a kind.

  Raises:
    ValueError: an unknown kind, or a parameter out of range.
    TypeError: a parameter that the kind does not have.

  Example:
    >>> make('dapo', clip_low=0.1).clip_high
    0.28
  """
  return EstimatorConfig.of_kind(kind)(kind=kind, **parameters)
