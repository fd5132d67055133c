"""Agents, verifiers and roles that never end or come: a bound, and a message."""

from __future__ import annotations

import time

import pytest

from m2jax.agents import episodes
from m2jax.forge import shared
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.roles import agents, learner
from tests.faults import stuck


class Sessions:
  def open(self, key, mode='training', name=None):
    pass

  def close(self, key):
    pass


def runner_of(where, **fields):
  stuck.BEGAN.clear()
  config = episodes.EpisodeConfig(agent=stuck.Config(where=where), **fields)
  return episodes.Runner(config, 'http://127.0.0.1:9/v1', Sessions())


def group(runner, index, count=2):
  return runner.group(f'tests.forge.roles.sums/train/0/{index}', count)


def test_a_verifier_that_hangs():
  """Its episodes are infrastructure failures, never a reward of 0; others go on."""
  with runner_of('verdict', verdict_timeout_s=0.2) as runner:
    hung, fine = group(runner, 0), group(runner, 1)
    assert [t.success for t in fine.result(10)] == [1.0, 1.0]
    ended = hung.result(10)
  assert [t.end_reason for t in ended] == ['infrastructure'] * 2
  assert 'no verdict within 0.2 s (episodes.verdict_timeout_s)' in ended[0].error


def test_code_that_blocks_every_episode(monkeypatch):
  """The agents' role stops with the reason; its items go to others."""
  with runner_of('loop') as runner:
    agents.check_not_blocked(runner)
    monkeypatch.setattr(agents, '_BLOCKED_S', 0.2)
    group(runner, 0, count=1)
    assert stuck.BEGAN.wait(30)
    with pytest.raises(RolloutsFailed, match='blocks the event loop'):
      agents.check_not_blocked(runner)


def test_an_agent_that_ignores_its_cancellation(monkeypatch, caplog):
  """The job ends all the same, and says what was left."""
  monkeypatch.setattr(episodes, '_CLOSE_S', 0.2)
  with runner_of('cancellation') as runner:
    group(runner, 0)
    assert stuck.BEGAN.wait(30)
    began_s = time.monotonic()
  assert time.monotonic() - began_s < 2.0
  assert 'ignores its cancellation' in caplog.text


class Away:
  """The gateway, the publisher of weights and the pool of a learner that is alone."""

  begun_lineage = 0

  def health(self):
    return False, {}

  def publish(self, *args):
    pass


def test_a_wait_for_another_role_ends(monkeypatch):
  """One that was never there is awaited for a day, one that was lost not so long."""
  away = Away()
  weights = learner.PublishedWeights(away, None, away, away)
  weights.update_weights({}, 0)
  monkeypatch.setattr(shared, 'WAIT_S', 0.5)
  began_s = time.monotonic()
  with pytest.raises(RolloutsFailed, match='waited 0.5 s for gateway and engine'):
    weights.wait_until_served(0.1)
  assert time.monotonic() - began_s > 0.5
  away.health = lambda: (True, {'policy_version': 10})
  weights.wait_until_served(0.1)
  away.health = lambda: (False, {})
  with pytest.raises(RolloutsFailed, match='waited 0.1 s for gateway and engine'):
    weights.wait_until_served(0.1)
