"""What the model writes in the tasks of the external clients, and what must hold.

The same scripts answer the programs themselves (run_clients) and their recorded
requests (test_recorded).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Sequence

from m2jax.records import Completion
from m2jax.rl import rewards
from tests.gateway import clients
from tests.gateway.conftest import response_text
from tests.gateway.external import commands


def _results(prompt: str) -> int:
  """The number of tool results in a prompt."""
  return prompt.count('\n<response>')


def task(tok, client: commands.Client):
  """One call, two parallel calls, the answer."""
  one, two = client.call('wc -l a.txt'), client.call('cat a.txt')
  turns = {
    0: response_text('I should look', 'Ok', [one]),
    1: response_text('both', '', [two, one]),
    3: response_text('I think', clients.ANSWER),
  }

  def answer(request):
    prompt = tok.decode(request.prompt_ids)
    if not _has_tool(prompt, client):
      return tok.encode(response_text('short', 'a title'))
    return tok.encode(turns[_results(prompt)])

  return answer


def _has_tool(prompt: str, client: commands.Client) -> bool:
  """False for a title or a summary."""
  return f'"name": "{client.tool}"' in prompt


def check_task(records: Sequence[Completion]) -> None:
  """Each prompt extends the last one; what is none of the task comes not between."""
  acted = rewards.acted(records)
  assert all(r.fork_reason == 'auxiliary' for r in records if r not in acted)
  assert len(acted) >= 3
  clients.assert_extends(acted[-3:])


def terminus_2(tok, client: commands.Client):
  """The same task for Terminus-2, whose commands are JSON in the text."""
  del client

  def turn(analysis, *lines, done=False):
    keys = [{'keystrokes': f'{line}\n', 'duration': 0.5} for line in lines]
    content = {'analysis': analysis, 'plan': 'count', 'commands': keys}
    text = json.dumps(content | {'task_complete': done})
    return tok.encode(response_text('I think', text))

  end = turn(clients.ANSWER, done=True)  # which it asks to confirm
  turns = iter([turn('look', 'wc -l a.txt'), turn('all', 'cat a.txt', 'ls'), end, end])
  return lambda request: next(turns)


def check_terminus_2(records: Sequence[Completion]) -> None:
  """The terminal is a user message, after which the template drops earlier thinking:
  each turn begins a branch."""
  assert [r.fork_reason for r in records] == [None, *3 * ['thinking_closed']]
  for first, second in itertools.pairwise(records):
    assert second.follows == first.id


# Calls that start a sub-agent and wait for it, by the prompt.
_DELEGATE = {
  'Bash': [lambda prompt: ('Agent', {'description': 'count', 'prompt': 'delegated'})],
  'exec_command': [
    lambda prompt: ('multi_agent_v1__spawn_agent', {'message': 'delegated'}),
    lambda prompt: ('multi_agent_v1__wait_agent', {'targets': _agent(prompt)}),
  ],
}


def _agent(prompt: str) -> str:
  found = re.findall(r'"agent_id":"([^"]+)"', prompt)
  return json.dumps(found[:1])


def sub_agent(tok, client: commands.Client):
  """A sub-agent counts, with one call; the main agent gives the answer."""
  calls = _DELEGATE[client.tool]

  def answer(request):
    prompt = tok.decode(request.prompt_ids)
    done = _results(prompt)
    if not _has_tool(prompt, client):
      text = response_text('short', 'a title')
    elif clients.QUESTION not in prompt:
      called = response_text('mine', '', [client.call('wc -l a.txt')])
      text = response_text('mine', 'it has 3') if done else called
    elif done < len(calls):
      text = response_text('other', '', [calls[done](prompt)])
    else:
      text = response_text('all', clients.ANSWER)
    return tok.encode(text)

  return answer


def check_sub_agent(records: Sequence[Completion]) -> None:
  """It is a branch of the trajectory, which begins where its id does."""
  [first] = [r for r in records if r.fork_reason == 'sub_agent']
  [second] = [r for r in records if r.parent == first.id]
  clients.assert_extends([first, second])
  ids = {r.id for r in rewards.acted(records)}
  assert {first.id, second.id} < ids  # and the main agent's


SUMMARY = 'there are two calls'
_SUMMARY_ASKED = '<summary>'


def compaction(tok, client: commands.Client):
  """Calls with a long result until the client asks for a summary and begins anew with
  it; then the answer."""
  turns = [client.call('seq 6000'), client.call('wc -l a.txt')]

  def answer(request):
    prompt = tok.decode(request.prompt_ids)
    if SUMMARY in prompt:
      text = response_text('I think', clients.ANSWER)
    elif not _has_tool(prompt, client) or _SUMMARY_ASKED in prompt[-4000:]:
      text = response_text('short', f'<summary>{SUMMARY}</summary>')
    else:
      text = response_text('so', '', [turns[_results(prompt)]])
    return tok.encode(text)

  return answer


def check_compaction(records: Sequence[Completion]) -> None:
  """The summary is not trained; what follows it says why it extends nothing."""
  found = [r for r in records if r.fork_reason != 'auxiliary']
  reasons = [r.fork_reason for r in found]
  assert reasons == [None, None, 'compaction', 'context_edited']
  before, last, _, after = found
  clients.assert_extends([before, last])
  assert [r.id for r in rewards.acted(records)] == [before.id, last.id, after.id]


@dataclasses.dataclass(frozen=True)
class Scenario:
  """A task of a client.

  Attributes:
    client: key of commands.CLIENTS.
    script: what the model writes, made from a tokenizer and the client.
    check: what must hold of the records.
    shown: texts of results that must reach the model.
    compacts: whether the client is to compact its context soon.
    tools: those that its recording has, if not all.
  """

  client: str
  script: Callable
  check: Callable[[Sequence[Completion]], None]
  shown: tuple[str, ...] = ('3 a.txt',)
  compacts: bool = False
  tools: tuple[str, ...] = ()

  def command(self) -> commands.Client:
    """The client."""
    client = commands.CLIENTS[self.client]
    return commands.compacting(client) if self.compacts else client


_CALLED = ('Bash', 'exec_command')
_DELEGATED = (*_CALLED, 'Agent', 'multi_agent_v1')
_ALL = ('3 a.txt', '1\n2\n3')
SCENARIOS = {
  name: Scenario(name, task, check_task, _ALL)
  for name, client in commands.CLIENTS.items()
  if client.tool
} | {
  'terminus_2': Scenario('terminus_2', terminus_2, check_terminus_2, _ALL),
  'claude_code_sub_agent': Scenario(
    'claude_code', sub_agent, check_sub_agent, tools=_DELEGATED
  ),
  'codex_sub_agent': Scenario('codex', sub_agent, check_sub_agent, tools=_DELEGATED),
  'claude_code_compaction': Scenario(
    'claude_code', compaction, check_compaction, compacts=True, tools=_CALLED
  ),
  'codex_compaction': Scenario(
    'codex', compaction, check_compaction, compacts=True, tools=_CALLED
  ),
}
# What the scripts decide by.
MARKERS = (clients.QUESTION, SUMMARY, _SUMMARY_ASKED)
