"""How benchmarks.speed_reward adds up; it runs jobs for minutes itself."""

from __future__ import annotations

import pytest

from benchmarks import speed_reward
from configs import forge_speed
from experiments import common
from m2jax.forge.config import ForgeConfig


def test_the_config_is_one_of_the_job():
  """With β = 0: the benchmark sets it."""
  built = common.build(ForgeConfig, forge_speed.get_config('smoke').lock())
  assert built.rl.learner.reward.beta == 0 and built.tasks.kind == 'fetch'
  assert set(built.sft.families) == set()
  with pytest.raises(ValueError, match='smoke'):
    forge_speed.get_config('fast')


def record(stage, family, calls, **values):
  return dict(
    phase='eval',
    stage=stage,
    split='held_out',
    temperature=1.0,
    family=family,
    calls=calls,
    **values,
  )


def test_measurements_are_of_one_stage_and_weighted():
  """Shares by calls, seconds and successes by tasks; chains apart."""
  values = dict(n=10, successes=9.0, wall_s=0.5, parallel_calls=0.5)
  records = [
    record('after RL', 'independent_2', 2, **values),
    record('after RL', 'independent_4', 4, **values | dict(parallel_calls=0.8, n=20)),
    record('after RL', 'chain_2', 2, **values | dict(wall_s=0.7)),
    record('after RL', 'all', None, **values),
    record('after SFT', 'chain_2', 2, **values | dict(wall_s=9.0)),
    record('after RL', 'chain_2', 2, **values) | dict(temperature=0.0),
  ]
  found = speed_reward.measure(records, 'after RL')
  assert found['success/independent'] == pytest.approx(18 / 30)
  assert found['parallel'] == pytest.approx((0.5 * 20 + 0.8 * 80) / 100)
  assert found['wall_s/chain'] == pytest.approx(0.7)
  rows = [
    {'arm': 'beta0', 'SFT': found, 'RL': found},
    {'arm': 'beta0.5', 'RL': found | {'parallel': 0.9}},
  ]
  *_, sft, zero, fast = speed_reward.table(rows).splitlines()
  assert sft.startswith('| after SFT | 1 | 0.60 | 0.90 | 0.74 |')
  assert zero.startswith('| RL, β = 0 | 1 |')
  assert fast == '| RL, β = 0.5 | 1 | 0.60 | 0.90 | 0.90 | 0.50 | 0.70 | 0.71 |'
