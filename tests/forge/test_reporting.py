"""The report of a run shows each turn as the learner trained it."""

from __future__ import annotations

import dataclasses
import html
import pathlib
import re

import numpy as np
import pytest

from m2jax.forge import reporting
from m2jax.observe.metrics import MetricsWriter
from m2jax.pool import data_pool
from m2jax.records import Completion, Trajectory, WorkItem
from m2jax.rl import rewards
from tests.forge import forge_worker

REWARD = rewards.RewardConfig(alpha=0.2, gamma=0.5)


def completion(session: str, turn: int, status='ok', finish='stop') -> Completion:
  return Completion(
    id=f'{session}/{turn}',
    session=session,
    turn=turn,
    parent=None,
    fork_reason=None,
    prompt_ids=(1, 2, turn),
    response_ids=(7,) * (turn + 3),
    logprobs=(-1.0,) * (turn + 3),
    versions=(turn,) * (turn + 3),
    finish_reason=finish,
    status=status,
  )


def chat(turns: int) -> tuple[dict, ...]:
  messages = [{'role': 'user', 'content': 'a question'}]
  for turn in range(turns):
    messages.append({'role': 'assistant', 'content': f'says {turn}'})
    messages.append({'role': 'tool', 'content': 'an observation'})
  return tuple(messages)


@pytest.fixture
def run(tmp_path):
  """A workdir with one trained group: three turns that succeed, one that fails."""
  workdir: pathlib.Path = tmp_path
  with (
    MetricsWriter(workdir, use_tensorboard=False) as metrics,
    data_pool.DataPool(f'sqlite:///{workdir}/pool.db') as pool,
  ):
    metrics.write('rl', 1, loss=0.5)
    pool.submit(WorkItem(0, 'task', 2))
    for turn, status, finish in (
      (0, 'invalid_json', 'stop'),
      (1, 'ok', 'cancelled'),  # the agent never saw it: no message, not trained
      (2, 'ok', 'stop'),
      (3, 'ok', 'stop'),
    ):
      pool.add_completion(completion('good', turn, status, finish))
    pool.add_completion(completion('bad', 0))
    for rank, (session, success, turns) in enumerate([('good', 1, 3), ('bad', 0, 1)]):
      end = Trajectory(session, 0, rank, 'task', session, 'answer', success, 1.0, 0)
      pool.add_trajectory(dataclasses.replace(end, messages=chat(turns)))
    pool.complete(0)
    pool.take([0], 1)
    group = rewards.advantages(pool.group(0), REWARD)
    pool.set_rewards(rewards.by_session([group]), rewards.by_completion([group]))
    pool.flush()
    yield workdir, pool, group


def shown_turns(workdir: pathlib.Path, family: str) -> list[tuple[str, float]]:
  """(words, advantage) of each turn of the family's one trajectory on the page."""
  page = html.unescape((workdir / 'report.html').read_text('utf-8'))
  (episode,) = re.findall(
    f'<details class="episode"[^>]*data-family="{family}".*?</details>', page, re.S
  )
  pattern = r'<p class="turn">(.*?)(?: · advantage <b class="\w+">(.*?)</b>)?</p>'
  return [(words, float(a or 'nan')) for words, a in re.findall(pattern, episode)]


def test_each_turn_shows_its_own_advantage(run):
  """Not the first turn's for all; a completion without a message shifts nothing."""
  workdir, pool, group = run
  reporting.write(forge_worker.config(), workdir, pool)
  good, bad = group.credits
  assert len(set(good.advantages)) == 3  # γ and the format penalty tell turns apart
  turns = shown_turns(workdir, 'good')
  np.testing.assert_allclose([a for _, a in turns], good.advantages, atol=5e-4)
  assert [words for words, _ in turns] == [
    'turn 1 · policy 0 · 3 tokens · invalid_json',
    'turn 2 · policy 2 · 5 tokens · ok',
    'turn 3 · policy 3 · 6 tokens · ok',
  ]
  ((_, advantage),) = shown_turns(workdir, 'bad')
  assert advantage == pytest.approx(bad.advantages[0], abs=5e-4)


def test_advantages_outlive_the_completions(run):
  """Pruning drops tokens, not what the turns were worth."""
  workdir, pool, group = run
  assert pool.prune(pool.ledger(1)) == 5
  reporting.write(forge_worker.config(), workdir, pool)
  turns = shown_turns(workdir, 'good')
  np.testing.assert_allclose(
    [a for _, a in turns], group.credits[0].advantages, atol=5e-4
  )
  assert turns[1][0] == 'turn 2 · policy 2 · 5 tokens · ok'


def test_the_password_of_the_pool_is_not_shown(run):
  workdir, pool, _ = run
  config = forge_worker.config()
  roles = dataclasses.replace(config.roles, pool_url='postgresql://me:secret@db/pool')
  reporting.write(dataclasses.replace(config, roles=roles), workdir, pool)
  page = (workdir / 'report.html').read_text('utf-8')
  assert 'postgresql://me:***@db/pool' in page and 'secret' not in page
