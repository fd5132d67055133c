"""Made tasks, played: a pipeline's task through gateway, agent, sandbox and learner.

Each pipeline makes one real small task. A scripted policy acts in its sandbox through
the real gateway, as a model would: one episode carries out the task's solution by tool
calls, the other does nothing and answers. The verdicts are 1 and 0, and what the
learner would train is what the engine sampled, token by token.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from m2jax import tasks
from m2jax.agents import episodes, whitebox
from m2jax.rl import rewards, samples
from m2jax.tasks import harbor
from m2jax.tasks.terminal import shell
from m2jax_pipelines import (
  appdev,
  deep_search,
  discovery,
  llm,
  make,
  ml,
  reasoning,
  slides,
  spreadsheets,
)
from m2jax_pipelines import terminal_gym as gym
from m2jax_pipelines.source import Tasks
from tests.gateway.conftest import response_text, serve, tok
from tests.pipelines import as_harbor
from tests.pipelines.swe import package
from tests.pipelines.terminal_gym.test_stages import one_document

__all__ = ['serve', 'tok']

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
  sampled = [(tuple(r.prompt_ids), tuple(f.tokens)) for r, f in engine.results]
  credit = rewards.advantages(group, rewards.RewardConfig())
  (trained,) = samples.from_groups([credit])
  assert sorted(sampled) == sorted(
    (tuple(s.tokens[: s.prompt_length]), tuple(s.tokens[s.prompt_length :]))
    for s in trained
  )
  for sample in trained:
    assert (sample.weights > 0).all() and (sample.advantages != 0).all()
  signs = [np.sign(c.advantages[0]) for c in credit.credits]
  assert signs == [1.0, -1.0]


@dataclasses.dataclass(frozen=True)
class Made:
  """A dataset with one task of a pipeline, and the task's spec."""

  dataset: Path
  spec: str


def _swe(dataset, patch):
  package.offline(patch)
  package.site(dataset)
  return dataclasses.replace(package.CONFIG, count=1, families=('bug',))


def _terminal_gym(dataset, patch):
  one_document(dataset / 'find.1.gz', patch)
  return gym.Config(count=1, depths=1, trials=1)


# Pipeline → packages, and the settings of a run that makes one task.
PIPELINES = {
  'reasoning': (
    ['reasoning_gym'],
    lambda *_: reasoning.Config(generators=('gcd',), levels=(0,), count=1),
  ),
  'spreadsheets': (['formulas'], lambda *_: spreadsheets.Config(count=1)),
  'slides': (['pptx'], lambda *_: slides.Config(count=1)),
  'deep_search': (
    ['bm25s'],
    lambda *_: deep_search.Config(corpora=('debian',), count=1),
  ),
  'terminal_gym': ([], _terminal_gym),
  'swe': ([], _swe),
  'appdev': (
    ['playwright'],
    lambda *_: appdev.Config(kinds=('counter',), count=1),
  ),
  'ml': (
    ['sklearn'],
    lambda *_: ml.Config(problems=('cultivars',), count=1, search=()),
  ),
}
LONG = 'spreadsheets', 'slides', 'deep_search', 'swe', 'appdev', 'ml'
NAMES = [
  pytest.param(name, marks=[pytest.mark.long] if name in LONG else [])
  for name in PIPELINES
]


def test_every_pipeline_is_played():
  """A new one needs a line in PIPELINES."""
  assert set(PIPELINES) == set(discovery.names())


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """`made(name) -> Made`; each pipeline makes its task once."""
  found: dict[str, Made] = {}

  def one(name):
    if name not in found:
      packages, config_of = PIPELINES[name]
      for module in ('datasketch', *packages):
        pytest.importorskip(module, reason='pip install -e ./m2jax_pipelines')
      if reason := discovery.unavailable(name):
        pytest.skip(reason)
      dataset = tmp_path_factory.mktemp(name)
      with pytest.MonkeyPatch.context() as patch:
        config = config_of(dataset, patch)
        summary = asyncio.run(make.run(config, dataset, show=False))
      assert summary.tasks == 1, 'no candidate was admitted'
      [split] = [s for s in harbor.SPLITS if len(Tasks(dataset, s))]
      spec = tasks.spec(harbor.Config(dataset=str(dataset)), split, 0)
      found[name] = Made(dataset, spec)
    return found[name]

  return one


@pytest.mark.parametrize('name', NAMES)
def test_an_agent_plays_a_made_task(made, serve, tok, name):
  """Doing the work gets 1, doing nothing 0; what is trained is what was sampled."""
  spec = made(name).spec
  author = tasks.make(spec).directory.metadata.details['author']
  assert author == llm.SCRIPTED  # every record says who wrote the statement
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


@pytest.mark.skipif(bool(as_harbor.unavailable), reason=as_harbor.unavailable or '-')
@pytest.mark.parametrize('name', NAMES)
def test_a_made_task_is_graded_where_harbor_runs_it(made, tmp_path, name):
  """In Harbor's places, with none of our variables: tests/ has all that judges."""
  directory = tasks.make(made(name).spec).directory
  assert as_harbor.reward(directory, tmp_path / 'solved', solve=True) == 1.0
  assert as_harbor.reward(directory, tmp_path / 'nothing', solve=False) < 1.0


@pytest.mark.long
def test_a_task_is_admitted_with_evidence(made):
  """Of an app: what was seen of it is kept, and is in the report."""
  dataset = made('appdev').dataset
  names = {path.name for path in (dataset / 'evidence').rglob('*.*')}
  assert {'criteria.txt', 'dom.txt', 'width-1280.png', 'width-375.png'} <= names
  report = (dataset / 'report.html').read_text()
  assert 'data:image/png;base64,' in report and 'interaction/undo' in report
