"""The kind `openenv` against a stand-in, a hostile server, and the real one."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import subprocess

import pytest

from m2jax import sandbox, tasks
from m2jax.tasks import BadCall
from m2jax_pipelines.tasks import openenv
from tests import processes
from tests.experiments import conftest as jobs
from tests.pipelines.tasks import installed

websockets = pytest.importorskip('websockets', reason='m2jax_pipelines[openenv]')
ACTION = {
  'title': 'GuessAction',
  'type': 'object',
  'properties': {'metadata': {'type': 'object'}, 'guess': {'type': 'integer'}},
  'required': ['guess'],
}
TOOLS = [{'name': 'look', 'description': 'Looks.', 'input_schema': {'type': 'object'}}]


class Guess:
  """The protocol, written from its description: guess the seed's last digit."""

  action = ACTION

  def __init__(self):
    self.sessions, self.most, self.resets = 0, 0, []

  def answer(self, state, kind, data):
    if kind == 'reset':
      state['secret'] = data['seed'] % 10
      self.resets.append(data)
      return self.observation({'hint': 'a digit'})
    if not isinstance(data.get('guess'), int):
      error = {'code': 'VALIDATION_ERROR', 'message': 'guess must be an integer'}
      return {'type': 'error', 'data': error}
    right = data['guess'] == state['secret']
    return self.observation({'said': 'yes' if right else 'no'}, float(right), right)

  @staticmethod
  def observation(fields, reward=None, done=False):
    data = {'observation': fields, 'reward': reward, 'done': done}
    return {'type': 'observation', 'data': data}

  async def session(self, socket):
    state = {}
    self.sessions += 1
    self.most = max(self.most, self.sessions)
    try:
      async for text in socket:
        message = json.loads(text)
        if message['type'] == 'close':
          break
        found = self.answer(state, message['type'], message['data'])
        await socket.send(found if isinstance(found, str) else json.dumps(found))
    finally:
      self.sessions -= 1

  def request(self, connection, request):
    if request.path == '/schema':
      return connection.respond(200, json.dumps({'action': self.action}))
    return None


class Listed(Guess):
  """A server with tools."""

  action = {'title': 'CallToolAction', 'type': 'object', 'properties': {}}
  tools = TOOLS

  def answer(self, state, kind, data):
    if data.get('type') == 'list_tools':
      return self.observation({'tools': self.tools})
    if data.get('type') == 'call_tool':
      state['calls'] = state.get('calls', 0) + 1
      text = {'content': [{'type': 'text', 'text': f'saw {data["arguments"]}'}]}
      fields = {'tool_name': data['tool_name'], 'result': text, 'error': None}
      return self.observation(fields, 0.25, state['calls'] == 2)
    return self.observation({'text': 'begin'})


@contextlib.asynccontextmanager
async def serving(server):
  from websockets.asyncio.server import serve

  async with serve(
    server.session, '127.0.0.1', 0, process_request=server.request, max_size=1 << 26
  ) as listening:
    yield f'http://127.0.0.1:{listening.sockets[0].getsockname()[1]}'


def call(name, arguments, number=0):
  function = {'name': name, 'arguments': json.dumps(arguments)}
  call = {'id': f'c{number}', 'type': 'function', 'function': function}
  return {'role': 'assistant', 'content': '', 'tool_calls': [call]}


def said(text):
  return {'role': 'assistant', 'content': text}


def play(server, turns, index=0, split='train', **settings):
  """(environment, what followed each turn, verdict) of one episode."""

  async def run():
    async with serving(server) as url:
      config = openenv.Config(
        url=url, timeout_s=settings.pop('timeout_s', 20), **settings
      )
      task = tasks.make(openenv.spec(split, index, 0, config))
      async with task.open() as environment:
        followed = [await environment.respond(turn) for turn in turns]
        return environment, followed, await task.verify(environment, '')

  return asyncio.run(run())


def test_an_action_is_one_tool_with_the_schema_of_the_server():
  server = Guess()
  turns = [
    call('step', {'guess': 'x'}),
    *(call('step', {'guess': n}) for n in range(10)),
  ]
  secret = tasks.make(
    openenv.spec('train', 0, 0, openenv.Config(url='http://h'))
  ).number
  environment, followed, verdict = play(
    server, turns[: secret % 10 + 2], max_turns=20, reset={'level': 2}
  )
  (tool,) = environment.tools
  assert tool['function']['name'] == 'step'
  assert list(tool['function']['parameters']['properties']) == ['guess']
  assert environment.instruction == 'a digit'
  assert followed[0][0]['tool_call_id'] == 'c0'
  assert 'VALIDATION_ERROR' in followed[0][0]['content']
  assert all(shown[0]['content'] == 'no' for shown in followed[1:-1])
  assert followed[-1] is None and verdict == 1.0
  assert server.resets == [{'level': 2, 'seed': secret}]
  with pytest.raises(BadCall, match='takes turns'):
    asyncio.run(environment.execute('step', {}))


def test_the_servers_tools_are_called_and_their_rewards_paid():
  turns = [call('rm', {}), call('look', {'at': 1}), call('look', {})]
  environment, followed, verdict = play(Listed(), turns, rewards='sum', pay_turns=True)
  assert [t['function']['name'] for t in environment.tools] == ['look']
  assert "no tool 'rm'; use look" in followed[0][0]['content']
  assert followed[1][0]['content'] == "saw {'at': 1}"
  assert followed[2] is None and verdict == 0.5
  assert asyncio.run(environment.turn_reward()) == 0.5
  assert asyncio.run(environment.turn_reward()) == 0.0


def test_text_becomes_a_field_of_the_action_and_turns_end():
  class Say(Guess):
    def answer(self, state, kind, data):
      if kind == 'reset':
        return self.observation({'text': 'say it'})
      return self.observation({'text': f'no, not {data["word"]}'}, -2.0)

  environment, followed, verdict = play(
    Say(),
    [said('tree'), said('stone')],
    text_field='word',
    max_turns=2,
    instruction='Play.\n{observation}',
    reward_range=(-4.0, 4.0),
  )
  assert environment.instruction == 'Play.\nsay it' and not environment.tools
  assert followed == [[{'role': 'user', 'content': 'no, not tree'}], None]
  assert verdict == 0.25  # -2 in [-4, 4]


def test_an_answer_without_a_call_ends_and_no_reward_is_none():
  assert play(Guess(), [said('I give up')])[1:] == ([None], 0.0)


@pytest.mark.parametrize('reward', [1.5, -0.1])
def test_a_reward_outside_the_range_is_not_judged(reward):
  class Paid(Guess):
    def answer(self, state, kind, data):
      return self.observation({'text': 'x'}, reward)

  with pytest.raises(sandbox.SandboxError, match=r'task openenv/train.*reward_range'):
    play(Paid(), [call('step', {'guess': 1})])


def deep(depth):
  return (
    '{"type":"observation","data":{"observation":'
    + '{"a":' * depth
    + '1'
    + '}' * (depth + 2)
  )


@pytest.mark.parametrize(
  'answer, error',
  [
    ('x' * 4000, 'too big|1009'),
    (deep(100), 'deeper'),
    (deep(100_000), 'too big|recursion|1009'),
    ('not json', 'Expecting value'),
    ('[]', 'no object'),
    ('{"type": "observation"}', 'without data'),
    ('{"type": "state", "data": {"observation": {}}}', 'no observation'),
    ('{"type": "observation", "data": {"observation": {}, "done": 1}}', 'no obs'),
    ('{"type": "observation", "data": {"observation": {}, "reward": NaN}}', 'NaN'),
    ('{"type": "observation", "data": {"observation": {}, "reward": 1e999}}', 'no obs'),
    ('{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "m"}}', ': m'),
  ],
)
def test_a_hostile_answer_only_fails_its_episode(answer, error):
  class Hostile(Guess):
    def answer(self, state, kind, data):
      return answer if kind == 'step' else super().answer(state, kind, data)

  with pytest.raises(sandbox.SandboxError, match=error):
    play(Hostile(), [call('step', {'guess': 1})], max_bytes=2000)


@pytest.mark.parametrize(
  'tools',
  [
    None,
    [],
    [{'name': 'a b', 'description': '', 'input_schema': {}}],
    TOOLS * 2,
    [{'name': 'look', 'description': 'd', 'input_schema': []}],
    [{'name': f't{n}', 'description': '', 'input_schema': {}} for n in range(65)],
  ],
)
def test_tools_that_are_not_valid_fail_the_episode(tools):
  server = Listed()
  server.tools = tools
  with pytest.raises(sandbox.SandboxError, match='list_tools'):
    play(server, [])


def test_silence_ends_by_the_time_limit():
  class Silent(Guess):
    async def session(self, socket):
      await socket.wait_closed()

  with pytest.raises(sandbox.SandboxError, match='Timeout'):
    play(Silent(), [], timeout_s=0.3)


def test_no_redirect_is_followed():
  """A server cannot send the job to another, by WebSocket or by HTTP."""

  async def run(path):
    other = Guess()

    class Elsewhere(Guess):
      def request(self, connection, request):
        if request.path != path:
          return super().request(connection, request)
        response = connection.respond(302, '')
        response.headers['Location'] = f'{elsewhere}{path}'
        return response

    async with serving(other) as elsewhere, serving(Elsewhere()) as url:
      if path == '/ws':
        elsewhere = elsewhere.replace('http', 'ws')
      task = tasks.make(openenv.spec('train', 0, 0, openenv.Config(url=url)))
      with pytest.raises(sandbox.SandboxError, match='302'):
        async with task.open():
          pass
    return other.most

  assert asyncio.run(run('/ws')) == asyncio.run(run('/schema')) == 0


def test_nobody_listens():
  config = openenv.Config(url=f'http://127.0.0.1:{processes.free_port()}')
  task = tasks.make(openenv.spec('train', 0, 0, config))

  async def run():
    async with task.open():
      pass

  with pytest.raises(sandbox.SandboxError, match='OpenEnv server http'):
    asyncio.run(run())


def test_episodes_wait_for_a_session():
  """No more than `sessions` at a time, and each has its own environment."""
  server = Guess()

  async def run():
    async with serving(server) as url:
      config = openenv.Config(url=url, sessions=2)

      async def one(index):
        task = tasks.make(openenv.spec('train', index, 0, config))
        async with task.open() as environment:
          secret = task.number % 10
          assert await environment.respond(call('step', {'guess': secret})) is None
          return await task.verify(environment, '')

      return await asyncio.gather(*(one(index) for index in range(6)))

  assert asyncio.run(run()) == [1.0] * 6
  assert server.most == 2 and server.sessions == 0


def test_specs():
  """The same task in every process; splits share no seed; nonsense is refused."""
  config = openenv.Config(url='http://h:1/', reset={'a': '@?'}, max_turns=3)
  spec = openenv.spec('dev', 7, 3, config)
  task = tasks.make(spec)
  assert task.config == config and task.split == 'dev' and task.family == 'h:1'
  numbers = {
    split: {tasks.make(openenv.spec(split, i, 0, config)).number for i in range(50)}
    for split in ('train', 'dev', 'held_out')
  }
  assert len(set.union(*numbers.values())) == 150
  for bad in ('openenv/train/0/0', 'openenv/x/0/0@http://h', f'{spec}x', 'openenv/a@b'):
    with pytest.raises(ValueError, match='is no task'):
      tasks.make(bad)
  for url in ('file:///etc', 'http://', 'http://h/?q', 'http://u@h'):
    with pytest.raises(ValueError, match='url'):
      openenv.Config(url=url)


@pytest.fixture(scope='module')
def echo(request, tmp_path_factory):
  """URL of the environment that `openenv init` makes, served by the package."""
  python = installed.python(request.config, 'openenv')
  root, port = tmp_path_factory.mktemp('openenv'), processes.free_port()
  command = [python, '-m', 'openenv.cli', 'init', 'echo_env']
  subprocess.run(command, cwd=root, check=True, capture_output=True)
  app = root / 'echo_env' / 'server' / 'app.py'
  app.write_text(
    app.read_text().replace('max_concurrent_envs=1', 'max_concurrent_envs=4')
  )
  command = [python, '-m', 'uvicorn', 'server.app:app', f'--port={port}']
  server = subprocess.Popen(
    command, cwd=app.parents[1], stderr=subprocess.PIPE, text=True, process_group=0
  )
  try:
    for line in server.stderr:
      if 'Uvicorn running' in line:
        break
    assert server.poll() is None
    yield f'http://127.0.0.1:{port}'
  finally:
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()


@pytest.mark.thorough
def test_an_environment_that_openenv_serves(echo):
  """The template of `openenv init`: ten characters are worth 1."""
  config = openenv.Config(url=echo, sessions=4)
  task = tasks.make(openenv.spec('train', 0, 0, config))

  async def run():
    async with task.open() as environment:
      shown = [
        await environment.respond(call('step', arguments))
        for arguments in (
          {'message': 'hello'},
          {'text': 'a'},
          {'message': '0123456789'},
        )
      ]
      return environment.tools, shown, await task.verify(environment, '')

  (tool,), shown, verdict = asyncio.run(run())
  assert list(tool['function']['parameters']['properties']) == ['message']
  contents = [follows[0]['content'] for follows in shown]
  assert json.loads(contents[0]) == {'echoed_message': 'hello', 'message_length': 5}
  assert 'VALIDATION_ERROR' in contents[1] and verdict == 1.0


@pytest.mark.thorough
def test_forge_trains_on_it(echo, tmp_path):
  """configs/environments.py:openenv_smoke: demonstrations are played on the server and
  rewarded by it; RL's episodes call its tool, and their rewards train."""
  jobs.run_module(
    'experiments.forge',
    '--config=configs/environments.py:openenv_smoke',
    f'--config.tasks.url={echo}',
    '--config.tasks.sessions=4',
    f'--workdir={tmp_path}',
  )
  check_run(tmp_path, 'step')


def check_run(workdir: pathlib.Path, tool: str):
  """What a smoke run on an environment has done."""
  from m2jax.observe import metrics
  from m2jax.pool import database
  from m2jax.pool.reader import Reader

  lines = (workdir / 'demonstrations.jsonl').read_text().splitlines()
  demos = [json.loads(line) for line in lines]
  assert demos and all(demo['success'] == 1.0 for demo in demos)
  assert all([m['role'] for m in d['messages']].count('tool') == 2 for d in demos)
  reader = Reader(database.open_read_only(workdir / 'pool.db'))
  trained = [t.trajectory for t in reader.newest_trajectories(1000, evaluation=False)]
  assert not [t for t in trained if t.end_reason == 'infrastructure'], trained
  assert {t.task.split('/')[1] for t in trained} == {'train'}
  assert any(t.success > 0 for t in trained)
  # Several turns of the policy, each with a call that the environment answers.
  assert any(len(answered(t.messages, tool)) >= 2 for t in trained), trained
  updates = [row for row in metrics.read(workdir, 'rl') if 'step' in row]
  assert [row['step'] for row in updates] == [1, 2]
  assert sum(row['trajectories'] for row in updates) == len(trained)
  # Without advantages an update has no loss; that of equal texts cancels to 1e-13.
  assert any(abs(row.get('loss', 0)) > 1e-6 for row in updates), updates


def answered(messages, tool: str) -> list[str]:
  """What the environment has answered to calls of a tool."""
  ids = {
    call['id']
    for message in messages
    for call in message.get('tool_calls') or ()
    if call['function']['name'] == tool
  }
  return [
    m['content'] for m in messages if m['role'] == 'tool' and m['tool_call_id'] in ids
  ]
