"""Evaluation suites against a server of the OpenAI protocol."""

from __future__ import annotations

import asyncio

import pytest

from m2jax.agents import whitebox
from m2jax.pipelines import records, suites
from m2jax.tasks import reasoning
from tests.pipelines import model_server

pytest.importorskip('reasoning_gym', reason='pip install "m2jax[pipelines]"')


def _config(**changes):
  options = dict(
    tasks=reasoning.Config(held_out=('products', 'aiw')),
    agent=whitebox.Config(retries=0),
    count=6,
    trials=2,
  )
  return suites.SuiteConfig(**{**options, **changes})


def _run(config, server, path):
  return asyncio.run(suites.run(config, server.url, 'm', path))


def _right(config):
  answers = {}
  for spec in config.specs():
    task = reasoning.make(spec)
    answers[task.instruction] = f'<answer>{task.answer}</answer>'
  return lambda body: answers[body['messages'][-1]['content']]


def test_a_table_has_families_trials_and_intervals(tmp_path):
  """A task, not an attempt, is the unit of the interval."""
  config = _config()
  right = _right(config)

  def only_products(body):
    asked = body['messages'][-1]['content']
    return right(body) if '*' in asked else '<answer>?</answer>'

  with model_server.Server(only_products) as server:
    rows = {r.family: r for r in _run(config, server, tmp_path / 'a.jsonl')}
  assert set(rows) == {'all', 'products', 'aiw'}
  assert rows['products'].success == 1.0 and rows['aiw'].success == 0.0
  assert rows['all'].tasks == 6 and rows['all'].attempts == 12
  assert rows['all'].low < rows['all'].success < rows['all'].high
  assert 'tools' not in server.bodies[0]  # an empty list is refused by servers
  assert server.bodies[0]['temperature'] == 1.0 and server.bodies[0]['top_k'] == 40


def test_a_suite_continues_and_does_not_judge_failures(tmp_path):
  """An infrastructure failure is no 0; the next run tries it again, and only it."""
  config, path = _config(concurrency=1), tmp_path / 'a.jsonl'
  right = _right(config)
  count = 0

  def sometimes(body):
    nonlocal count
    count += 1
    return right(body) if count <= 5 else None

  with model_server.Server(sometimes) as server:
    rows = _run(config, server, path)
  assert (rows[0].attempts, rows[0].failures, rows[0].success) == (5, 7, 1.0)
  with model_server.Server(right) as server:
    rows = _run(config, server, path)
    assert len(server.bodies) == 7
  assert (rows[0].attempts, rows[0].failures) == (12, 0)
  assert len(records.read(path)) == 19


def test_settings_that_decide_results_are_told_apart():
  one = suites.digest(_config())
  assert one == suites.digest(_config(concurrency=3, count=9))
  assert one != suites.digest(_config(temperature=0.0))
