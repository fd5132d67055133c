"""Attempts through the real gateway, agent and sandbox, by a scripted policy."""

import dataclasses

import pytest

from m2jax import sandbox
from m2jax.agents import episodes
from m2jax.evolve import scaffold
from m2jax.evolve.evaluator import INVALID, InProcess, Result, Tokens, transcript
from m2jax.tasks import terminal
from tests.agents.test_episodes import AGENT, WRONG, perfect, specs_of

START = scaffold.of_agent(AGENT)
SPECS = specs_of('steps_1', 'steps_2', 'trail')


@pytest.fixture
def evaluator(serve):
  """`evaluator(policy) -> (evaluator, engine)`; its config is changed by fields."""

  def make(policy, **fields):
    tokens = Tokens()
    gateway, engine, _ = serve(policy, accept_unknown_keys=False, record=tokens.add)
    config = dataclasses.replace(
      episodes.EpisodeConfig(agent=AGENT, backend='rlimit_only', concurrency=4),
      **fields,
    )
    return InProcess(config, gateway.base_url, gateway.sessions, tokens), engine

  return make


def test_attempts_in_their_order_with_seeds_and_costs(evaluator, tok):
  """Each has the engine's seed, from its first completion on, and the scaffold's
  sampling; tokens are those of all its prompts and responses."""
  right = perfect(tok, SPECS)
  wrong = SPECS[1]

  def policy(request):
    answer = right(request)
    asked = terminal.make(wrong).instruction in tok.decode(request.prompt_ids)
    return tok.encode(WRONG) if asked else answer

  run, engine = evaluator(policy)
  cool = START.changed({'sampling.temperature': 0.25})
  found = run.run(cool, SPECS, [100, 200, 300])
  assert [result.score for result in found] == [1.0, 0.0, 1.0]
  seeds = sorted(request.sampling.seed for request in engine.requests)
  assert seeds[:2] == [100, 101] and {200, 300, 301} <= set(seeds)
  assert len(set(seeds)) == len(seeds)
  assert {request.sampling.temperature for request in engine.requests} == {0.25}
  spent = sum(len(r.prompt_ids) + len(x.tokens) for r, x in engine.results)
  assert sum(result.tokens for result in found) == spent
  assert 'none of it' in found[1].text and found[0].text == ''


def test_a_scaffold_whose_settings_contradict_the_task(evaluator, tok):
  """Its attempts fail, and count against it; the job does not end."""
  run, engine = evaluator(perfect(tok, SPECS))
  renamed = START.changed({'rename': {'sh': 'x', 'cmd': 'x'}})
  assert run.run(renamed, SPECS[:2], [1, 2]) == [Result(0.0, INVALID)] * 2
  assert not engine.requests


def test_infrastructure_failures_have_no_score(evaluator):
  run, engine = evaluator(RuntimeError('device lost'))
  assert run.run(START, SPECS[:1], [1]) == [Result(None, 'infrastructure')]
  assert len(engine.requests) >= 2  # tried twice


def test_rules_are_run(evaluator, tok):
  """In a sandbox of their own, whatever the tasks' backend is."""
  run, _ = evaluator(perfect(tok, SPECS))
  ends = START.changed({'rules': 'def act(episode):\n  return {"end": True}\n'})
  [found] = run.run(ends, SPECS[2:], [1])
  assert (found.score, found.end_reason) == (0.0, 'loop')


def test_a_transcript_is_cut_and_can_be_encoded():
  call = {'function': {'name': 'sh', 'arguments': '{"cmd": "ls"}'}}
  messages = [
    {'role': 'user', 'content': 'x' * 5000 + '\ud800'},
    {
      'role': 'assistant',
      'content': None,
      'reasoning_content': 'hm',
      'tool_calls': [call],
    },
  ]
  text = transcript(messages)
  assert len(text) < 3100 and '[…]' in text
  assert text.endswith('thought: hm\n  call sh {"cmd": "ls"}') and text.encode()


def test_no_sandbox_for_rules(evaluator, tok, monkeypatch):
  """It fails closed: attempts have no score, and the code does not run."""

  create = sandbox.create

  async def unavailable(*arguments, **options):
    if options.get('backend', 'namespaces') == 'namespaces':
      raise sandbox.SandboxUnavailable('no namespaces', 'a fix')
    return await create(*arguments, **options)

  monkeypatch.setattr(sandbox, 'create', unavailable)
  run, engine = evaluator(perfect(tok, SPECS))
  rules = START.changed({'rules': 'def act(episode):\n  return None\n'})
  found = run.run(rules, SPECS[:1], [1])
  assert found == [Result(None, 'infrastructure')] and not engine.requests
