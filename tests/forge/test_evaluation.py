"""Evaluation of the engine's weights: what is judged, and what is not."""

from __future__ import annotations

import concurrent.futures
import types

import pytest

from m2jax.agents import episodes
from m2jax.forge import evaluation
from m2jax.forge.errors import RolloutsFailed
from m2jax.records import Trajectory
from m2jax.tasks import terminal

HANGS = -1.0


class Runner:
  """Episodes that end with the success `judge(task)`, None for an infrastructure
  failure, or never."""

  def __init__(self, judge):
    self._judge = judge

  def group(self, spec, count, **_):
    task = terminal.make(spec)
    success = self._judge(task)
    end = Trajectory(
      session=spec,
      item=-1,
      rank=0,
      task=spec,
      family=task.family,
      end_reason='infrastructure' if success is None else 'answer',
      error='no sandbox',
      success=max(0.0, success or 0.0),
      wall_s=0.0,
      tool_calls=0,
    )
    future = concurrent.futures.Future()
    if success != HANGS:
      future.set_result([end] * count)
    return future


def success_on(judge, tasks=60, deadline_s=600.0, stopped=None):
  config = types.SimpleNamespace(
    tasks=terminal.TerminalConfig(),
    episodes=episodes.EpisodeConfig(evaluation_deadline_s=deadline_s),
  )
  pool = types.SimpleNamespace(add_trajectory=lambda trajectory: None)
  engine = types.SimpleNamespace(alive=not stopped, stopped_reason=stopped)
  running = types.SimpleNamespace(
    config=config, pool=pool, runner=Runner(judge), scheduler=engine
  )
  return evaluation.success_on(running, 'dev', tasks, 1.0)


def test_cells_add_up_to_all():
  """Each family and chain length has its own count, and together they are all."""
  found = success_on(lambda task: float(task.baseline_calls < 3))
  total, *cells = found
  assert (total.family, total.calls, total.n) == ('all', None, 60)
  assert sum(cell.n for cell in cells) == 60
  assert sum(cell.successes for cell in cells) == total.successes > 0
  assert {cell.successes == cell.n for cell in cells if cell.calls < 3} == {True}


def test_failures_of_the_machine_are_not_judged():
  """Half of the episodes broke: the rate is that of the others."""

  def judge(task):
    index = int(task.spec.rpartition('/')[2].partition('?')[0])
    return None if index % 2 else 1.0

  total, *_ = success_on(judge)
  assert total.successes == total.n == 30


def test_an_evaluation_that_judged_nothing_is_an_error():
  """A success rate of 0 would be wrong; the error has the reason."""
  with pytest.raises(RolloutsFailed, match='60 episodes.*no sandbox'):
    success_on(lambda task: None)


def test_an_engine_that_stopped_ends_the_evaluation():
  """A rate of the episodes that ended before would be of other tasks."""
  with pytest.raises(RolloutsFailed, match='has stopped: no memory'):
    success_on(lambda task: HANGS, stopped='no memory')


def test_what_hangs_ends_with_the_deadline():
  """An episode that never ends costs itself, and is no failure of the policy."""
  first = terminal.spec('dev', 0)
  total, *_ = success_on(
    lambda task: HANGS if task.spec == first else 1.0, deadline_s=0.5
  )
  assert total.successes == total.n == 59
