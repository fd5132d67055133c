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


@pytest.mark.parametrize('test', gate.TESTS)
def test_lineages_without_an_effect_rarely_keep(test):
  """2,000 lineages of 100 A/A rounds, with six looks each: at most α of them have a
  keep. The same test at a fixed level of 0.05 a look fails in more than half."""
  config, rng = GateConfig(alpha=0.1, test=test, spending=0.5), np.random.default_rng(0)
  levels = gate.levels(config, 100)
  assert levels.sum() == pytest.approx(config.alpha)
  p = rng.uniform(0.1, 0.6, (2000, 1))  # success rate of a lineage
  share = p * (1 - p)  # of wins, and of losses
  wins = losses = np.zeros((2000, 100), int)
  kept, naive = (np.zeros((2000, 100), bool) for _ in range(2))
  for look, n in enumerate(np.diff((0, *config.looks))):
    more = rng.binomial(n, share, (2000, 100))
    wins, losses = wins + more, losses + rng.binomial(n - more, share / (1 - share))
    if test == 'sign':
      found = gate.sign_evidence(wins, losses)
    else:
      bets = (np.log1p(sign * gate.FRACTIONS) for sign in (1, -1))
      found = gate.log_mixture(
        sum(np.multiply.outer(*x) for x in zip((wins, losses), bets, strict=True))
      )
    kept |= found >= gate.needed(config, levels, look)
    naive |= found >= -math.log(0.05)
  rate = kept.any(1).mean()
  assert rate <= config.alpha + 2 * math.sqrt(config.alpha * 0.9 / 2000)
  assert naive.any(1).mean() > 0.5
  assert test == 'betting' or rate > 0.01  # the level is used


def decided(rng, p, q, level, config=CONFIG):
  """A candidate's verdict, look by look."""
  d = differences(rng, config.looks[-1], p, q)
  for number, look in enumerate(config.looks):
    verdict = gate.decide(d[:look], config, level, number)
    if verdict.decision != gate.CONTINUE:
      return verdict
  raise AssertionError('the last look decides')


def test_power_and_early_stops():
  """+10 points at a success of 0.4, one round of a hundred: kept in a third of rounds
  or more, +20 nearly always; those without an effect cost few pairs."""
  rng, level = np.random.default_rng(1), float(gate.levels(CONFIG, 100)[0])
  found = {
    effect: [decided(rng, 0.4, 0.4 + effect, level) for _ in range(40)]
    for effect in (0.0, 0.1, 0.2, -0.2)
  }
  kept = {k: np.mean([v.decision == 'keep' for v in vs]) for k, vs in found.items()}
  assert kept[0.0] == kept[-0.2] == 0 and kept[0.1] > 0.35 and kept[0.2] > 0.85
  pairs = {k: np.mean([v.pairs for v in vs]) for k, vs in found.items()}
  assert pairs[-0.2] < 50 and pairs[0.0] < 200


@pytest.mark.parametrize('test', gate.TESTS)
def test_the_order_of_tasks_is_irrelevant(test):
  config, rng = GateConfig(test=test), np.random.default_rng(2)
  d = rng.choice([-1, -0.3, 0, 0.7, 1], 200)
  first = gate.decide(d, config, 0.001, 2)
  others = [gate.decide(rng.permutation(d), config, 0.001, 2) for _ in range(5)]
  assert all(other == first for other in others)


@pytest.mark.parametrize('test', gate.TESTS)
@pytest.mark.parametrize(
  ('d', 'look', 'options', 'decision', 'reason'),
  [
    ([1.0] * 32, 0, {}, 'keep', 'better'),
    ([0.0] * 20 + [1.0] * 8 + [-1.0] * 4, 0, {}, 'continue', 'evidence'),
    ([-1.0] * 32, 0, {}, 'revert', 'hopeless'),
    ([1.0] * 32, 0, dict(cost=2.5), 'revert', 'effort'),
    ([0.0] * 1024, 5, {}, 'revert', 'not enough evidence'),
    ([1.0] * 32 + [0.0] * 992, 5, {}, 'keep', 'better'),
    ([1.0] * 32 + [0.0] * 992, 5, dict(min_effect=0.1), 'revert', 'below min_effect'),
  ],
)
def test_decisions(test, d, look, options, decision, reason):
  config = GateConfig(test=test, min_effect=options.get('min_effect', 0.02))
  verdict = gate.decide(d, config, 0.3, look, options.get('cost', 1.0))
  assert verdict.decision == decision and reason in verdict.reason


@pytest.mark.parametrize('d', [[], [float('nan')], [1.5]])
def test_no_differences(d):
  with pytest.raises(ValueError, match='gate: differences'):
    gate.decide(d, CONFIG, 0.001, 0)


def test_the_interval_covers():
  """The bootstrap's interval has the true mean in about 95 % of samples."""
  rng, inside = np.random.default_rng(3), 0
  for _ in range(200):
    low, high = gate.interval(differences(rng, 150, 0.4, 0.5))
    inside += low <= 0.1 <= high
  assert 0.88 <= inside / 200 <= 0.99
