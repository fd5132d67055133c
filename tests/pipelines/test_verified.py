"""Rejection sampling: several scaffolds against a server, and what is kept."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from configs import sample
from m2jax import tasks
from m2jax.agents import perturbed, whitebox
from m2jax.agents.context import ContextConfig
from m2jax.data import chats as chats_lib
from m2jax_pipelines import records, suites, verified
from m2jax_pipelines.tasks import lookup
from tests.pipelines import model_server

SCAFFOLDS = {
  'plain': whitebox.Config(retries=0, system='Add.'),
  'varied': perturbed.Config(
    agent=whitebox.Config(retries=0),
    systems=('Sum up.', 'Be exact.'),
    instructions=('Please: {instruction}', '{instruction} Thanks.'),
    renames=(dict(look='find'), dict(look='get', key='name')),
  ),
}


def _config(**changes) -> verified.SampleConfig:
  suite = suites.SuiteConfig(
    tasks=lookup.Config(hops=(2, 3)),
    agent=whitebox.Config(),
    split='train',
    count=12,
    trials=3,
  )
  options = dict(suite=suite, scaffolds=SCAFFOLDS)
  return verified.SampleConfig(**{**options, **changes})


def _teacher(body):
  """Follows the keys with the only tool that is offered, whatever its names."""
  [tool] = [t['function'] for t in body['tools']]
  [argument] = tool['parameters']['properties']
  shown = [m['content'] for m in body['messages'] if m['role'] == 'tool']
  total = sum(int(text.split()[0]) for text in shown) % lookup.MODULUS
  if shown and shown[-1].endswith('end'):
    return {'content': str(total), 'reasoning_content': f'total {total}'}
  if shown:
    key = shown[-1].split(' then ')[1]
  else:
    [user] = [m['content'] for m in body['messages'] if m['role'] == 'user']
    key = user.split(' from ')[1].split(',')[0]
  function = {'name': tool['name'], 'arguments': json.dumps({argument: key})}
  call = {'id': f'call_{len(shown)}', 'type': 'function', 'function': function}
  return {'content': None, 'reasoning_content': f'total {total}', 'tool_calls': [call]}


@pytest.fixture(scope='module')
def selection(tmp_path_factory):
  """All attempts of a perfect model, and what is kept of them."""
  workdir, config = tmp_path_factory.mktemp('sample'), _config()
  rows = {}
  with model_server.Server(_teacher) as server:
    for name in config.scaffolds:
      path = workdir / f'{name}.jsonl'
      asyncio.run(suites.run(config.of(name), server.url, 'm', path))
      rows[name] = records.read(path)
  return verified.select(config, rows, 'm')


def test_every_scaffold_gives_one_chat_a_task(selection):
  """Attempts that repeat another are counted, not kept."""
  names = [(chat['scaffold'], chat['task']) for chat in selection.chats]
  assert len(names) == len(set(names)) == 2 * 12
  for counts in selection.counts.values():
    assert counts['repeated'] == 2 * counts['kept'] and counts.total() % 3 == 0


def test_chats_have_the_perturbed_prompt_and_tools(selection):
  """What is trained is what was sampled: prompts vary, and calls match the tools."""
  systems, tools = set(), set()
  for chat in selection.chats:
    [tool] = [t['function'] for t in chat['tools']]
    called = {
      call['function']['name']
      for message in chat['messages']
      for call in message.get('tool_calls') or ()
    }
    assert called == {tool['name']}
    if chat['scaffold'] == 'varied':
      systems.add(chat['messages'][0]['content'])
      tools.add((tool['name'], *tool['parameters']['properties']))
  assert systems == {'Sum up.', 'Be exact.'}
  assert tools == {('find', 'key'), ('get', 'name')}


def _thinks(where):
  """The teacher, whose server puts its thinking somewhere else, or that has none."""

  def answer(body):
    told = dict(_teacher(body))
    thought = told.pop('reasoning_content')
    if where == '<think>':
      told['content'] = f'<think>\n{thought}\n</think>\n\n{told["content"] or ""}'
    elif where:
      told[where] = thought
    return told

  return answer


@pytest.mark.parametrize('where', ['reasoning', 'reasoning_content', '<think>', 'none'])
def test_attempts_are_kept_wherever_their_thinking_is(where, tmp_path):
  """SFT has it in one place. Without thinking they are kept unless it is asked for."""
  config = _config()
  suite = dataclasses.replace(config.of('plain'), count=2, trials=1)
  with model_server.Server(_thinks(where if where != 'none' else '')) as server:
    asyncio.run(suites.run(suite, server.url, 'm', tmp_path / 'a.jsonl'))
  rows = {'plain': records.read(tmp_path / 'a.jsonl')}
  wanted = dataclasses.replace(config, thinking=True)
  found = verified.select(wanted, rows, 'm').chats
  assert len(found) == (0 if where == 'none' else 2)
  chats = verified.select(config, rows, 'm').chats
  said = [m for c in chats for m in c['messages'] if m['role'] == 'assistant']
  assert len(chats) == 2 and not any('reasoning' in message for message in said)
  for message in said:
    assert ('total' in message.get('reasoning_content', '')) is (where != 'none')
    assert '<think>' not in (message['content'] or '')
  assert sample.get_config().sample.thinking is False


def test_sft_reads_the_chats(selection, tmp_path):
  """The file is one for --config.demonstrations; thinking is in it."""
  path = tmp_path / 'verified.jsonl'
  verified.write(path, selection.chats)
  found = chats_lib.read(path)
  assert len(found) == len(selection.chats)
  assert all('total' in chat.text() for chat in found)


def _row(trial, **changes):
  said = {'role': 'assistant', 'content': str(trial), 'reasoning_content': 'so'}
  row = dict(
    task='t',
    trial=trial,
    family='f',
    outcome='judged',
    success=1.0,
    end_reason='answer',
    tool_errors=0,
    tool_calls=2,
    messages=[{'role': 'user', 'content': 'x'}, said],
    tools=[],
  )
  return row | changes


def test_why_attempts_are_not_kept():
  """Each reason is counted once; of those that are left, the shortest is kept."""
  rows = [
    _row(0),
    _row(1, tool_calls=1),
    _row(2, success=0.0),
    _row(3, success=0.5),
    _row(4, end_reason='max_turns'),
    _row(5, outcome='infrastructure'),
    _row(6, tool_errors=1),
    _row(7, messages=[{'role': 'assistant', 'content': '7'}]),
    _row(8, messages=_row(1)['messages']),
    _row(9, outcome='infrastructure'),
    _row(9, success=0.0),  # tried again
  ]
  config = _config(thinking=True, scaffolds={'a': whitebox.Config()})
  found = verified.select(config, {'a': rows}, 'm')
  assert [chat['messages'][-1]['content'] for chat in found.chats] == ['1']
  assert found.counts['a', 'f'] == dict(
    kept=1,
    failed=4,
    infrastructure=1,
    tool_errors=1,
    no_thinking=1,
    repeated=1,
    beyond=1,
  )


@pytest.mark.parametrize(
  'agent',
  [
    whitebox.Config(context=ContextConfig(policy='window')),
    perturbed.Config(agent=whitebox.Config(context=ContextConfig(thinking='drop'))),
  ],
  ids=['edits', 'no thinking'],
)
def test_edited_contexts_are_refused(agent):
  """Their messages are not one chat."""
  with pytest.raises(ValueError, match='one chat'):
    _config(scaffolds={'a': agent})


def test_a_variant_is_of_the_task():
  """All attempts at a task have one prompt, in every process; tasks differ."""
  config, again = SCAFFOLDS['varied'], perturbed.Config(**vars(SCAFFOLDS['varied']))
  specs = [tasks.spec(lookup.Config(), 'train', i) for i in range(40)]
  drawn = [config.of_task(spec) for spec in specs]
  assert drawn == [again.of_task(spec) for spec in specs]
  assert len({repr(agent) for agent in drawn}) == 8
  with pytest.raises(ValueError, match='instruction'):
    perturbed.Config(instructions=('without the placeholder',))


@pytest.mark.parametrize('variant', ['', 'harbor'])
def test_a_flag_changes_one_scaffold(variant):
  """The scaffolds of the config share no settings."""
  scaffolds = sample.get_config(variant).sample.scaffolds
  scaffolds.plain.context.thinking = 'drop'
  scaffolds.plain.max_tokens = 1
  for agent in scaffolds.bash, scaffolds.perturbed.agent:
    assert agent.context.thinking == 'keep' and agent.max_tokens > 1
