"""Evaluation suites against a server of the OpenAI protocol."""

from __future__ import annotations

import asyncio
import json
import pathlib
import types

import pytest

from configs import forge_mixed
from configs import suites as suites_config
from experiments import common
from m2jax import tasks
from m2jax.agents import whitebox
from m2jax.agents.context import ContextConfig
from m2jax.tasks import demonstrations
from m2jax_pipelines import discovery, records, suites
from m2jax_pipelines.tasks import reasoning
from tests.pipelines import model_server
from tests.pipelines.tasks.test_clicks import MISSING as NO_CLICKS

pytest.importorskip('reasoning_gym', reason='pip install -e ./m2jax_pipelines')


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


def test_a_verdict_out_of_range_names_the_task(tmp_path, monkeypatch):
  """It is in no average and no file."""

  async def verify(self, environment, answer):
    return float('nan')

  config, path = _config(count=1, trials=1), tmp_path / 'a.jsonl'
  monkeypatch.setattr(type(reasoning.make(config.specs()[0])), 'verify', verify)
  with (
    model_server.Server(lambda body: 'yes') as server,
    pytest.raises(ExceptionGroup) as failed,
  ):
    _run(config, server, path)
  [error] = failed.value.exceptions
  assert str(error).startswith(f'task {config.specs()[0]}: the verdict is nan')
  assert not path.exists() or not path.read_text()


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


@pytest.mark.parametrize('name', suites_config.SUITES)
def test_a_suite_is_a_row_of_the_documented_table(name):
  """Tasks, trials, context policy and limits are all stated, and the page states the
  same; tasks are of the held-out split."""
  config = common.build(suites.SuiteConfig, suites_config.get_config(name).suite)
  assert config.split == 'held_out' and config.temperature == 1.0
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'pipelines_reasoning.md'
  rows = [line.split(' | ') for line in page.read_text().splitlines()]
  [row] = [r for r in rows if r[0] == f'| `{name}`' and len(r) == 6]
  tasks_, trials, context, tokens, seconds = [cell.strip(' |') for cell in row[1:]]
  assert (int(trials), int(tokens)) == (config.trials, config.agent.max_tokens)
  assert float(seconds) == config.episode_s
  assert tasks_.startswith(str(config.count))
  if dataset := getattr(config.tasks, 'dataset', ''):
    assert f'`{dataset}`' in tasks_
  policy = config.agent.context
  said = f'{policy.policy} at {policy.threshold:.0%}' if policy.policy else 'whole'
  assert context == said.replace('%', ' %')


def test_there_is_a_suite_of_every_pipeline():
  """And one of every kind that mixed-domain RL trains on."""
  datasets = {
    s['tasks'].get('dataset', '').removeprefix('workdir/')
    for s in suites_config.SUITES.values()
  }
  assert set(discovery.names()) <= datasets
  kinds = {suite['tasks']['kind'] for suite in suites_config.SUITES.values()}
  trained = {
    domain['kind'] for domain in forge_mixed.get_config().tasks.domains.values()
  }
  assert trained <= kinds


def _by_teacher(teacher):
  """Answers as the teacher's lesson goes, by the results in the conversation."""

  def answer(body):
    asked = next(m['content'] for m in body['messages'] if m['role'] == 'user')
    [task] = [t for t in teacher.tasks if t.instruction == asked]
    turns = demonstrations.lesson(task, teacher.config, [])
    results = [m['content'] for m in body['messages'] if m['role'] == 'tool']
    try:
      for shown in [None, *results]:
        turn = turns.send(shown)
    except StopIteration as end:
      return {'content': end.value.content}
    function = {'name': turn.tool, 'arguments': json.dumps(dict(turn.arguments))}
    call = {'id': f'c{len(results)}', 'type': 'function', 'function': function}
    return {'content': '', 'tool_calls': [call]}

  return answer


@pytest.mark.parametrize(
  'name',
  [
    'repair',
    pytest.param(
      'clicks', marks=pytest.mark.skipif(bool(NO_CLICKS), reason=NO_CLICKS or '-')
    ),
  ],
)
def test_suites_of_drawn_tasks_are_judged(tmp_path, name):
  """A teacher's calls solve all, calls of nothing none; pages are real ones."""
  values = suites_config.get_config(name).suite
  values.update(count=3, trials=1)
  config = common.build(suites.SuiteConfig, values)
  made = [tasks.make(spec) for spec in config.specs()]
  settings = demonstrations.TeacherConfig.of_kind(name)()
  teacher = types.SimpleNamespace(tasks=made, config=settings)
  with model_server.Server(_by_teacher(teacher)) as server:
    rows = _run(config, server, tmp_path / 'solved.jsonl')
  assert (rows[0].attempts, rows[0].failures, rows[0].success) == (3, 0, 1.0)
  with model_server.Server(lambda body: 'done') as server:
    rows = _run(config, server, tmp_path / 'idle.jsonl')
  assert (rows[0].attempts, rows[0].success) == (3, 0.0)


def test_a_context_policy_without_a_count_of_tokens_is_explained(tmp_path):
  """A server without /tokenize: not judged, and the record says what is missing."""
  agent = whitebox.Config(retries=0, context=ContextConfig(policy='restart'))
  config = _config(count=1, trials=1, agent=agent)
  with model_server.Server(lambda body: None) as server:
    rows = _run(config, server, tmp_path / 'a.jsonl')
  assert rows[0].failures == 1
  [row] = records.read(tmp_path / 'a.jsonl')
  assert 'need POST /tokenize' in row['error']
