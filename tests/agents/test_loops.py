"""Retries, loop detection and rules of the white-box agent, with the real gateway."""

import asyncio

import pytest

from m2jax import agents, sandbox
from m2jax.agents import loops, rules, whitebox
from m2jax.agents.loops import LoopsConfig, RetryConfig, Turn
from tests.agents.test_context import assert_exact
from tests.agents.test_whitebox import ANSWER, CALL, Question, act, turns
from tests.tasks import local_shell

A, B = (Turn('', ((name, '{}'),), ('x',)) for name in 'ab')
FAILED = Turn('', (('a', '{}'),), ('error: no',))
BAD = 'x\n</think>\n\n<minimax:tool_call>\nls[e~['


def run(gateway, max_calls=7, **config):
  config = whitebox.WhiteboxConfig(retry_delay_s=0.01, **config)

  async def one():
    agent = agents.make(config)
    try:
      task = Question(local_shell.Box('/'), max_calls)
      return await act(agent, task, gateway.base_url)
    finally:
      await agent.close()
      await sandbox.shutdown()

  return asyncio.run(one())


@pytest.mark.parametrize(
  ('seen', 'config', 'found'),
  [
    ([A, A], dict(identical=2), 'identical'),
    ([A, B, A], dict(identical=2), ''),
    ([A], dict(identical=2), ''),
    ([A, A, A], {}, ''),
    ([Turn('', A.calls, ('y',)), A], dict(identical=2), ''),
    ([Turn('t'), Turn('t')], dict(identical=2), ''),
    ([FAILED] * 3, dict(errors=3), 'error'),
    ([FAILED, Turn('', B.calls, FAILED.results)], dict(errors=2), 'error'),
    ([FAILED, Turn('', B.calls, ('error: other',))], dict(errors=2), ''),
    ([FAILED, A], dict(errors=2), ''),
    ([A, B, A, B], dict(alternating=4), 'alternating'),
    ([A, B, B, A], dict(alternating=4), ''),
    ([A, A, A, A], dict(alternating=4), ''),
  ],
)
def test_what_a_loop_is(seen, config, found):
  assert loops.detect(seen, LoopsConfig(**config)) == found


def test_a_message_on_a_loop_extends_the_recorded_ids(serve, tok):
  """It joins the last result; a loop must grow again before the next reaction."""
  gateway, engine, records = serve(turns(tok, *[CALL] * 4, ANSWER))
  outcome = run(gateway, loops=LoopsConfig(identical=2, message='Stop.'))
  assert outcome.end_reason == 'answer'
  joined = ['Stop.' in m['content'] for m in outcome.messages if m['role'] == 'tool']
  assert joined == [False, True, False, True]
  assert 'Stop.' in tok.decode(records[2].prompt_ids)
  assert [r.parent for r in records] == [None, *(r.id for r in records[:-1])]
  assert_exact(records, engine, tok)


def test_other_reactions(serve, tok):
  gateway, _, records = serve(lambda request: tok.encode(CALL))
  outcome = run(gateway, loops=LoopsConfig(identical=3, reaction='end'))
  assert (outcome.end_reason, len(records)) == ('loop', 3)
  gateway, engine, _ = serve(lambda request: tok.encode(CALL))
  config = LoopsConfig(identical=2, reaction='resample', temperature=0.25, most=1)
  run(gateway, max_calls=4, loops=config, sampling={'temperature': 0.5})
  asked = [request.sampling.temperature for request in engine.requests]
  assert asked == [0.5, 0.5, 0.25, 0.5, 0.5]


def test_a_malformed_call_is_sampled_again(serve, tok):
  """The same prompt; the withdrawn completion is recorded, and in no later prompt."""
  gateway, engine, records = serve(turns(tok, CALL, BAD, CALL, ANSWER))
  retry = RetryConfig(malformed=1, temperature=0.25)
  outcome = run(gateway, retry=retry, sampling={'seed': 5, 'temperature': 1.0})
  assert (outcome.end_reason, outcome.tool_errors) == ('answer', 0)
  first, second = records[1:3]
  assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
  assert [r.parent for r in records] == [
    None, records[0].id, records[0].id, second.id
  ]  # fmt: skip
  for record, (request, result) in zip(records, engine.results, strict=True):
    assert record.prompt_ids.tolist() == list(request.prompt_ids)
    assert record.response_ids.tolist() == list(result.tokens)
  sampled = [request.sampling for request in engine.requests]
  assert [s.temperature for s in sampled] == [1.0, 1.0, 0.25, 1.0]
  # A seed draws the same tokens for the same prompt: each completion has its own.
  assert [s.seed for s in sampled] == [5, 6, 7, 8]
  roles = [m['role'] for m in outcome.messages]
  assert roles == ['user', *['assistant', 'tool'] * 2, 'assistant']


@pytest.mark.parametrize(
  ('retry', 'requests', 'end'),
  [
    (RetryConfig(), 1, 'length'),
    (RetryConfig(length=2), 3, 'length'),
    (RetryConfig(length=4, most=1), 2, 'length'),
  ],
)
def test_retries_are_bounded(serve, tok, retry, requests, end):
  gateway, engine, _ = serve(lambda request: tok.encode(CALL))
  assert run(gateway, max_tokens=3, retry=retry).end_reason == end
  assert len(engine.requests) == requests


def test_descriptions(serve, tok):
  """What the model is shown, in episodes and demonstrations."""
  described = {'*': '{description} Once.'}
  gateway, _, records = serve(ANSWER)
  outcome = run(gateway, descriptions=described)
  [tool] = outcome.tools
  assert tool['function']['description'].endswith(' Once.')
  assert 'Once.' in tok.decode(records[0].prompt_ids)
  config = whitebox.WhiteboxConfig(descriptions=described)
  [shown] = config.shown([{'role': 'user', 'content': 'x'}], Question(None).tools)
  assert shown.tools == outcome.tools


LAST = """
seen = []
def act(episode):
  seen.append(1)
  if len(seen) == 1 and episode["turns_left"] == 1:
    return {"message": "Answer now."}
"""


def test_rules_run_in_a_sandbox(serve, tok):
  """A fork a call: what a call leaves behind is gone in the next one."""
  gateway, _, records = serve(turns(tok, CALL, CALL, ANSWER))
  outcome = run(gateway, max_calls=2, rules=LAST)
  assert (outcome.end_reason, outcome.error) == ('answer', '')
  assert 'Answer now.' not in tok.decode(records[1].prompt_ids)
  assert 'Answer now.' in tok.decode(records[2].prompt_ids)


HOSTILE = {
  'def act(e): return 1/0': 'ZeroDivisionError',
  'def act(e):\n  while True: pass': 'no answer',
  'def act(e): return {"end": 1}': 'no action',
  'def act(e): return {"temperature": 9}': 'no action',
  'def act(e): return {"message": "x" * 20000}': 'process failed',
  'def act(e): return {"message": open("rules.py").read()}': 'Too many open files',
  'def act(e): return __import__("socket").socket()': 'rror',
  'act = 3 +': 'SyntaxError',
  'def act(e): return {"message": str(__import__("os").listdir("/work"))}': 'rror',
}


def test_rules_that_fail_cost_only_their_own_scaffold():
  """Each failure is a RulesFailed with its cause, and the next call is answered."""

  async def ask(source):
    process = rules.Rules(source)
    await process.start()
    try:
      return [await failure(process) for _ in range(2)]
    finally:
      await process.close()

  async def failure(process):
    with pytest.raises(rules.RulesFailed) as caught:
      await process.act([A], 3)
    return str(caught.value)

  async def all_of_them():
    found = [await ask(source) for source in HOSTILE]
    await sandbox.shutdown()
    return found

  for wanted, errors in zip(HOSTILE.values(), asyncio.run(all_of_them()), strict=True):
    assert wanted in errors[0] and wanted in errors[1], errors


def test_failed_rules_end_the_episode(serve, tok):
  """Not as an infrastructure failure, which would not be judged."""
  gateway, _, _ = serve(turns(tok, CALL, ANSWER))
  outcome = run(gateway, rules='def act(e): return 1/0')
  assert outcome.end_reason == 'rules' and 'ZeroDivision' in outcome.error
