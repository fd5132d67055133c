"""Made tasks, played: a pipeline's task through gateway, agent, sandbox and learner.

Each pipeline makes one real small task. A scripted policy acts in its sandbox through
the real gateway, as a model would: one episode carries out the task's solution by tool
calls, the other does nothing and answers. The verdicts are 1 and 0, and what the learner
would train is what the engine sampled, token by token.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses

import numpy as np
import pytest

from m2jax import pipelines, tasks
from m2jax.agents import episodes, whitebox
from m2jax.pipelines import appdev, deep_search, make, reasoning, slides, spreadsheets
from m2jax.pipelines import terminal_gym as gym
from m2jax.rl import rewards, samples
from m2jax.tasks import harbor
from m2jax.tasks.terminal import shell
from tests.gateway.conftest import response_text, serve, tok
from tests.pipelines.appdev.conftest import sites
from tests.pipelines.swe import package
from tests.pipelines.swe.test_stages import _offline
from tests.pipelines.terminal_gym.test_stages import documents

__all__ = ['documents', 'serve', 'sites', 'tok']

pytest.importorskip('datasketch', reason='pip install m2jax[pipelines]')
_IDLE = response_text('no idea', 'done')
_LONGEST_TOKENS = 60_000  # a solution's files are in the calls


def _calls(task: harbor.HarborTask) -> list[str]:
  """Commands that carry out a task's own solution."""
  write = [
    f'mkdir -p "$(dirname .solution/{path})"; printf %s '
    f'{base64.b64encode(data).decode()} | base64 -d > .solution/{path}'
    for path, data in task.directory.solution().items()
  ]
  solve = (
    'M2JAX_SOLUTION="$PWD/.solution" M2JAX_WORKSPACE="$PWD" bash .solution/solve.sh\n'
    'code=$?; rm -rf .solution; exit $code'
  )
  return ['\n'.join(write), solve]


def _policy(tok, task):
  """Solves the task in the first episode, and gives up at once in the second."""
  commands, begun = _calls(task), 0

  def policy(request):
    nonlocal begun
    done = tok.decode(request.prompt_ids).count('<response>')
    if not done:
      begun += 1
      if begun == 2:
        return tok.encode(_IDLE)
    if done == len(commands):
      return tok.encode(response_text('it is solved', 'done'))
    call = shell.NAME, {shell.ARGUMENT: commands[done]}
    return tok.encode(response_text('go on', calls=[call]))

  return policy


def _trains_what_was_sampled(group, engine):
  """Both episodes are trained, on all that the engine sampled and on nothing else."""
  sampled = {tuple(r.prompt_ids): found.tokens for r, found in engine.results}
  credit = rewards.advantages(group, rewards.RewardConfig())
  (trained,) = samples.from_groups([credit])
  assert len(trained) == len(engine.results) == len(sampled)
  for sample in trained:
    prompt = tuple(sample.tokens[: sample.prompt_length])
    np.testing.assert_array_equal(sample.tokens[len(prompt) :], sampled[prompt])
    assert (sample.weights > 0).all() and (sample.advantages != 0).all()
  signs = [np.sign(c.advantages[0]) for c in credit.credits]
  assert signs == [1.0, -1.0]


def _play(serve, tok, config, dataset):
  """Makes a task, and plays it twice."""
  made = asyncio.run(pipelines.run(config, dataset, show=False))
  assert made.tasks == 1, 'no candidate was admitted'
  (split,) = [s for s in harbor.SPLITS if len(pipelines.Tasks(dataset, s))]
  spec = tasks.spec(harbor.Config(dataset=str(dataset)), split, 0)
  gateway, engine, records = serve(
    _policy(tok, tasks.make(spec)),
    accept_unknown_keys=False,
    engine_options={'context_tokens': 4 * _LONGEST_TOKENS},
  )
  agent = whitebox.Config(max_tokens=_LONGEST_TOKENS, retries=0)
  episode = episodes.EpisodeConfig(agent=agent, limits=make.LIMITS, concurrency=1)
  with episodes.Runner(episode, gateway.base_url, gateway.sessions) as runner:
    out = runner.group(spec, 2, item=0).result(500)
  assert [t.end_reason for t in out] == ['answer'] * 2, out
  assert [t.success for t in out] == [1.0, 0.0], out
  assert [(t.tool_calls, t.tool_errors) for t in out] == [(2, 0), (0, 0)]
  group = [(t, [r for r in records if r.session == t.session]) for t in out]
  _trains_what_was_sampled(group, engine)


def test_reasoning(serve, tok, tmp_path):
  pytest.importorskip('reasoning_gym', reason='pip install m2jax[pipelines]')
  config = reasoning.Config(generators=('gcd',), levels=(0,), count=1)
  _play(serve, tok, config, tmp_path)


def test_spreadsheets(serve, tok, tmp_path):
  pytest.importorskip('formulas', reason='pip install m2jax[pipelines]')
  _play(serve, tok, spreadsheets.Config(count=1), tmp_path)


def test_slides(serve, tok, tmp_path):
  pytest.importorskip('pptx', reason='pip install m2jax[pipelines]')
  _play(serve, tok, slides.Config(count=1), tmp_path)


@pytest.mark.long
def test_deep_search(serve, tok, tmp_path):
  pytest.importorskip('bm25s', reason='pip install m2jax[pipelines]')
  _play(serve, tok, deep_search.Config(corpora=('debian',), count=1), tmp_path)


def test_terminal_gym(serve, tok, tmp_path, documents):
  config = gym.Config(count=1, depths=1, trials=1, held_out=())
  _play(serve, tok, config, tmp_path)


@pytest.mark.long
def test_swe(serve, tok, tmp_path, monkeypatch):
  _offline(monkeypatch)
  package.site(tmp_path)
  config = dataclasses.replace(package.CONFIG, count=1, families=('bug',))
  _play(serve, tok, config, tmp_path)


@pytest.mark.long
def test_appdev(serve, tok, tmp_path, sites):
  """In a browser: a page that was built by tool calls passes, none fails."""
  _play(serve, tok, appdev.Config(kinds=('counter',), count=1), tmp_path)
