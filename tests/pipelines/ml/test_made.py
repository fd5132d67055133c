"""Made ML tasks: the ladder played through the gateway, and what an agent can read."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import pytest

from m2jax import tasks
from m2jax.agents import episodes, whitebox
from m2jax.tasks import harbor
from m2jax.tasks.terminal import shell
from m2jax_pipelines import discovery, make, ml
from m2jax_pipelines.ml import grade, ladder
from tests.gateway.conftest import response_text, serve, tok

__all__ = ['serve', 'tok']
_TOKENS = 60_000


def test_the_statement_and_the_files_have_no_labels():
  """For every problem whose data is here, drawn twice."""
  if reason := discovery.unavailable('ml'):
    pytest.skip(reason)
  for name in ('cultivars', 'tumours', 'progression', 'digits', 'languages'):
    problem, config = ml.PROBLEMS[name], ml.Config()
    data = ml.drawn(config, name, 'a')
    files, truth = ladder.files(problem, data), ladder.truth(data)
    assert len(truth) == len(data.test) == len({row['id'] for row in data.test})
    assert b'target' not in files['test.csv'].splitlines()[0]
    assert ml.drawn(config, name, 'a') == data  # a continued run has the same
    other = ml.drawn(config, name, 'b').test  # the salt decides
    assert {row['id'] for row in other} != set(truth)
    with np.errstate(all='ignore'):
      sample = grade.score(files['sample_submission.csv'], truth, problem.metric)
    assert np.isfinite(sample)
    public = {tuple(v) for v in data.public if not isinstance(v, str)}
    ours = {tuple(v for k, v in row.items() if k != 'id') for row in data.test}
    assert not any(row[: len(mine)] == mine for row in public for mine in ours)


@pytest.fixture(scope='module')
def spec(tmp_path_factory):
  if reason := discovery.unavailable('ml'):
    pytest.skip(reason)
  dataset = tmp_path_factory.mktemp('ml')
  config = ml.Config(problems=('cultivars',), count=1, search=())
  assert asyncio.run(make.run(config, dataset, show=False)).tasks == 1
  return tasks.spec(harbor.Config(dataset=str(dataset)), 'train', 0)


@pytest.mark.long
def test_the_ladder_is_played_through_the_gateway(spec, serve, tok):
  """A scripted agent that writes a rung's program gets the reward of its score."""
  found = tasks.make(spec).directory
  scores = found.metadata.details['ladder']
  limits = json.loads(found.tests()['spec.json'])
  rungs = ['constant', 'complete', 'ward', found.metadata.details['best']]
  played = iter(rungs)

  def policy(request):
    text = tok.decode(request.prompt_ids)
    if '<response>' in text:
      return tok.encode(response_text('that is all', 'done'))
    program = ladder.script(ml.PROBLEMS['cultivars'].ladder[next(played)])
    data = base64.b64encode(program.encode()).decode()
    command = f'echo {data} | base64 -d > a.py; python3 a.py'
    return tok.encode(
      response_text('go', calls=[(shell.NAME, {shell.ARGUMENT: command})])
    )

  gateway, _, _ = serve(
    policy, accept_unknown_keys=False, engine_options={'context_tokens': 4 * _TOKENS}
  )
  agent = whitebox.Config(max_tokens=_TOKENS, retries=0)
  episode = episodes.EpisodeConfig(agent=agent, limits=make.LIMITS, concurrency=1)
  with episodes.Runner(episode, gateway.base_url, gateway.sessions) as runner:
    out = runner.group(spec, len(rungs), item=0).result(500)
  paid = [grade.reward(scores[rung], limits)[0] for rung in rungs]
  assert [t.success for t in out] == pytest.approx(paid), out
  assert paid == sorted(paid) and paid[0] == 0.0 and paid[-1] == 1.0


@pytest.mark.long
def test_packages_with_the_data_are_not_there(spec):
  """scikit-learn is, without its data files."""
  task = tasks.make(spec)
  program = (
    'import importlib.util, sklearn.cluster\n'
    'from sklearn import datasets\n'
    'for load in (datasets.load_wine, datasets.load_digits):\n'
    '  try: load()\n'
    '  except FileNotFoundError: continue\n'
    '  raise SystemExit("there is data")\n'
    'for name in ("statsmodels", "skimage", "vega_datasets", "django"):\n'
    '  assert importlib.util.find_spec(name) is None, name\n'
  )

  async def seen():
    async with task.open(limits=make.LIMITS) as environment:
      await environment.box.write('a.py', program.encode())
      return await environment.box.exec('python3 a.py')

  done = asyncio.run(seen())
  assert done.returncode == 0, done.stderr
  dockerfile = (task.directory.path / 'environment' / 'Dockerfile').read_text()
  assert "-path '*/sklearn/datasets/data'" in dockerfile
