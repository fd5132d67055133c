"""The white-box agent with the real gateway: every course and end of an episode."""

import asyncio
import dataclasses
import json
import socket
import time
from pathlib import Path

import pytest

from m2jax import agents, sandbox
from m2jax.agents import Endpoint, whitebox
from m2jax.sandbox import ExecResult
from m2jax.tasks import Environment
from m2jax.tasks.terminal import shell
from tests.gateway.conftest import response_text
from tests.pipelines import model_server
from tests.tasks import local_shell

CALL = response_text(
  'look', calls=[('sh', {'cmd': 'echo hello; echo oops >&2; exit 3'})]
)
ANSWER = response_text('done', 'It is 3.')


def turns(tok, *texts):
  """A script: the n-th request of all gets the n-th text."""
  left = list(texts)
  return lambda request: tok.encode(left.pop(0))


@dataclasses.dataclass(frozen=True)
class Question:
  """The agent's view of a task, around a sandbox that it may break."""

  box: object
  max_tool_calls: int = 7
  instruction: str = 'How many?'
  tools: tuple = (shell.TOOL,)

  def environment(self):
    return Environment(shell.executor(self.box), Path('/'))


async def act(agent, task, base_url, key='k', sampling=None):
  """One episode, through the agent's own methods."""
  endpoint = Endpoint(base_url, key, 'm2jax', sampling or {})
  episode = await agent.prepare(task, task.environment(), endpoint)
  await agent.run(episode)
  return await agent.finish(episode)


def episode(gateway, *, box=None, base_url=None, key='k', max_turns=8, **config):
  """One episode of an agent of its own."""
  config = whitebox.WhiteboxConfig(**{'retry_delay_s': 0.01} | config)
  task = Question(box or local_shell.Box('/'), max_turns - 1)

  async def run():
    agent = agents.make(config)
    try:
      return await act(agent, task, base_url or gateway.base_url, key)
    finally:
      await agent.close()

  return asyncio.run(run())


def test_episode_is_one_chain_of_recorded_ids(serve, tok):
  """Calls run, observations return, and all completions extend one another (law 4)."""
  gateway, _, records = serve(turns(tok, CALL, CALL, ANSWER))
  box = local_shell.Box('/')
  outcome = episode(gateway, box=box, system='Be brief.')
  assert (outcome.end_reason, outcome.answer, outcome.error) == (
    'answer',
    'It is 3.',
    '',
  )
  assert (outcome.tool_calls, outcome.tool_errors) == (2, 0)
  assert box.commands == ['echo hello; echo oops >&2; exit 3'] * 2
  roles = [message['role'] for message in outcome.messages]
  assert roles == ['system', 'user', *['assistant', 'tool'] * 2, 'assistant']
  assert outcome.messages[3]['content'] == 'hello\noops'
  parents = [record.parent for record in records]
  assert parents == [None, records[0].id, records[1].id]
  assert '<response>hello\noops</response>' in tok.decode(records[1].prompt_ids)


@pytest.mark.parametrize(
  'bad, role, said',
  [
    (response_text('x', calls=[('rm', {'cmd': 'a'})]), 'tool', "error: no tool 'rm'"),
    (response_text('x', calls=[('sh', {})]), 'tool', 'error: sh takes one string'),
    (response_text('x', calls=[('sh', {'cmd': 'a', 'b': 'c'})]), 'tool', 'string: cmd'),
    ('x\n</think>\n\n<minimax:tool_call>\nls[e~[', 'user', 'malformed tool call'),
  ],
)  # fmt: skip
def test_bad_call_is_reported_to_the_model(serve, tok, bad, role, said):
  """The model's mistake is counted and shown to it; it does not end the episode."""
  gateway, _, _ = serve(turns(tok, bad, CALL, ANSWER))
  outcome = episode(gateway)
  assert (outcome.end_reason, outcome.tool_errors, outcome.tool_calls) == (
    'answer',
    1,
    1,
  )
  [observation] = [m for m in outcome.messages[1:] if 'error' in str(m['content'])]
  assert observation['role'] == role
  assert said in observation['content']


@pytest.mark.parametrize('bad', ['[1]', '"x"', 'null', '7', '{"a":', '', '[' * 99999])
def test_arguments_that_are_no_object_are_the_models(bad):
  """Servers other than the gateway pass them on, and refuse them in a history."""
  replies = iter([bad, '{"cmd": "ls"}'])

  def answer(body):
    for message in body['messages']:
      for call in message.get('tool_calls') or ():
        if not isinstance(json.loads(call['function']['arguments']), dict):
          return None
    arguments = next(replies, None)
    if arguments is None:
      return 'It is 3.'
    function = {'name': 'sh', 'arguments': arguments}
    return {'tool_calls': [{'id': 'c', 'type': 'function', 'function': function}]}

  with model_server.Server(answer) as server:
    outcome = episode(None, base_url=server.url)
  assert (outcome.end_reason, outcome.error) == ('answer', '')
  assert (outcome.tool_errors, outcome.tool_calls) == (1, 1)
  calls = [m['tool_calls'][0] for m in outcome.messages if m.get('tool_calls')]
  assert calls[0]['function']['arguments'] == bad  # what is recorded is what it wrote


def test_parallel_calls_each_get_their_answer(serve, tok):
  """Several calls in one message: each id gets its own observation, in order."""
  both = response_text(
    'x', calls=[('sh', {'cmd': 'echo 1'}), ('sh', {'cmd': 'echo 2'})]
  )
  gateway, _, records = serve(turns(tok, both, ANSWER))
  outcome = episode(gateway)
  said = outcome.messages[1]['tool_calls']
  answers = outcome.messages[2:4]
  assert [a['content'] for a in answers] == ['1', '2']
  assert [a['tool_call_id'] for a in answers] == [call['id'] for call in said]
  assert records[1].parent == records[0].id


class Meeting:
  """A task whose tool `meet` returns once both of its calls have begun."""

  max_tool_calls, instruction = 3, 'Meet.'
  tools = tuple(
    {'type': 'function', 'function': {'name': name, 'parameters': {'type': 'object'}}}
    for name in ('meet', 'note')
  )

  def __init__(self, independent):
    self._independent, self.begun, self.most, self._running = independent, 0, 0, 0

  def environment(self):
    return Environment(self._execute, independent=frozenset(self._independent))

  async def _execute(self, name, arguments):
    self.begun += 1
    self._running += 1
    self.most = max(self.most, self._running)
    position = self.begun
    # The first call ends last: results must still be in order.
    await asyncio.sleep(0.2 if position == 1 else 0.0)
    self._running -= 1
    if arguments.get('fail'):
      raise RuntimeError('broken')
    return f'{name} {position}'


def meet(gateway, task):
  async def run():
    agent = agents.make(whitebox.WhiteboxConfig(retry_delay_s=0.01))
    try:
      return await act(agent, task, gateway.base_url)
    finally:
      await agent.close()

  return asyncio.run(run())


@pytest.mark.parametrize(
  'independent, names, most',
  [
    (('meet',), ('meet', 'meet'), 2),
    ((), ('meet', 'meet'), 1),
    (('meet',), ('meet', 'note'), 1),  # one that is not independent: all in order
  ],
)
def test_only_independent_calls_run_at_the_same_time(
  serve, tok, independent, names, most
):
  """As the environment says; results keep their order, each with its duration."""
  both = response_text('x', calls=[(name, {}) for name in names])
  gateway, _, records = serve(turns(tok, both, ANSWER))
  task = Meeting(independent)
  outcome = meet(gateway, task)
  assert (outcome.end_reason, task.most, task.begun) == ('answer', most, 2)
  results = [m for m in outcome.messages if m['role'] == 'tool']
  assert [m['content'] for m in results] == [
    f'{n} {i + 1}' for i, n in enumerate(names)
  ]
  assert results[0]['duration_s'] >= 0.2 > results[1]['duration_s'] >= 0
  # The duration is for the report: the model is shown the content only.
  assert 'duration_s' not in tok.decode(records[1].prompt_ids)


def test_a_broken_tool_masks_the_episode_of_parallel_calls(serve, tok):
  """Law 5: as a call on its own does."""
  both = response_text('x', calls=[('meet', {}), ('meet', {'fail': True})])
  gateway, _, _ = serve(turns(tok, both, ANSWER))
  outcome = meet(gateway, Meeting(('meet',)))
  assert outcome.end_reason == 'infrastructure' and 'broken' in outcome.error


def test_real_ends(serve, tok):
  """Running out of turns, tokens or context has its own end reason."""
  gateway, _, records = serve(lambda request: tok.encode(CALL))
  assert episode(gateway, max_turns=3, key='a').end_reason == 'max_turns'
  assert len(records) == 3
  assert episode(gateway, max_tokens=3, key='b').end_reason == 'length'
  room = len(records[1].prompt_ids) + len(records[1].response_ids) + 1
  gateway, _, _ = serve(
    lambda request: tok.encode(CALL), engine_options={'context_tokens': room}
  )
  outcome = episode(gateway)
  assert outcome.end_reason == 'context'
  assert outcome.messages[-1]['role'] == 'tool'


def test_infrastructure_failures_are_never_the_models(serve, tok):
  """Law 5: a dead engine, gateway, key or sandbox masks the episode, with an error."""
  gateway, engine, _ = serve(RuntimeError('device lost'))
  outcome = episode(gateway, retries=2)
  assert (outcome.end_reason, outcome.answer) == ('infrastructure', '')
  assert '503' in outcome.error and 'device lost' in outcome.error
  assert len(engine.requests) == 3

  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  outcome = episode(gateway, base_url=f'http://127.0.0.1:{port}/v1', retries=1)
  assert outcome.end_reason == 'infrastructure'
  assert 'ConnectError' in outcome.error

  gateway, engine, _ = serve(CALL, accept_unknown_keys=False)
  outcome = episode(gateway)
  assert outcome.end_reason == 'infrastructure' and '401' in outcome.error
  assert gateway.counters()['requests_total{status="401"}'] == 1  # not retried

  class Broken:
    async def exec(self, command):
      raise OSError('no space left')

  gateway, _, _ = serve(CALL)
  outcome = episode(gateway, box=Broken())
  assert outcome.end_reason == 'infrastructure' and 'no space left' in outcome.error
  assert outcome.tool_calls == 0


def test_short_outage_is_survived(serve, tok):
  """A transient failure costs a retry, not the episode."""
  failing = [RuntimeError('busy'), RuntimeError('busy')]
  gateway, _, records = serve(
    lambda request: failing.pop() if failing else tok.encode(ANSWER)
  )
  outcome = episode(gateway, retries=3)
  assert (outcome.end_reason, outcome.answer) == ('answer', 'It is 3.')
  assert len(records) == 1


def test_slow_gateway_times_out_as_infrastructure(serve, tok):
  """A completion that never ends times out, and the engine stops working on it."""
  gateway, engine, _ = serve('on ' * 5000, engine_options={'delay_s': 0.02})
  outcome = episode(gateway, request_timeout_s=1.0, retries=0, max_tokens=5000)
  assert outcome.end_reason == 'infrastructure' and 'Timeout' in outcome.error
  deadline = time.monotonic() + 10
  while not engine.cancelled['requests'] and time.monotonic() < deadline:
    time.sleep(0.01)
  assert engine.cancelled['requests'] == 1


def test_cancelled_episode_cancels_its_completion(serve):
  """Cancelling an agent's task reaches the engine through HTTP."""
  gateway, engine, _ = serve('on ' * 5000, engine_options={'delay_s': 0.01})

  async def run():
    agent = agents.make(whitebox.WhiteboxConfig(max_tokens=5000))
    task = Question(local_shell.Box('/'))
    acting = asyncio.ensure_future(act(agent, task, gateway.base_url))
    while not engine.requests:
      await asyncio.sleep(0.01)
    acting.cancel()
    with pytest.raises(asyncio.CancelledError):
      await acting
    await agent.close()

  asyncio.run(run())
  deadline = time.monotonic() + 10
  while not engine.cancelled['requests'] and time.monotonic() < deadline:
    time.sleep(0.01)
  assert engine.cancelled['requests'] == 1


def test_sampling_fields_are_passed_on(serve, tok):
  """An evaluation can ask for greedy sampling through the agent's config."""
  gateway, engine, _ = serve(ANSWER)
  episode(gateway, sampling={'temperature': 0, 'seed': 5}, max_tokens=77)
  sampling = engine.requests[0].sampling
  assert (sampling.temperature, sampling.seed, sampling.max_tokens) == (0, 5, 77)


def test_many_agents_reuse_connections(serve, tok):
  """The shared client opens about as many connections as agents, not as requests."""
  gateway, _, records = serve(lambda request: tok.encode(CALL))
  opened = []

  async def run():
    class Quick:
      async def exec(self, command):
        return ExecResult(0, 'x', '')

    agent, task = agents.make(whitebox.WhiteboxConfig()), Question(Quick(), 4)
    transport = agent._client._transport
    new = transport._new
    transport._new = lambda: opened.append(1) or new()
    one = (act(agent, task, gateway.base_url, f'k{i}') for i in range(16))
    outcomes = await asyncio.gather(*one)
    await agent.close()
    return outcomes

  outcomes = asyncio.run(run())
  assert {outcome.end_reason for outcome in outcomes} == {'max_turns'}
  assert len(records) == 80
  assert len(opened) <= 16


def test_agents_in_real_sandboxes(serve, tok):
  """End to end: HTTP, sandboxes, and separate files for each agent."""

  def script(request):
    prompt = tok.decode(request.prompt_ids)
    if '<response>' in prompt:
      seen = prompt.rpartition('<response>')[2].partition('</response>')[0]
      return tok.encode(response_text('done', seen))
    cmd = 'cat name; cat name >> all; wc -l < all'
    return tok.encode(response_text('look', calls=[('sh', {'cmd': cmd})]))

  gateway, _, _ = serve(script)

  async def run():
    agent = agents.make(whitebox.WhiteboxConfig())

    async def one(i):
      contents = {'name': f'agent {i}\n'.encode()}
      async with await sandbox.create(contents=contents) as box:
        return await act(agent, Question(box), gateway.base_url, f'k{i}')

    outcomes = await asyncio.gather(*(one(i) for i in range(6)))
    await agent.close()
    await sandbox.shutdown()
    return outcomes

  answers = [outcome.answer for outcome in asyncio.run(run())]
  assert answers == [f'agent {i}\n1' for i in range(6)]


# --- Observations.


@pytest.mark.parametrize('text', ['x' * 5000, 'é☃' * 1000, '\ud800' * 3000])
def test_cut_keeps_head_and_tail_within_the_limit(text):
  """A cut observation is text, has both ends and the number of bytes cut."""
  short = whitebox.cut(text, 100)
  head, marker, tail = short.split('\n')
  assert len((head + tail).encode()) <= 100
  missing = len(text.encode('utf-8', 'replace')) - 100
  assert marker == f'[{missing} bytes cut]'
  assert whitebox.cut(text[:20], 100) == text[:20].encode('utf-8', 'replace').decode()


def test_observations_are_cut(serve, tok):
  """The config's limit applies to what is sent to the model."""
  loud = response_text('x', calls=[('sh', {'cmd': 'yes | head -c 100000'})])
  gateway, _, _ = serve(turns(tok, loud, ANSWER))
  outcome = episode(gateway, observation_bytes=64)
  shown = outcome.messages[2]['content']
  assert len(shown) < 100 and 'bytes cut' in shown


class Umpire:
  """An environment that takes whole turns."""

  def __init__(self, *follows):
    self.heard, self._follows = [], list(follows)

  async def respond(self, message):
    self.heard.append(message)
    follows = self._follows.pop(0)
    if isinstance(follows, Exception):
      raise follows
    if isinstance(follows, str):
      call = message['tool_calls'][0]['id']
      return [{'role': 'tool', 'tool_call_id': call, 'content': follows}]
    return follows


def take_turns(gateway, umpire, **config):
  """One episode of an agent with an environment that takes whole turns."""

  async def never(name, arguments):
    raise AssertionError('executed by itself')

  @dataclasses.dataclass(frozen=True)
  class Played(Question):
    spec: str = 'umpire/0'

    def environment(self):
      said = {'instruction': 'Shout.', 'tools': (shell.TOOL,)}
      return Environment(never, respond=umpire.respond, **said)

  async def run():
    agent = agents.make(whitebox.WhiteboxConfig(retry_delay_s=0.01, **config))
    try:
      return await act(agent, Played(None, tools=()), gateway.base_url)
    finally:
      await agent.close()

  return asyncio.run(run())


def test_an_environment_takes_whole_turns(serve, tok):
  """It gets each message and says what follows, after an answer too, until it ends the
  episode; all completions are still one chain (law 4)."""
  gateway, _, records = serve(turns(tok, ANSWER, CALL, ANSWER))
  umpire = Umpire([{'role': 'user', 'content': 'Louder!'}], 'y' * 500, None)
  outcome = take_turns(gateway, umpire, observation_bytes=40)
  assert (outcome.end_reason, outcome.answer) == ('answer', 'It is 3.')
  assert outcome.tool_calls == 1 and outcome.messages[0]['content'] == 'Shout.'
  roles = [message['role'] for message in outcome.messages]
  assert roles == ['user', 'assistant', 'user', 'assistant', 'tool', 'assistant']
  assert 'bytes cut' in outcome.messages[4]['content']
  assert [m['content'] for m in umpire.heard] == ['It is 3.', None, 'It is 3.']
  assert umpire.heard[0]['reasoning_content'] == 'done'
  assert 'Louder!' in tok.decode(records[1].prompt_ids)
  assert records[2].parent == records[1].id


def test_an_environment_that_fails_on_a_turn_is_not_judged(serve, tok):
  gateway, _, _ = serve(turns(tok, ANSWER))
  outcome = take_turns(gateway, Umpire(sandbox.SandboxError('it is gone')))
  assert outcome.end_reason == 'infrastructure' and 'it is gone' in outcome.error


@pytest.mark.parametrize(
  'config',
  [
    {'rename': {'sh': 'bash'}},
    {'sub_agents': whitebox.SubAgentsConfig(depth=1)},
  ],
)
def test_tools_of_the_agents_own_need_an_environment_of_single_calls(serve, config):
  gateway, _, _ = serve(lambda request: [])
  with pytest.raises(ValueError, match='takes whole turns'):
    take_turns(gateway, Umpire(), **config)
