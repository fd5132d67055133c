"""What clients say of their requests: classes, sub-agents, compaction, tool times."""

from __future__ import annotations

import json
import types

import pytest

from m2jax.gateway import hints
from m2jax.gateway.hints import Hints
from m2jax.rl import rewards
from tests.gateway import clients
from tests.gateway.conftest import HTTP, SH, response_text
from tests.gateway.external import recording

CLAUDE = 'x-claude-code-'


@pytest.mark.parametrize(
  'headers, expected',
  [
    ({}, Hints()),
    ({CLAUDE + 'request-class': 'main'}, Hints('main')),
    ({CLAUDE + 'request-class': ' Auxiliary '}, Hints('auxiliary')),
    ({'x-m2jax-request-class': 'auxiliary'}, Hints('auxiliary')),
    ({CLAUDE + 'request-class': 'something new'}, Hints()),
    ({CLAUDE + 'compaction': 'reactive'}, Hints('compaction')),
    ({CLAUDE + 'context-compacted': 'manual'}, Hints(compacted=True)),
    ({'x-m2jax-tool-durations': 'a%3Bb=1000;x=nan;y=-5;z;=500;w=1e999'},
     Hints(tool_s=1.5)),
    ({'x-m2jax-tool-durations': 'a=1e308;b=1e308;c=5'}, Hints(tool_s=0.005)),
    # In no recording, as the kind `prewarm` below.
    ({'x-openai-subagent': 'compact'}, Hints('compaction')),
    ({'x-openai-subagent': 'memory_consolidation'}, Hints('auxiliary')),
  ],
)  # fmt: skip
def test_headers(headers, expected):
  scope = {'headers': [(k.encode(), v.encode()) for k, v in headers.items()]}
  found = hints.of_headers(hints.headers(scope))
  assert found == expected


def codex(**metadata):
  return {'x-codex-turn-metadata': json.dumps(metadata)}


@pytest.mark.parametrize(
  'metadata, expected',
  [
    (codex(request_kind='prewarm'), Hints('auxiliary')),
    (codex(request_kind=[], thread_source={}, thread_id=3, window_id=[]), Hints()),
    (codex(window_number='1', window_id='t:1'), Hints()),
    (codex(window_number=-1, window_id='t:1'), Hints()),
    ({'x-codex-turn-metadata': '[' * 9999}, Hints()),
    ({'x-codex-turn-metadata': '3'}, Hints()),
    ({'x-codex-turn-metadata': {}}, Hints()),
    ([], Hints()),
  ],
)  # fmt: skip
def test_codex_metadata(metadata, expected):
  assert hints.of_codex(metadata) == expected


def said(name):
  """What a real client said of each of its requests, in order."""
  return [recording.said(request) for request in recording.load(name)]


def durations(name):
  """The tool times that a real client gave with each request."""
  requests = recording.load(name)
  return [h.get('x-claude-code-prev-tool-durations', '') for _, h in requests]


def test_real_clients_say_that_it_is_the_task():
  for name in ('codex', 'terminus_2', 'openhands'):
    assert set(said(name)) == {Hints()}
  assert {hint.request_class for hint in said('claude_code')} == {'main'}


def test_the_real_claude_code_says_what_its_tools_took():
  """The times of one call and of two parallel ones."""
  first, second, third = said('claude_code')
  assert [text.count('=') for text in durations('claude_code')] == [0, 1, 2]
  assert first.tool_s == 0 < second.tool_s < 60 and third.tool_s > 0


@pytest.mark.parametrize('name', ['claude_code', 'codex'])
def test_real_sub_agents_have_an_id(name):
  subs = [hint for hint in said(f'{name}_sub_agent') if hint.agent]
  assert [hint.request_class for hint in subs] == ['subagent', 'subagent']
  assert len({hint.agent for hint in subs}) == 1
  others = [hint for hint in said(f'{name}_sub_agent') if not hint.agent]
  assert {hint.request_class for hint in others} <= {'', 'main'} and len(others) > 1


def test_real_compactions_are_said():
  """Claude Code says it once after one; Codex names the context window from then on."""
  *before, summary, after = said('claude_code_compaction')
  assert summary.request_class == 'compaction' and after.compacted
  assert not any(hint.compacted for hint in (*before, summary))
  *before, summary, after = said('codex_compaction')
  assert summary == Hints('compaction') and after.window
  assert set(before) == {Hints()} and after == Hints(window=after.window)


class Agent:
  """A client of chat completions that says what its requests are."""

  def __init__(self, gateway, key='episode'):
    self._url = gateway.base_url + '/chat/completions'
    self._key, self.messages = key, []

  def ask(self, text=None, messages=None, **said):
    """Adds a user message, if there is one, and the answer; its results after calls."""
    if messages is None:
      messages = self.messages
    if text:
      messages.append({'role': 'user', 'content': text})
    headers = {'authorization': f'Bearer {self._key}'}
    headers |= {CLAUDE + name.replace('_', '-'): value for name, value in said.items()}
    body = {'model': 'm2jax', 'messages': messages, 'tools': [SH]}
    reply = HTTP.post(self._url, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    messages.append(message := reply.json()['choices'][0]['message'])
    for call in message.get('tool_calls') or ():
      messages.append({'role': 'tool', 'tool_call_id': call['id'], 'content': '3'})
    return messages


CALL = response_text('so', 'ok', [('sh', {'cmd': 'ls'})])


def test_what_is_not_of_the_task_is_not_trained(serve):
  """A title and a compaction: answered and recorded, outside the loss by default; the
  task goes on as if they had not been."""
  gateway, engine, records = serve(CALL)
  gateway.sessions.open('episode', 'training')
  agent = Agent(gateway)
  agent.ask('go', request_class='main')
  agent.ask('a title, please', [], request_class='auxiliary')
  summary = [*agent.messages, {'role': 'user', 'content': 'summarise'}]
  agent.ask(messages=summary, request_class='compaction', compaction='auto')
  agent.ask(prev_tool_durations='sh=250')
  clients.assert_recorded(engine, records)
  reasons = [record.fork_reason for record in records]
  assert reasons == [None, 'auxiliary', 'compaction', None]
  task = rewards.acted(records)
  assert [record.turn for record in task] == [0, 3]
  clients.assert_extends(task)
  assert [record.tool_s for record in records] == [0, 0, 0, 0.25]
  counters = gateway.counters()
  for name in ('main', 'auxiliary', 'compaction'):
    assert counters[f'request_classes_total{{request_class="{name}"}}'] == 1


def test_a_compaction_may_be_trained(serve):
  """It is then a request as any other, which the agent's state depends on."""
  gateway, _, records = serve(CALL, untrained_classes=('auxiliary',))
  agent = Agent(gateway)
  agent.ask('go')
  agent.ask('summarise', request_class='compaction')
  assert records[1].fork_reason == 'thinking_closed'
  assert len(rewards.acted(records)) == 2


def test_after_a_compaction_the_context_is_edited(serve):
  """Said once: the branch has its cause, and the next request extends it."""
  gateway, _, records = serve(CALL)
  agent = Agent(gateway)
  agent.ask('go')
  compacted = agent.ask('the summary', [], context_compacted='auto')
  agent.ask(messages=compacted)
  assert [r.fork_reason for r in records] == [None, 'context_edited', None]
  assert records[2].parent == records[1].id
  assert len(rewards.acted(records)) == 3


def test_a_codex_that_compacts_again_and_again(serve):
  """Its prompt is the same after each compaction, if the summaries are: no retry, which
  would be trained only once. Within a window it is one."""
  gateway, _, records = serve(CALL)
  windows = [('turn', 0), ('compaction', 0), ('turn', 1), ('turn', 1)]
  windows += [('compaction', 1), ('turn', 2)]
  for kind, number in windows:
    said = codex(request_kind=kind, window_number=number, window_id=f't:{number}')
    body = {'model': 'm2jax', 'input': kind, 'client_metadata': said}
    reply = HTTP.post(
      gateway.base_url + '/responses', json=body, headers={'x-api-key': 'episode'}
    )
    assert reply.status_code == 200, reply.text
  reasons = [record.fork_reason for record in records]
  assert reasons == [
    *(None, 'compaction', 'context_edited'),
    *('resampled', 'compaction', 'context_edited'),
  ]
  assert [record.turn for record in rewards.acted(records)] == [0, 3, 5]
  assert gateway.counters()['context_edits_total{edit="compacted"}'] == 2


def test_sub_agents_are_branches(serve):
  """Each begins one, which says so; its later requests and the main agent's extend."""
  gateway, _, records = serve(CALL)
  agent = Agent(gateway)
  agent.ask('go')
  first = agent.ask('look here', [], request_class='subagent', agent_id='a')
  second = agent.ask('look there', [], request_class='subagent', agent_id='b')
  agent.ask(messages=first, request_class='subagent', agent_id='a')
  agent.ask(messages=second, request_class='subagent', agent_id='b')
  agent.ask('look again', [], request_class='subagent')  # without an id
  agent.ask()
  reasons = [record.fork_reason for record in records]
  assert reasons == [None, 'sub_agent', 'sub_agent', None, None, 'sub_agent', None]
  parents = [record.parent for record in records]
  assert parents[3] == records[1].id and parents[4] == records[2].id
  assert parents[6] == records[0].id
  assert len(rewards.acted(records)) == 7  # they are of the task


def turn(number, began_s, ended_s, tool_s=0.0, parent=None):
  return types.SimpleNamespace(
    id=f'c{number}', parent=parent, follows=None, started_s=began_s, ended_s=ended_s,
    tool_s=tool_s,
  )  # fmt: skip


def test_the_speed_of_work():
  """Parallel calls count for the pause that they took, others for their own time; what
  else the agent waited for does not count."""
  parallel = [turn(0, 0.0, 1.0), turn(1, 3.0, 4.0, 4.0, 'c0')]
  serial = [turn(0, 0.0, 1.0), turn(1, 5.0, 6.0, 4.0, 'c0')]
  slow_permission = [turn(0, 0.0, 1.0), turn(1, 99.0, 100.0, 4.0, 'c0')]
  unknown = [turn(1, 3.0, 4.0, 4.0, 'gone')]
  found = [rewards.work_s(t) for t in (parallel, serial, slow_permission, unknown, [])]
  assert found == [4.0, 6.0, 6.0, 5.0, 0.0]
