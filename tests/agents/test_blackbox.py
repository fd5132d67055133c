"""Commands as agents: honest ones, and ones that try what they must not."""

from __future__ import annotations

import asyncio
import collections
import importlib
import os
import pathlib
import re
import socket
import tempfile
import textwrap
import time
import types

import numpy as np
import pytest

from experiments import common
from m2jax import sandbox
from m2jax.agents import agent as agents
from m2jax.agents import blackbox, episodes, relay
from m2jax.forge.config import ForgeConfig
from m2jax.tasks import Environment, terminal
from tests.agents.environment import needs_environment
from tests.gateway.conftest import response_text

LIMITS = sandbox.Limits(wall_s=20.0, cpu_s=10)
# What a foreign agent is like: any language, its own loop, its own prompts.
CLIENT = textwrap.dedent("""
  import json, os, subprocess, sys, urllib.error, urllib.request
  def post(body, path='/chat/completions', **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = os.environ['OPENAI_BASE_URL'] + path
    headers = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'],
               'content-type': 'application/json', **headers}
    try:
      with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as r:
        return r.status, r.read().decode()
    except urllib.error.HTTPError as error:
      return error.code, error.read().decode()
  def ask(messages, **more):
    status, body = post({'model': 'gpt-9', 'messages': messages, **more})
    return json.loads(body)['choices'][0]['message'] if status == 200 else body
  user = {'role': 'user', 'content': os.environ['TASK']}
""")
LOOP = """
tools = [{'type': 'function', 'function': {'name': 'run', 'parameters': {
  'type': 'object', 'properties': {'line': {'type': 'string'}}}}}]
messages = [{'role': 'system', 'content': 'Mine.'}, user]
while True:
  messages.append(ask(messages, tools=tools))
  if not messages[-1].get('tool_calls'):
    print(messages[-1]['content'])
    break
  for call in messages[-1]['tool_calls']:
    line = json.loads(call['function']['arguments'])['line']
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    messages.append({'role': 'tool', 'tool_call_id': call['id'],
                     'content': done.stdout + done.stderr})
"""
ONCE = 'ask([user])\n'


def python(code):
  return f"cat > /tmp/agent.py <<'END'\n{CLIENT}\n{code}\nEND\npython3 /tmp/agent.py"


@pytest.fixture
def play(serve, tok):
  """play(command, policy=…, count=1, …): trajectories of one task, and the rest."""

  def play(command, policy=None, *, count=1, limits=LIMITS, spec=None, **more):
    spec = spec or terminal.spec('train', 0, family='steps_1')
    asked = {'engine_options': more.pop('engine_options', None)}
    gateway, engine, records = serve(
      policy or response_text('so', 'no'), accept_unknown_keys=False, **asked
    )
    mode = more.pop('mode', 'training')
    sampling = more.pop('sampling', None)
    agent = blackbox.BlackboxConfig(command=command, **more)
    config = episodes.EpisodeConfig(agent=agent, limits=limits)
    with episodes.Runner(config, gateway.base_url, gateway.sessions) as runner:
      group = runner.group(spec, count, mode=mode, sampling=sampling)
      found = group.result(120)
    assert len(gateway.sessions) == 0
    return found, engine, records, gateway

  return play


def solver(tok, task, tool='run', argument='line'):
  """A policy that solves a task through the tool of an agent."""

  def policy(request):
    prompt = tok.decode(request.prompt_ids)
    observations = re.findall('<response>(.*?)</response>', prompt, re.DOTALL)
    lesson = terminal.FAMILIES[task.family].teach(task.params, lambda kind: False)
    try:
      for printed in [None, *observations]:
        thought, command = lesson.send(printed)
    except StopIteration as end:
      return tok.encode(response_text(end.value.thought, end.value.content))
    call = (tool, {argument: command})
    return tok.encode(response_text(thought, calls=[call]))

  return policy


def test_a_foreign_agent_is_trained_on_what_it_sampled(play, tok):
  """Three episodes of a multi-turn agent: each in its own session, one chain of
  recorded ids without a fork, every recorded token is the engine's, and its files are
  judged."""
  spec = terminal.spec('train', 3, family='steps_3')
  task = terminal.make(spec)
  found, engine, records, gateway = play(
    python(LOOP), solver(tok, task), count=3, spec=spec
  )
  assert [(t.end_reason, t.success, t.error) for t in found] == [
    ('answer', 1.0, '')
  ] * 3
  assert len({t.session for t in found}) == 3
  for t in found:
    mine = sorted((r for r in records if r.session == t.session), key=lambda r: r.turn)
    assert len(mine) == task.baseline_calls + 1
    assert [r.parent for r in mine] == [None, *(r.id for r in mine[:-1])]
    assert [m['role'] for m in t.messages][:2] == ['system', 'user']
    assert t.messages[-1]['content'] == t.answer
    assert t.tool_calls == task.baseline_calls and t.wall_s > 0
  assert len(engine.results) == len(records)
  sampled = collections.Counter(
    (request.prompt_ids.tobytes(), result.tokens.tobytes(), result.logprobs.tobytes())
    for request, result in engine.results
  )
  assert sampled == collections.Counter(
    (r.prompt_ids.tobytes(), r.response_ids.tobytes(), r.logprobs.tobytes())
    for r in records
  )
  forks = {k: n for k, n in gateway.counters().items() if k.startswith('forks')}
  assert forks == {'forks_total{reason="first"}': 3}


WALL = sandbox.Limits(wall_s=2.0)
ENDS = {
  'exit': (python(ONCE + 'sys.exit(3)'), 'exit', 'exit 3', {}),
  'stderr': (python(ONCE + 'sys.exit("no luck")'), 'exit', 'no luck', {}),
  'timeout': (python(ONCE) + '\nsleep 60', 'timeout', 'killed after 2 s', {}),
  'flood': (python(ONCE) + '\nyes', 'exit', 'exit 137', {}),
  'silent': ('echo 7', 'infrastructure', 'no completion; exit 0: 7', {}),
  'missing': ('nosuchagent', 'infrastructure', 'command not found', {}),
  'requests': (
    python('while True: ask([user])'),
    *('max_turns', 'relay.requests=3'),
    {'relay': relay.Limits(requests=3)},
  ),
  'bytes': (
    python('while True: post(b"x" * 50_000)'),
    *('limit', 'relay.total_bytes=200000'),
    {'relay': relay.Limits(total_bytes=200_000)},
  ),
  'connections': (
    'for i in {1..10000}; do : < /dev/tcp/127.0.0.1/8080 || break; done; sleep 60',
    *('limit', 'relay.total_connections=40'),
    {'relay': relay.Limits(total_connections=40)},
  ),
}


@pytest.mark.parametrize('name', ENDS)
def test_ends(play, name):
  """Each end has its reason; none but 'answer' has a success."""
  command, reason, said, more = ENDS[name]
  limits = WALL if name == 'timeout' else LIMITS
  (t,), *_ = play(command, limits=limits, **more)
  assert (t.end_reason, t.success, t.answer) == (reason, 0.0, '')
  assert said in t.error


def test_a_broken_engine_is_not_the_agents_failure(play):
  """Law 5: whatever the command then does, its episode is masked."""
  for rest in ('', 'sys.exit(1)'):
    (t,), *_ = play(python(ONCE + rest), RuntimeError('out of chips'))
    assert (t.end_reason, t.success) == ('infrastructure', 0.0)
    assert 'HTTP 503' in t.error


@pytest.mark.parametrize('path', ['/chat/completions', '/responses', '/messages'])
def test_an_engine_that_fails_in_a_stream_is_not_the_agents_failure(play, path):
  """The status was sent before; what the command asks afterwards does not hide it."""
  body = {'model': 'm', 'max_tokens': 9, 'stream': True}
  body['input' if path == '/responses' else 'messages'] = [
    {'role': 'user', 'content': 'hi'}
  ]
  code = f"print(post({body}, '{path}'))\npost(b'', '/models')\nsys.exit(1)"
  (t,), *_ = play(python(code), RuntimeError('out of chips'))
  assert (t.end_reason, t.success) == ('infrastructure', 0.0)
  assert 'HTTP 503' in t.error


def test_a_command_that_streams_has_completions(play):
  """Otherwise its failure would be the gateway's."""
  code = ONCE.replace('[user]', '[user], stream=True')
  (t,), *_ = play(python(code + 'sys.exit(1)'))
  assert t.end_reason == 'exit'


@pytest.mark.parametrize('delay_s', [0.05, 1.0], ids=['again', 'first'])
def test_waiting_for_completions_is_the_commands_own_time(play, delay_s):
  """Otherwise a bad episode could ask until the limit, or talk without an end, to be
  masked."""
  slow = {'delay_s': delay_s, 'piece_tokens': 1}
  code = python('while True: ask([user])')
  (t,), *_ = play(code, limits=WALL, engine_options=slow)
  assert (t.end_reason, t.success) == ('timeout', 0.0)


PROBE = """
import socket
seen = [post(b'{}', path)[0] for path in (
  '/sessions', '/episodes/x/end', '/../metrics', '/chat/completions/../../health',
  '/models%2f..%2f..%2fmetrics')]
mine = {'model': 'm', 'messages': [user]}
seen.append(post(mine, authorization='Bearer rl-0-0-x')[0])
for text in (
  b'\\0' * 100,
  b'GET / HTTP/9.9\\r\\n\\r\\n',
  b'GET http://a/metrics HTTP/1.1\\r\\nhost: a\\r\\n\\r\\n',
  b'GET /v1/models HTTP/1.1\\r\\n' + b'a: b\\r\\n' * 9000,
):
  with socket.create_connection(('127.0.0.1', 8080)) as s:
    s.settimeout(5)
    try:
      s.sendall(text)
      seen.append(int(s.recv(99).split()[1]))
    except (ConnectionError, IndexError):
      seen.append(0)
print(seen)
"""


def test_nothing_else_of_the_gateway_is_reachable(play):
  """Other sessions' keys, other paths, garbage, and endless headers."""
  (t,), _, records, _ = play(python(PROBE))
  *paths, other_key, garbage, version, absolute, headers = eval(t.answer)
  assert paths == [404] * 5
  assert other_key == 200  # with its own key, whatever it sent
  assert (garbage, absolute) == (400, 404) and version in range(400, 506)
  assert headers in (0, 400, 431)
  assert [r.session for r in records] == [t.session]


def test_a_daemon_ends_with_the_command(play, tok):
  """It samples nothing after the verdict."""
  code = ONCE + (
    'import time\n'
    'if os.fork() == 0:\n'
    '  os.setsid()\n'
    '  while True: ask([user]); time.sleep(0.02)\n'  # fewer than max_turns
    'time.sleep(0.3); print(7)'
  )
  (t,), engine, records, _ = play(python(code))
  assert t.end_reason == 'answer'
  before = len(engine.requests)
  time.sleep(0.3)
  assert len(engine.requests) == before


def test_a_client_that_leaves_is_cancelled_at_the_engine(play):
  """A request without a reader does not hold a slot of the engine."""
  code = """
import socket, time
body = json.dumps({'model': 'm', 'messages': [user], 'max_tokens': 5000})
s = socket.create_connection(('127.0.0.1', 8080))
head = 'POST /v1/chat/completions HTTP/1.1\\r\\nhost: a\\r\\ncontent-length: '
s.sendall(f'{head}{len(body)}\\r\\n\\r\\n{body}'.encode())
time.sleep(0.5)
s.close()
time.sleep(1)
print(len(ask([user])))
"""
  calls = []

  def policy(request):
    calls.append(request)
    return list(range(300, 400)) * (50 if len(calls) == 1 else 1)

  slow = {'delay_s': 0.01}
  _, engine, records, _ = play(python(code), policy, engine_options=slow)
  assert engine.cancelled['requests'] == 1 and len(calls) == 2


def test_an_evaluation_samples_as_it_is_asked(play):
  """The relay sets model and sampling: the agent need not know of them."""
  sampling = {'temperature': 0.0, 'top_p': 1.0, 'top_k': 0}
  code = 'print(ask([user], temperature=0.7)["content"])'
  (t,), engine, *_ = play(python(code), mode='evaluation', sampling=sampling)
  assert t.answer == 'no'
  [request] = engine.requests
  assert (request.sampling.temperature, request.sampling.top_p) == (0.0, 1.0)


def test_streams_pass(play):
  """Events arrive one by one, as the gateway sends them."""
  code = """
import time
body = json.dumps({'model': 'm', 'messages': [user], 'stream': True}).encode()
url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'
times = []
with urllib.request.urlopen(urllib.request.Request(url, body)) as r:
  for line in r:
    times.append((time.monotonic(), line.decode().strip()))
assert times[-2][1] == 'data: [DONE]', times[-3:]
print(times[-2][0] - times[0][0] > 0.2)
"""
  slow = {'delay_s': 0.02, 'piece_tokens': 1}
  text = response_text('so ' * 20, 'no')
  (t,), *_ = play(python(code), text, engine_options=slow)
  assert (t.end_reason, t.answer) == ('answer', 'True'), t.error


def test_tasks_are_out_of_sight(play):
  """A command can import neither the tasks, which know their answers, nor see files."""
  code = ONCE + (
    'for name in ("m2jax", "m2jax_pipelines"):\n'
    '  try:\n    __import__(name)\n'
    '  except ImportError:\n    print("hidden", os.path.exists(HERE))'
  ).replace('HERE', repr(__file__))
  (t,), *_ = play(python(code))
  assert t.answer == 'hidden False\nhidden False'


@pytest.mark.parametrize('package', ['m2jax', 'm2jax_pipelines', 'mylab'])
def test_a_directory_that_shows_the_tasks_is_refused(folder, monkeypatch, package):
  """m2jax, its pipelines, and an installed package that adds a kind of tasks."""
  (folder / package).mkdir()
  if package == 'mylab':
    (folder / package / '__init__.py').touch()
    facts = folder / 'mylab-1.0.dist-info'
    facts.mkdir()
    (facts / 'METADATA').write_text('Name: mylab\nVersion: 1.0\n')
    (facts / 'entry_points.txt').write_text('[m2jax.tasks]\nsums = mylab.sums\n')
    monkeypatch.syspath_prepend(folder)
  else:
    spec = importlib.import_module(package).__spec__
    places = [str(folder / package)]
    monkeypatch.setattr(spec, 'submodule_search_locations', places)
  for directory in (str(folder), str(folder / package)):
    with pytest.raises(ValueError, match='BlackboxConfig.read_only.*their answers'):
      blackbox.BlackboxConfig(command='x', read_only=(directory,))


def test_bad_directories_are_named():
  with pytest.raises(ValueError, match='read_only.*is none'):
    blackbox.BlackboxConfig(command='x', read_only=('/usr/none-such',))
  with pytest.raises(ValueError, match='read_only.*outside /tmp and /workspace'):
    blackbox.BlackboxConfig(command='x', read_only=('/tmp',))
  with pytest.raises(ValueError, match='BlackboxConfig.command'):
    blackbox.BlackboxConfig()


@pytest.mark.parametrize(
  'name, text, said',
  [
    ('OPTIONS', '{"a": 1}', r"""'{{' for '{'; OPTIONS: '{"a": 1}'"""),
    ('OPTIONS', '{', "'{{' for '{'; OPTIONS: '{' is none"),
    ('URL', '{base_url}', '{url}, {key} and {model}'),
    ('URL', '{}', '{url}, {key} and {model}'),
    ('URL', '{url.port}', '{url}, {key} and {model}'),
    ('URL', '{url:>{width}}', '{url}, {key} and {model}'),
    ('A B', 'x', "'A B' is no name"),
    ('A', 7, 'A: 7 is no text'),
  ],
)
def test_an_environment_that_cannot_be_made(name, text, said):
  """It is refused when it is configured, not in each episode."""
  with pytest.raises(ValueError, match='BlackboxConfig.environment') as error:
    blackbox.BlackboxConfig(command='x', environment={name: text})
  assert said in str(error.value)


def test_braces_in_the_environment(play):
  """Doubled, they reach the command as they are meant."""
  code = ONCE + 'print(os.environ["OPTIONS"], os.environ["URL"])'
  given = {'OPTIONS': '{{"model": "{model}"}}', 'URL': '{url}/x'}
  (t,), *_ = play(python(code), environment=given)
  assert t.answer == '{"model": "m2jax"} http://127.0.0.1:8080/x'


@pytest.mark.parametrize('broken', ['start', 'instruction'])
def test_a_preparation_that_fails_leaves_no_relay(monkeypatch, broken):
  """Its port is closed, although nobody calls `finish`."""
  listener = socket.create_server(('127.0.0.1', 0))
  port = listener.getsockname()[1]
  text = 7 if broken == 'instruction' else 'do it'

  async def listen(port):
    return listener

  async def fail(self):
    raise OSError('no start')

  if broken == 'start':
    monkeypatch.setattr(relay.Relay, 'start', fail)

  async def prepare():
    agent = blackbox.Blackbox(blackbox.BlackboxConfig(command='x'))
    environment = Environment(None, box=types.SimpleNamespace(listen=listen))
    task = types.SimpleNamespace(instruction=text, spec='a/b')
    endpoint = agents.Endpoint('http://127.0.0.1:9/v1', 'key', 'm2jax', {})
    try:
      await agent.prepare(task, environment, endpoint)
    finally:
      await agent.close()

  with pytest.raises((OSError, TypeError)):
    asyncio.run(prepare())
  with pytest.raises(ConnectionRefusedError):
    socket.create_connection(('127.0.0.1', port), timeout=1).close()


def test_what_pays_turns_is_refused():
  """A command's turns end unseen; a reward that is never asked for would be none."""

  async def prepare():
    agent = blackbox.Blackbox(blackbox.BlackboxConfig(command='x'))
    environment = Environment(None, box=object(), turn_reward=prepare)
    try:
      await agent.prepare(types.SimpleNamespace(spec='a/b'), environment, None)
    finally:
      await agent.close()

  with pytest.raises(ValueError, match='task a/b: pays turns'):
    asyncio.run(prepare())


def test_limits_are_positive():
  with pytest.raises(ValueError, match='Limits.requests=0: must be positive'):
    relay.Limits(requests=0)
  assert np.all([v > 0 for v in vars(relay.Limits()).values()])


@pytest.fixture
def folder():
  """A directory that is not below the command's own /tmp."""
  with tempfile.TemporaryDirectory(dir='/var/tmp') as path:
    os.chmod(path, 0o755)
    yield pathlib.Path(path)


@needs_environment
def test_the_pages_agent_solves_a_task(play, tok, folder, monkeypatch):
  """docs/agents.md's agent around OpenAI's client, docs/your_agent.md's config."""
  root = pathlib.Path(__file__).parent.parent.parent
  (agent,) = re.findall(
    r'```python\n(# loop.py.*?)```', (root / 'docs/agents.md').read_text(), re.DOTALL
  )
  (config,) = re.findall(
    r'```python\n(# my_agent.py.*?)```',
    (root / 'docs/your_agent.md').read_text(),
    re.DOTALL,
  )
  (folder / 'agent').mkdir()
  (folder / 'agent' / 'loop.py').write_text(agent)
  monkeypatch.chdir(folder)
  scope = {}
  exec(config, scope)
  values = scope['get_config']('smoke').to_dict()
  made = common.build(ForgeConfig, values).episodes
  assert made.agent.author.rename == {'sh': 'run', 'cmd': 'line'}
  spec = terminal.spec('train', 5, family='steps_2')
  shown = {name: getattr(made.agent, name) for name in ('command', 'read_only')}
  policy = solver(tok, terminal.make(spec))
  (t,), *_ = play(policy=policy, spec=spec, limits=made.limits, **shown)
  assert (t.end_reason, t.success, t.error) == ('answer', 1.0, '')


def test_no_address_but_the_relay_can_be_reached(play):
  """The gateway's own port, services of this machine, its other addresses, a name
  server: an agent has the relay alone, and no other interface than `lo`."""
  with socket.create_server(('0.0.0.0', 0)) as listening:
    port = listening.getsockname()[1]
    mine = socket.gethostbyname(socket.gethostname())
    found, *_ = play(
      python(f"""
import socket
with open('/proc/net/dev') as file:
  names = [line.partition(':')[0].strip() for line in file.readlines()[2:]]
reached = []
places = [('127.0.0.1', {port}), ({mine!r}, {port}), ('192.0.2.1', 80)]
for place in places:
  try:
    socket.create_connection(place, timeout=2).close()
    reached.append(place)
  except OSError:
    pass
try:
  reached.append(socket.gethostbyname('example.org'))
except OSError:
  pass
ask([user])
print(names, reached)
""")
    )
    listening.settimeout(0.1)
    with pytest.raises(TimeoutError):
      listening.accept()
  assert found[0].answer == "['lo'] []", found[0]
