"""The paired gate: whether a candidate replaces the incumbent. Pure functions.

Both attempt the same tasks with the same seeds; the difference d of a pair is the
candidate's score minus the incumbent's, in [−1, 1]. The null hypothesis is that the
candidate is not better. Two tests of it may look several times and stop early:

  sign     group-sequential: at look j of n_j pairs, the exact p-value of the sign test,
           P(Binomial(wins + losses, 1/2) >= wins), against α n_j / Σ n. By the union
           bound a false keep has at most the probability α. The null is P(d > 0) <=
           P(d < 0), of scores of 0 and 1 the same as E[d] <= 0; the most powerful here
  betting  an e-process (I. Waudby-Smith and A. Ramdas, "Estimating means of bounded
           random variables by betting", JRSS B 86, 2024): E = mean over fractions λ of
           Π_i (1 + λ d_i), against 1/α. The null is E[d] <= 0 for any scores, and by
           Ville's inequality it is valid after any number of pairs, planned or not

Neither depends on the order of the pairs. Over a lineage the level is spent: round k of
K gets α_k with Σ α_k = α (`levels`), so that the probability of one or more false keeps
in the lineage is at most α.

A keep also needs a mean of at least `min_effect` and at most `cost_ratio` times the
incumbent's tokens. The stop of hopeless candidates only removes keeps: the level does
not depend on it.

Axes: λ the grid, n pairs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special

from m2jax.checks import require

KEEP, REVERT, CONTINUE = 'keep', 'revert', 'continue'
TESTS = 'sign', 'betting'
# For small effects to large ones. Growth is flat near the best fraction, so that four
# are enough; the mixture costs at most log(4) of evidence.
FRACTIONS = np.array([0.1, 0.2, 0.35, 0.6])


@dataclasses.dataclass(frozen=True)
class GateConfig:
  """When a candidate is kept.

  Attributes:
    alpha: probability of one or more false keeps in a lineage, at most.
    test: 'sign' or 'betting'; see the module.
    spending: round k gets a share proportional to k**-spending of `alpha`; 0 is even.
    looks: numbers of pairs after which the gate decides, ascending; the last is the
      most that a candidate gets.
    min_effect: least mean difference of a keep.
    optimism: standard errors added to the mean when the gate asks whether the pairs
      that are left could suffice; a larger value stops fewer candidates early.
    cost_ratio: a candidate that needs more than this multiple of the incumbent's tokens
      is reverted; 0 is no bound.
  """

  alpha: float = 0.05
  test: str = 'sign'
  spending: float = 0.0
  looks: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
  min_effect: float = 0.02
  optimism: float = 1.0
  cost_ratio: float = 2.0

  def __post_init__(self):
    check = functools.partial(require, self)
    check(0 < self.alpha < 1, 'alpha', 'in (0, 1)')
    check(self.test in TESTS, 'test', f'one of {TESTS}')
    check(0 <= self.spending <= 2, 'spending', 'in [0, 2]')
    ascending = list(self.looks) == sorted(set(self.looks))
    check(bool(self.looks) and ascending, 'looks', 'ascending numbers of pairs')
    check(all(n >= 1 for n in self.looks), 'looks', 'positive')
    check(0 <= self.min_effect <= 1, 'min_effect', 'in [0, 1]')
    check(self.optimism >= 0, 'optimism', 'at least 0')
    check(
      self.cost_ratio == 0 or self.cost_ratio >= 1, 'cost_ratio', '0, or at least 1'
    )


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the gate says after a look.

  Attributes:
    decision: 'keep', 'revert' or 'continue'.
    reason: why, in words.
    pairs: number of pairs.
    effect: mean difference.
    low, high: its 95 % interval by bootstrap.
    evidence: −log of the p-value, or log E.
    needed: the evidence of a keep at this look.
  """

  decision: str
  reason: str
  pairs: int
  effect: float
  low: float
  high: float
  evidence: float
  needed: float

  def as_dict(self) -> dict[str, Any]:
    """The verdict as JSON has it."""
    return dataclasses.asdict(self)


def levels(config: GateConfig, rounds: int) -> np.ndarray:
  """α_k of each planned round: float64 [rounds], with the sum `config.alpha`."""
  shares = np.arange(1, rounds + 1, dtype=np.float64) ** -config.spending
  return config.alpha * shares / shares.sum()


def log_wealth(differences: np.ndarray) -> np.ndarray:
  """Σ_i log(1 + λ d_i) of each fraction: [..., n] → [..., λ]."""
  return np.log1p(differences[..., None] * FRACTIONS).sum(-2)


def log_mixture(wealth: np.ndarray) -> np.ndarray:
  """log E_n of the mixture: [..., λ] → [...]."""
  most = wealth.max(-1)
  return most + np.log(np.exp(wealth - most[..., None]).mean(-1))


def sign_evidence(wins: np.ndarray, losses: np.ndarray) -> np.ndarray:
  """−log P(Binomial(wins + losses, 1/2) >= wins), elementwise."""
  p = special.bdtrc(wins - 1, wins + losses, 0.5)
  return np.abs(np.log(np.maximum(p, 1e-300)))


def needed(config: GateConfig, level: float | np.ndarray, look: int) -> Any:
  """The evidence that a keep needs at a look, from 0."""
  if config.test == 'betting':
    return -np.log(level)
  return -np.log(level * config.looks[look] / sum(config.looks))


def decide(
  differences: Sequence[float],
  config: GateConfig,
  level: float,
  look: int,
  cost: float = 1.0,
) -> Verdict:
  """The verdict after a look.

  Args:
    differences: d of each pair so far, in [−1, 1], in any order.
    config: settings.
    level: α_k of the round.
    look: number of the look, from 0.
    cost: tokens of the candidate as a multiple of the incumbent's.

  Raises:
    ValueError: a difference is outside [−1, 1], or there is none.
  """
  d = np.asarray(differences, np.float64)
  if not len(d) or not (np.abs(d) <= 1).all():  # nan is not
    raise ValueError('gate: differences must be one or more numbers in [-1, 1]')
  d = np.sort(d)  # sums to the same bits, whatever the order
  if config.test == 'sign':
    found = float(sign_evidence((d > 0).sum(), (d < 0).sum()))
  else:
    found = float(log_mixture(log_wealth(d)))
  effect, want = float(d.mean()), float(needed(config, level, look))
  low, high = interval(d)
  say = functools.partial(
    Verdict, pairs=len(d), effect=effect, low=low, high=high, evidence=found,
    needed=want,
  )  # fmt: skip
  shown = f'{effect:+.3f} in {len(d)} pairs, evidence {found:.1f} of {want:.1f}'
  if found >= want and effect >= config.min_effect:
    if config.cost_ratio and cost > config.cost_ratio:
      return say(REVERT, f'effort: {cost:.2f} times the tokens of the incumbent')
    return say(KEEP, f'better: {shown}')
  if look == len(config.looks) - 1:
    small = 'below min_effect' if found >= want else 'not enough evidence'
    return say(REVERT, f'{small}: {shown}')
  left = config.looks[-1] - config.looks[look]
  if reachable(d, left, config.optimism) < needed(config, level, -1):
    return say(REVERT, f'hopeless: {shown}, {left} pairs left')
  return say(CONTINUE, shown)


def reachable(d: np.ndarray, left: int, optimism: float) -> float:
  """The evidence after `left` more pairs whose mean is some standard errors higher.

  z²/2 for a sum of z standard deviations. One observation of each sign is added: equal
  pairs alone do not say that all will be.
  """
  signs = np.sign(d)
  n, total = len(d) + 2, float(signs.sum())
  second = (float((signs**2).sum()) + 2) / n
  mean = total / n + optimism * math.sqrt(second / n)
  z = (total + left * mean) / math.sqrt(second * (len(d) + left))
  return max(z, 0.0) ** 2 / 2


def interval(differences: Sequence[float], draws: int = 1000) -> tuple[float, float]:
  """95 % percentile interval of the mean by bootstrap, the same for the same pairs."""
  d, n = np.sort(np.asarray(differences, np.float64)), len(differences)
  values, counts = np.unique(d, return_counts=True)
  drawn = np.random.default_rng(0).multinomial(n, counts / n, draws) @ values / n
  low, high = np.quantile(drawn, (0.025, 0.975))
  return float(low), float(high)
