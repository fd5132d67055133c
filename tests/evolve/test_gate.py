"""The gate: its level over lineages, its power, and what it does not depend on."""

import math

import numpy as np
import pytest

from m2jax.evolve import gate
from m2jax.evolve.gate import GateConfig

CONFIG = GateConfig()


def differences(rng, n, p, q):
  """n independent pairs of success rates p (incumbent) and q."""
  return (rng.random(n) < q).astype(float) - (rng.random(n) < p)


def test_the_evidence_is_the_mixture_of_bets():
  d = [1.0, -1.0, 0.5, 0.0]
  bets = [math.prod(1 + f * x for x in d) for f in gate.FRACTIONS]
  log_e = gate.log_mixture(gate.log_wealth(np.array(d)))
  assert float(log_e) == pytest.approx(math.log(sum(bets) / len(bets)))


@pytest.mark.parametrize('spending', [0.0, 1.0])
def test_lineages_without_an_effect_rarely_keep(spending):
  """4,000 lineages of 100 A/A rounds, with a look after every batch: at most α of them
  have a keep. A fixed level of 0.05 a look would make nearly all of them do."""
  config, rng = GateConfig(alpha=0.1, spending=spending), np.random.default_rng(0)
  levels = gate.levels(config, 100)
  assert levels.sum() == pytest.approx(config.alpha)
  steps = np.diff((0, *config.looks))
  p = rng.uniform(0.1, 0.6, (4000, 1))  # success rate of a lineage
  wealth, crossed, naive = 0.0, np.zeros((4000, 100), bool), np.zeros((4000, 100), bool)
  for n in steps:
    wins = rng.binomial(n, p * (1 - p), (4000, 100))
    losses = rng.binomial(n - wins, p * (1 - p) / (1 - p * (1 - p)))
    bets = wins[..., None] * np.log1p(gate.FRACTIONS)
    wealth = wealth + bets + losses[..., None] * np.log1p(-gate.FRACTIONS)
    log_e = gate.log_mixture(wealth)
    crossed |= log_e >= -np.log(levels)
    naive |= log_e >= -math.log(0.05)
  rate = crossed.any(1).mean()
  assert rate <= config.alpha + 2 * math.sqrt(config.alpha * 0.9 / 4000)
  assert naive.any(1).mean() > 0.7


def decided(rng, p, q, level, config=CONFIG):
  """A candidate's verdict, look by look."""
  d = differences(rng, config.looks[-1], p, q)
  for look in config.looks:
    verdict = gate.decide(d[:look], config, level)
    if verdict.decision != gate.CONTINUE:
      return verdict
  raise AssertionError('the last look decides')


def test_power_and_early_stops():
  """+10 points at a success of 0.4, one round of a hundred: kept in a third or more of
  the rounds, +20 nearly always; those without an effect cost few pairs."""
  rng, level = np.random.default_rng(1), float(gate.levels(CONFIG, 100)[0])
  found = {
    effect: [decided(rng, 0.4, 0.4 + effect, level) for _ in range(60)]
    for effect in (0.0, 0.1, 0.2, -0.2)
  }
  kept = {k: np.mean([v.decision == 'keep' for v in vs]) for k, vs in found.items()}
  assert kept[0.0] == kept[-0.2] == 0 and kept[0.1] > 0.33 and kept[0.2] > 0.9
  pairs = {k: np.mean([v.pairs for v in vs]) for k, vs in found.items()}
  assert pairs[-0.2] < pairs[0.0] < 200


def test_the_order_of_tasks_is_irrelevant():
  rng = np.random.default_rng(2)
  d = rng.choice([-1, -0.3, 0, 0.7, 1], 200)
  first = gate.decide(d, CONFIG, 0.001)
  assert all(gate.decide(rng.permutation(d), CONFIG, 0.001) == first for _ in range(5))


@pytest.mark.parametrize(
  ('d', 'options', 'decision', 'reason'),
  [
    ([1.0] * 32, {}, 'keep', 'better by'),
    ([0.0] * 31 + [-1.0], {}, 'continue', 'log e'),
    ([-1.0] * 32, {}, 'revert', 'hopeless'),
    ([1.0] * 32, dict(cost=2.5), 'revert', 'effort'),
    ([0.0] * 1024, {}, 'revert', 'not enough evidence'),
    ([0.03] * 1024, dict(level=0.9), 'keep', 'better'),
    ([0.03] * 1024, dict(level=0.9, min_effect=0.1), 'revert', 'below min_effect'),
  ],
)
def test_decisions(d, options, decision, reason):
  config = GateConfig(min_effect=options.pop('min_effect', 0.02))
  verdict = gate.decide(d, config, **{'level': 0.001} | options)
  assert verdict.decision == decision and reason in verdict.reason


@pytest.mark.parametrize('d', [[], [float('nan')], [1.5]])
def test_no_differences(d):
  with pytest.raises(ValueError, match='gate: differences'):
    gate.decide(d, CONFIG, 0.001)


def test_the_interval_covers():
  """The bootstrap's interval has the true mean in about 95 % of samples."""
  rng, inside = np.random.default_rng(3), 0
  for _ in range(200):
    low, high = gate.interval(differences(rng, 150, 0.4, 0.5))
    inside += low <= 0.1 <= high
  assert 0.88 <= inside / 200 <= 0.99
