"""Context management: edits of messages, and of episodes while they run."""

import asyncio
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import agents
from m2jax.agents import context, model_client, scaffold, whitebox
from m2jax.agents.context import ContextConfig
from m2jax.records import Trajectory
from m2jax.rl import rewards
from m2jax.rl import samples as samples_lib
from m2jax.text import chat
from m2jax.text import tokenizer as tokenizer_lib
from tests.agents.test_whitebox import ANSWER, CALL, Question, act
from tests.gateway.conftest import response_text
from tests.tasks import local_shell

LOUD = response_text('look', calls=[('sh', {'cmd': 'seq 30'})])
TASK = [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'task'}]
TURN = st.tuples(st.integers(0, 3), st.text(max_size=30), st.booleans())
SETTINGS = st.builds(
  ContextConfig,
  policy=st.sampled_from(context.POLICIES),
  keep_turns=st.integers(0, 4),
  keep_first=st.integers(0, 2),
)


def conversation(turns):
  """System, task, and per turn calls with their results, or an error of the user."""
  messages, ids = list(TASK), itertools.count()
  for calls, text, thought in turns:
    made = [
      {'id': f'c{next(ids)}', 'function': {'name': 'sh', 'arguments': '{}'}}
      for _ in range(calls)
    ]
    message = {'role': 'assistant', 'content': text}
    if thought:
      message['reasoning_content'] = text
    messages.append(message | ({'tool_calls': made} if made else {}))
    messages += (
      {'role': 'tool', 'tool_call_id': call['id'], 'content': text * 3} for call in made
    )
    if not made:
      messages.append({'role': 'user', 'content': 'error'})
  return messages


def size(messages):
  return sum(
    len(str(m.get('content', '')).encode('utf-8', 'replace')) for m in messages
  )


@given(turns=st.lists(TURN, max_size=6), config=SETTINGS)
def test_edits_keep_head_and_pairs_and_only_shrink(turns, config):
  """System and task stay; no result is without its call, no call without its result."""
  messages = conversation(turns)
  before, last = [dict(m) for m in messages], size(messages)
  found = list(context.edits(messages, len(TASK), config))
  assert messages == before
  assert bool(found) == bool(config.policy and turns)
  for _, edited in found:
    assert edited[: len(TASK)] == TASK
    called = [c['id'] for m in edited for c in m.get('tool_calls', ())]
    results = [m['tool_call_id'] for m in edited if m['role'] == 'tool']
    assert called == results
    assert size(edited) <= last
    last = size(edited)
    chat.render(edited)
  if found:
    assert found[-1][1] == TASK  # the shortest that there is


@given(turns=st.lists(TURN, max_size=6), keep=st.integers(0, 7))
def test_last_turns_stay_unchanged(turns, keep):
  """What a policy keeps it keeps to the letter."""
  messages = conversation(turns)
  starts = context.turns(messages)
  kept = messages[starts[-keep] :] if 0 < keep <= len(starts) else []
  for edited in (
    context.drop_results(messages, keep),
    context.window(messages, keep),
  ):
    assert not kept or edited[-len(kept) :] == kept
    if keep >= len(starts):
      assert edited == messages


# --- Episodes.


def run(gateway, max_calls=7, **config):
  task = Question(local_shell.Box('/'), max_calls)
  config = whitebox.WhiteboxConfig(retry_delay_s=0.01, **config)

  async def one():
    agent = agents.make(config)
    try:
      return await act(agent, task, gateway.base_url)
    finally:
      await agent.close()

  return asyncio.run(one())


def assert_exact(records, engine, tok):
  """Every sample's prompt is what the engine was given; response, what it sampled.

  Credit goes to all of them: what the learner trains is what was sampled.
  """
  sampled = [(r.prompt_ids, result.tokens) for r, result in engine.results]
  recorded = [(c.prompt_ids, c.response_ids) for c in records]
  key = lambda pair: tuple(map(tuple, pair))
  assert sorted(map(key, recorded)) == sorted(map(key, sampled))
  group = [
    (Trajectory('k', 0, i, 't', 't', 'answer', float(i), 0.0, 0), records)
    for i in range(2)
  ]
  credit = rewards.advantages(group, rewards.RewardConfig(alpha=0.0))
  assert [c.unused for c in credit.credits] == [0, 0]
  [trained] = samples_lib.from_groups([credit])
  for sample, completion in zip(trained, [*records, *records], strict=True):
    assert sample.tokens.tolist() == completion.tokens.tolist()
    assert sample.prompt_length == len(completion.prompt_ids)
    assert len(set(sample.advantages.tolist())) == 1 and sample.advantages[0] != 0


def script(tok, turn):
  """A policy: `turn(prompt) -> text`."""
  return lambda request: tok.encode(turn(tok.decode(request.prompt_ids)))


def results_in(prompt):
  return re.findall('<response>(.*?)</response>', prompt, re.DOTALL)


@pytest.mark.parametrize('policy', ['drop_results', 'window', 'restart', 'summarise'])
def test_a_full_context_is_edited_before_it_overflows(serve, tok, policy):
  """No prompt exceeds the budget; each edit is one branch with its cause; all is
  trained as it was sampled."""
  made = itertools.count()

  def turn(prompt):
    if context.SUMMARISE_NOW in prompt:
      return response_text('sum up', 'seq was long')
    n = next(made)  # in the text, since an edit that gives a prompt again is a retry
    return ANSWER if n == 6 else LOUD.replace('look', f'look {n}')

  limit = 900
  gateway, engine, records = serve(
    script(tok, turn), engine_options={'context_tokens': limit}
  )
  config = ContextConfig(policy=policy, threshold=0.75, notes_tokens=60)
  outcome = run(gateway, max_tokens=80, context=config)
  assert (outcome.end_reason, outcome.answer) == ('answer', 'It is 3.')
  assert all(len(c.prompt_ids) + 80 <= limit for c in records[:-1])
  assert_exact(records, engine, tok)
  forks = [c for c in records if c.fork_reason]
  assert forks and {c.fork_reason for c in forks} == {'context_edited'}
  counters = gateway.counters()
  counted = {n: v for n, v in counters.items() if n.startswith('context_edits_total')}
  assert sum(counted.values()) == len(forks)
  assert counted[f'context_edits_total{{edit="{policy}"}}']
  full = serve(script(tok, lambda p: LOUD), engine_options={'context_tokens': limit})
  assert run(full[0], max_tokens=80).end_reason == 'context'  # without the policy
  if policy == 'summarise':
    after = [tok.decode(c.prompt_ids) for c in forks]
    assert all(context.NOTES + 'seq was long' in prompt for prompt in after)
    asked = [c for c in records if context.SUMMARISE_NOW in tok.decode(c.prompt_ids)]
    assert all(c.parent for c in asked)  # extends the recorded ids, thinking included
  # No prompt shows what the report does not: the transcript has every completion.
  said = [m for m in outcome.messages if m['role'] == 'assistant']
  assert len(said) == len(records)


def test_a_budget_without_a_policy_ends_the_episode(serve, tok):
  """As an engine of that size would: no prompt and response exceed it, the last
  response is cut at it or the next prompt ends the episode, and it ends no earlier."""

  def policy():
    made = itertools.count()
    return script(tok, lambda prompt: LOUD.replace('look', f'look {next(made)}'))

  for limit in (500, 560, 620, 700):
    small = serve(policy(), engine_options={'context_tokens': limit})
    engines_end = run(small[0], max_tokens=80).end_reason
    gateway, engine, records = serve(policy())
    found = run(gateway, max_tokens=80, context=ContextConfig(tokens=limit))
    assert {found.end_reason, engines_end} <= {'context', 'length'}
    assert all(len(c.tokens) <= limit for c in records)
    assert 0 <= len(small[2]) - len(records) <= 1  # the count is an upper bound
    assert_exact(records, engine, tok)


@pytest.mark.parametrize('policy', ['drop_results', 'window', 'restart', 'summarise'])
@pytest.mark.parametrize('max_edits, limit', [(0, 560), (1, 560), (8, 330)])
def test_the_budget_also_bounds_what_no_edit_shortens(
  serve, tok, policy, max_edits, limit
):
  """After the last edit of the policy, and where the task alone leaves no room: prompt
  and response, of notes too, stay within it, and the episode ends."""
  made = itertools.count()
  gateway, _, records = serve(
    script(tok, lambda prompt: LOUD.replace('look', f'look {next(made)}'))
  )
  config = ContextConfig(policy=policy, tokens=limit, max_edits=max_edits)
  found = run(gateway, max_calls=40, max_tokens=80, context=config)
  assert found.end_reason in ('context', 'length')
  assert all(len(c.tokens) <= limit for c in records)


def without_usage(monkeypatch):
  """Lets the agent's client see no `usage`, which servers may omit."""
  make = model_client.make

  def patched(*args):
    post, count = make(*args)

    async def post_without(body):
      reply = await post(body)
      del reply['usage']
      return reply

    return post_without, count

  monkeypatch.setattr(model_client, 'make', patched)


@pytest.mark.parametrize('policy', ['drop_results', 'restart'])
def test_a_server_without_usage(serve, tok, monkeypatch, policy):
  """The context is still edited before it overflows: prompts are counted instead."""
  without_usage(monkeypatch)
  made = itertools.count()

  def turn(prompt):
    n = next(made)
    return ANSWER if n == 6 else LOUD.replace('look', f'look {n}')

  limit = 900
  gateway, engine, records = serve(
    script(tok, turn), engine_options={'context_tokens': limit}
  )
  config = ContextConfig(policy=policy, threshold=0.75)
  outcome = run(gateway, max_tokens=80, context=config)
  assert (outcome.end_reason, outcome.answer) == ('answer', 'It is 3.')
  assert all(len(c.prompt_ids) + 80 <= limit for c in records)
  assert any(c.fork_reason == 'context_edited' for c in records)
  assert_exact(records, engine, tok)


def test_an_edit_comes_at_the_threshold(serve, tok):
  """Not before the next completion would exceed it, and then at once."""
  room = 80

  def sizes_and_edits(**config):
    made = itertools.count()
    turn = lambda prompt: ANSWER if next(made) == 5 else LOUD
    gateway, _, records = serve(script(tok, turn))
    run(gateway, max_tokens=room, context=ContextConfig(**config))
    return (
      [len(c.prompt_ids) for c in records],
      [i for i, c in enumerate(records) if c.fork_reason],
    )

  sizes, edits = sizes_and_edits()
  assert len(sizes) == 6 and not edits
  for share in (1.0, 0.5):
    config = dict(policy='restart', threshold=share)
    tokens = int((sizes[3] + room - 1) / share)
    found, edits = sizes_and_edits(tokens=tokens, **config)
    assert edits[0] == 3 and found[3] == sizes[0]
    assert max(found) + room <= share * tokens
    tokens = int((sizes[3] + room + 32) / share)  # with the slack of the bound
    found, edits = sizes_and_edits(tokens=tokens, **config)
    assert edits[0] == 4


def test_the_model_edits_its_context(serve, tok):
  """`drop_results` and `restart` are tools; the next prompt is the edited one."""

  def turn(prompt):
    seen = results_in(prompt)
    if context.NOTES in prompt:
      return ANSWER
    if not seen:
      return LOUD
    if len(seen) == 1:
      return response_text('tidy', calls=[('sh', {'cmd': 'echo 1'})])
    if context.DROPPED not in seen:
      return response_text('drop', calls=[('drop_results', {})])
    return response_text('again', calls=[('restart', {'notes': 'it was 3'})])

  gateway, engine, records = serve(script(tok, turn))
  config = ContextConfig(actions=('drop_results', 'restart'))
  outcome = run(gateway, max_calls=2, context=config)
  assert (outcome.end_reason, outcome.tool_errors) == ('answer', 0)
  assert [c.fork_reason for c in records] == [
    None,
    None,
    None,
    'context_edited',
    'context_edited',
  ]
  last = tok.decode(records[-1].prompt_ids)
  assert context.NOTES + 'it was 3' in last and '<response>' not in last
  assert_exact(records, engine, tok)


def test_edits_of_the_model_are_bounded(serve, tok):
  """A model that only edits ends."""
  gateway, _, records = serve(
    script(tok, lambda p: response_text('x', calls=[('restart', {'notes': 'n'})]))
  )
  config = ContextConfig(actions=('restart',), max_edits=3)
  assert run(gateway, max_calls=2, context=config).end_reason == 'max_turns'
  assert len(records) == 3 + 3


def test_dropped_thinking_is_in_no_prompt(serve, tok):
  """Each prompt has the present turn's thinking only, although the gateway would give
  it back; SFT's chats are encoded to the same prompts."""
  turn = lambda prompt: ANSWER if len(results_in(prompt)) == 2 else CALL
  gateway, engine, records = serve(script(tok, turn))
  config = whitebox.WhiteboxConfig(context=ContextConfig(thinking='drop'), system='s')
  outcome = run(gateway, context=config.context, system='s')
  assert outcome.end_reason == 'answer'
  assert all('look' not in tok.decode(c.prompt_ids) for c in records)
  assert [c.fork_reason for c in records[1:]] == ['context_edited'] * 2
  assert_exact(records, engine, tok)
  task = Question(None)
  shown = config.shown(outcome.messages[1:], task.tools)
  assert [s.trained for s in shown] == context.turns(outcome.messages)
  for one, completion in zip(shown, records, strict=True):
    pieces = chat.segments(one.messages[: one.trained], one.tools, True)
    ids = tokenizer_lib.encode_chat(tok, pieces).ids
    assert ids == completion.prompt_ids.tolist()


# --- Sub-agents.


def test_a_sub_agent_is_part_of_the_trajectory(serve, tok):
  """A fresh context in the same environment; its completions get the credit too."""

  def turn(prompt):
    if 'write it' in prompt.rpartition(']~b]user')[2].partition('[e~[')[0]:
      if results_in(prompt):
        return response_text('done', 'wrote 7')
      return response_text('w', calls=[('sh', {'cmd': 'echo 7'})])
    if not results_in(prompt):
      return response_text('d', calls=[('delegate', {'task': 'write it'})])
    return response_text('so', results_in(prompt)[-1])

  gateway, engine, records = serve(script(tok, turn))
  limits = whitebox.SubAgentsConfig(depth=1)
  outcome = run(gateway, sub_agents=limits, system='s')
  assert (outcome.end_reason, outcome.answer) == ('answer', 'wrote 7')
  assert outcome.tool_calls == 1
  assert len(records) == 4 and len({c.session for c in records}) == 1
  assert [c.fork_reason for c in records] == [None, 'new_conversation', None, None]
  assert 'How many?' not in tok.decode(records[1].prompt_ids)
  assert records[3].parent == records[0].id
  assert_exact(records, engine, tok)


def test_sub_agents_are_bounded(serve, tok):
  """Depth, number and turns: a model that only delegates ends, with errors."""
  delegate = lambda prompt: response_text('d', calls=[('delegate', {'task': 'more'})])
  gateway, _, records = serve(script(tok, delegate))
  limits = whitebox.SubAgentsConfig(depth=2, count=3, max_turns=2)
  outcome = run(gateway, max_calls=3, sub_agents=limits)
  assert outcome.end_reason == 'max_turns'
  assert len(records) <= 4 + 3 * 2
  errors = [str(m['content']) for m in outcome.messages if m['role'] == 'tool']
  assert any("no tool 'delegate'" in e for e in errors)  # at the depth limit
  assert any('no more sub-agents' in e for e in errors)


# --- Scaffolds.


def test_another_scaffold_over_the_same_task(serve, tok):
  """Other names of tools and another prompt: the task's own tool runs."""
  call = response_text('x', calls=[('bash', {'command': 'echo 5'})])
  turn = lambda prompt: ANSWER if results_in(prompt) else call
  gateway, _, records = serve(script(tok, turn))
  rename = {'sh': 'bash', 'cmd': 'command'}
  outcome = run(gateway, rename=rename, instruction='TASK: {instruction}')
  assert (outcome.tool_calls, outcome.tool_errors) == (1, 0)
  first = tok.decode(records[0].prompt_ids)
  assert 'TASK: How many?' in first and '"bash"' in first and '"sh"' not in first


def test_names_must_differ():
  """A task's tool that has the name of an action is reported."""
  config = whitebox.WhiteboxConfig(
    context=ContextConfig(actions=('restart',)), rename={'sh': 'restart'}
  )
  agent = agents.make(config)
  task = Question(local_shell.Box('/'))
  endpoint = agents.Endpoint('http://127.0.0.1:1/v1', 'k', 'm')
  with pytest.raises(ValueError, match='a name occurs twice'):
    asyncio.run(agent.prepare(task, task.environment(), endpoint))
  with pytest.raises(ValueError, match='two names become one'):
    scaffold.names(task.tools, {'sh': 'x', 'cmd': 'x'})
