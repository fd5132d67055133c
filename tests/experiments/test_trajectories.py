"""The trajectories of a run, printed while its pool is open for writing."""

from __future__ import annotations

import dataclasses

import pytest

from m2jax import records
from m2jax.pool.data_pool import DataPool
from tests import processes


def show(workdir, *flags):
  return processes.run('experiments.trajectories', f'--workdir={workdir}', *flags)


def trajectory(session, item, family, success):
  messages = (
    {'role': 'user', 'content': f'the task of {session} \x1b[2J'},
    {'role': 'assistant', 'content': '[bold]an answer', 'reasoning_content': 'hm'},
  )
  return records.Trajectory(
    session, item, 0, 'a/spec', family, 'answer', success, 0.5, 0, messages=messages
  )


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """Two training trajectories, judged, and an evaluation; the pool stays open."""
  workdir = tmp_path_factory.mktemp('run')
  with DataPool(f'sqlite:///{workdir}/pool.db') as pool:
    for item, (family, success) in enumerate([('find', 1.0), ('trail', 0.5)]):
      pool.submit(records.WorkItem(item, 'a/spec', 1))
      completion = records.Completion(
        f'c{item}', f's{item}', 0, None, None, [1], [2], [-0.5], [3], 'stop', 'ok'
      )
      pool.add_completion(completion)
      pool.add_trajectory(trajectory(f's{item}', item, family, success))
    pool.set_rewards(
      {'s1': records.TrajectoryReward(0.0, 0.0, 0.5, 0.5)}, {'c1': -0.25}
    )
    pool.add_trajectory(
      dataclasses.replace(trajectory('s2', -1, 'find', 0.0), error='no sandbox')
    )
    pool.flush()
    yield workdir


def test_newest_first_with_what_each_turn_got(workdir):
  """Verdict, reward, advantage and text; markup in a model's text, and what would
  control the terminal, is text."""
  done = show(workdir)
  assert done.returncode == 0, done.stderr
  places = [done.stdout.index(f'the task of s{i}') for i in (2, 1, 0)]
  assert places == sorted(places)
  assert 'item 1.0 · trail · success 0.5 · answer · 0.5 s · reward 0.500' in done.stdout
  assert '-0.25 answer  [bold]an answer' in done.stdout
  assert 'no sandbox' in done.stdout
  assert 'the task of s1 ⟨U+001B⟩[2J' in done.stdout and '\x1b' not in done.stdout


@pytest.mark.parametrize(
  'flags, shown',
  [
    (['--phase=rl'], '10'),
    (['--phase=eval'], '2'),
    (['--outcome=success'], '0'),
    (['--outcome=failure', '--count=1'], '2'),
    (['--family=find', '--phase=rl'], '0'),
  ],
)
def test_conditions(workdir, flags, shown):
  """Each flag leaves what it says, and they combine."""
  output = show(workdir, *flags).stdout
  found = [i for i in '210' if f'the task of s{i}' in output]
  assert found == list(shown)


def test_what_is_not_there_is_one_line(workdir, tmp_path):
  """No such trajectory, no run, no database: an error that helps, no traceback."""
  (tmp_path / 'pool.db').write_text('not a database, but long enough to be read as one')
  for done, said in (
    (show(workdir, '--family=none'), 'fewer conditions find more'),
    (show(tmp_path / 'now\x1bhere'), '/now⟨U+001B⟩here: no pool.db or evaluation.db'),
    (show(tmp_path), 'not a data pool'),
  ):
    assert done.returncode == 2 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1
