"""The agent `draft_improve`, with scripted answers: plumbing, no model is tried."""

from __future__ import annotations

import dataclasses
import random

import pytest

from m2jax.agents import episodes
from m2jax_pipelines.ml import agent
from m2jax_pipelines.ml.agent import DEBUG, DRAFT, IMPROVE, Node
from tests.gateway.conftest import response_text, serve, tok
from tests.pipelines.ml.test_grade import task_of
from tests.pipelines.model_server import Server

__all__ = ['serve', 'tok']


def _config(**changes) -> agent.Config:
  return dataclasses.replace(agent.Config(retries=0, script_s=5.0), **changes)


def test_drafts_come_first_then_repairs_and_the_best():
  config, rng = _config(drafts=2, debug_probability=1.0), random.Random(0)
  assert agent.choose([], config, rng) == (DRAFT, None)
  good, failed = Node(0, DRAFT, score=0.5), Node(1, DRAFT)
  assert agent.choose([good], config, rng) == (DRAFT, None)
  assert agent.choose([good, failed], config, rng) == (DEBUG, failed)
  never = dataclasses.replace(config, debug_probability=0.0)
  better = Node(2, IMPROVE, good, score=0.7)
  assert agent.choose([good, failed, better], never, rng) == (IMPROVE, better)
  assert agent.choose([failed, failed], never, rng) == (DRAFT, None)  # none is good
  failed.debugged = config.max_debug_depth
  assert agent.choose([good, failed], config, rng) == (IMPROVE, good)
  failed.debugged, failed.leaf = 0, False  # its repair is a node of its own
  assert agent.choose([good, failed], config, rng) == (IMPROVE, good)


def _answer(score, value) -> str:
  return (
    f'Use {value}.\n```python\n'
    "ids = [line.split(',')[0] for line in open('sample.csv')][1:]\n"
    "with open('submission.csv', 'w') as file:\n"
    f"  file.write('id,target\\n' + ''.join(f'{{i}},{value}\\n' for i in ids))\n"
    f"print('validation: {score}')\n```"
  )


_BEST = "```python\nimport shutil\nshutil.copy('best', 'submission.csv')\n"
ANSWERS = [
  'no program here',
  _answer(0.2, 3),
  _answer('nan', 1),  # its score is none
  '```python\nraise SystemExit("broken")\n```',
  '```python\nwhile True: print("x" * 999)\n```',
  _BEST + 'print("validation: 1.2.3")\nprint("validation: 0.9")\n```',
]


def _episode(task, config, url):
  class Sessions:
    def open(self, key, mode='', name=None):
      return None

    def close(self, key):
      return None

  runner = episodes.EpisodeConfig(agent=config, concurrency=1)
  with episodes.Runner(runner, url, Sessions()) as running:
    [found] = running.group(task.spec, 1).result(120)
  return found


def test_the_best_program_is_submitted(tmp_path):
  """After programs that fail in every way; the model sees why."""
  answers = iter(ANSWERS)
  with Server(lambda body: next(answers)) as server:
    task = task_of(tmp_path)
    config = _config(steps=6, drafts=6, script_s=2.0)
    ended = _episode(task, config, server.url)
  assert (ended.end_reason, ended.success) == ('answer', 1.0), ended
  assert ended.answer == 'program 5, validation 0.9'
  assert ended.tool_calls == 6  # five programs, and the last copy
  prompts = [body['messages'][-1]['content'] for body in server.bodies]
  assert all('Predict.' in prompt for prompt in prompts)
  assert '- 0.2: Use 3.' in prompts[2] and 'different' in prompts[2]


def test_a_failed_program_is_shown_with_its_output(tmp_path):
  answers = iter([ANSWERS[3], ANSWERS[0], _answer(0.5, 3), 'none'])
  with Server(lambda body: next(answers)) as server:
    config = _config(steps=4, drafts=1, debug_probability=1.0)
    ended = _episode(task_of(tmp_path), config, server.url)
  prompts = [body['messages'][-1]['content'] for body in server.bodies]
  assert 'raise SystemExit' in prompts[1] and 'broken' in prompts[1]
  assert 'has no program' in prompts[2]
  assert 'should raise its score, 0.5' in prompts[3]
  assert ended.end_reason == 'answer' and ended.success < 0.5


@pytest.mark.parametrize(
  'answer, end', [('nothing', 'max_turns'), (503, 'infrastructure')]
)
def test_without_a_program_there_is_no_answer(tmp_path, answer, end):
  with Server(lambda body: answer) as server:
    ended = _episode(task_of(tmp_path), _config(steps=3), server.url)
  assert (ended.end_reason, ended.success) == (end, 0.0)


def test_through_the_gateway_what_was_sampled_is_recorded(tmp_path, serve, tok):
  """Each step is a chat of its own in one session."""
  answers = [_answer(0.2, 3), ANSWERS[5]]

  def policy(request):
    return tok.encode(response_text('think', answers[len(engine.results) % 2]))

  gateway, engine, records = serve(
    policy, accept_unknown_keys=False, engine_options={'context_tokens': 40_000}
  )
  config = _config(steps=2, drafts=2, max_tokens=8000)
  runner = episodes.EpisodeConfig(agent=config, concurrency=1)
  with episodes.Runner(runner, gateway.base_url, gateway.sessions) as running:
    [ended] = running.group(task_of(tmp_path).spec, 1, item=0).result(120)
  assert ended.success == 1.0, ended
  mine = [record for record in records if record.session == ended.session]
  assert [tuple(r.response_ids) for r in mine] == [
    tuple(found.tokens) for _, found in engine.results
  ]
