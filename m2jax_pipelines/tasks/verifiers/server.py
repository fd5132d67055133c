"""Plays episodes of one `verifiers` environment, by lines of JSON; a program.

    python -P server.py '{"env": NAME, "settings": {...}, "max_turns": N}'

It runs in the interpreter in which the environment is installed, and imports nothing of
m2jax. The environment runs as its package wrote it (verifiers 0.4: `Env.run_episode`
with tool servers, users, hooks and rewards); only the model is replaced. `Relay` is an
in-process harness, as `Harness.launch` allows, and its requests reach the one below
`Model`, which asks over the pipe.

A request on standard input is {"id", "op", ...}; its answer on standard output is
{"id", "ok": ...} or {"id", "error": TEXT}. What the environment prints goes to standard
error. Operations:

    size {}                    -> number of rows, or null if they do not end
    open {session, row}        -> {"messages", "tools"}: the first request to the model
    turn {session, message}    -> the messages that follow, or null if the episode ended
    reward {session}           -> the reward of an episode that ended
    close {session}            -> null
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils import mcp

__all__ = ['Relay']
ALONE = 'm2jax_relay'  # the name under which verifiers imports this file


class Refused(Exception):
  """This adapter does not play the environment; the text says why."""


class Relay(vf.Harness[vf.HarnessConfig]):
  """The plain chat loop: completions, tool calls over MCP, until an answer."""

  APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
  EXECUTES_CODE = NEEDS_CONTAINER = False

  async def launch(
    self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_
  ):  # fmt: skip
    system, prompt = self.resolve_prompt(data)
    messages = [{'role': 'system', 'content': system}] if system else []
    if isinstance(prompt, str):
      messages.append({'role': 'user', 'content': prompt})
    else:
      messages += [message_to_wire(message) for message in prompt or ()]
    servers = {'mcpServers': {name: {'url': url} for name, url in mcp_urls.items()}}
    async with contextlib.AsyncExitStack() as stack:
      tools, names, opened = await mcp.connect_mcp(servers, stack)
      http = await stack.enter_async_context(aiohttp.ClientSession())
      while True:
        body = {'model': ctx.model, 'messages': messages}
        if tools:
          body['tools'] = tools
        headers = {'Authorization': f'Bearer {secret}'}
        url = f'{endpoint}/chat/completions'
        async with http.post(url, json=body, headers=headers, timeout=None) as response:
          if response.status != 200:
            text = (await response.text())[:500]
            return vf.ProgramResult(1, '', f'{response.status}: {text}')
          message = (await response.json())['choices'][0]['message']
        messages.append(message)
        if not message.get('tool_calls'):
          return vf.ProgramResult(0, '', '')
        for call in message['tool_calls']:
          content = await _called(call['function'], names, opened)
          messages.append(
            {'role': 'tool', 'tool_call_id': call['id'], 'content': content}
          )


async def _called(function, names, opened):
  """The result of a tool call, for the model."""
  if function['name'] not in names:
    return f'error: no tool {function["name"]!r}; use {", ".join(sorted(names))}'
  try:
    arguments = json.loads(function['arguments'])
  except ValueError:
    arguments = None
  if not isinstance(arguments, dict):
    return 'error: the arguments are not a JSON object'
  return await mcp.call_mcp(opened, names, function['name'], arguments)


class Session:
  """One episode, whose model is at the other end of the pipe."""

  def __init__(self):
    self.task = None
    self.episode = None
    self._asked = None  # messages of the request that waits for a reply
    self._reply = None  # its future
    self._change = asyncio.Event()

  async def ask(self, body):
    """A request to the model: the message it is answered with."""
    if self._reply is not None:
      raise Refused('two requests to the model at a time')
    self._reply = asyncio.get_running_loop().create_future()
    self._asked = body
    self._change.set()
    return await self._reply

  async def next(self):
    """The next request's body, or None at the episode's end. Raises its error."""
    while self._asked is None and not self.task.done():
      self._change.clear()
      waits = asyncio.ensure_future(self._change.wait())
      await asyncio.wait({waits, self.task}, return_when='FIRST_COMPLETED')
      waits.cancel()
    if self._asked is not None:
      return self._asked
    self.episode = self.task.result()
    return None

  async def turn(self, message):
    """Replies; the messages that follow, or None at the end."""
    if self._reply is None:
      raise Refused('no request to the model waits for this reply')
    before, reply = self._asked['messages'], self._reply
    self._asked = self._reply = None
    reply.set_result(message)
    body = await self.next()
    if body is None:
      return None
    messages = body['messages']
    said = len(before)
    if messages[:said] != before or messages[said]['role'] != 'assistant':
      raise Refused('the environment rewrites the history of the chat')
    return _texts(messages[said + 1 :])


def _texts(messages):
  for message in messages:
    if not isinstance(message['content'], str):
      raise Refused('a message that is not text')
    message.pop('name', None)
  return messages


class Player:
  """The environment and its episodes."""

  def __init__(self, env, max_turns):
    found = {'taskset': {'id': env['env'], **env['settings']}}
    config = vf.resolve_env_config(found)
    seats = list(agent_config_fields(config))
    if len(seats) != 1:
      raise Refused(f'it has the seats {seats}: environments of one agent are played')
    if vf.default_harness_id(env['env']) == env['env']:
      raise Refused('it brings a harness of its own, which would run the model itself')
    played = {
      'harness': {'id': ALONE},
      'runtime': {'type': 'subprocess'},
      'max_turns': max_turns,
    }
    self.env = vf.load_environment(vf.resolve_env_config({**found, seats[0]: played}))
    if type(self.env.taskset).task_type().NEEDS_CONTAINER:
      raise Refused('its tasks need a container: of those, m2jax plays Harbor tasks')
    self._rows = iter(self.env.taskset)
    self._read = []
    self._sessions = {}
    self._traces = {}
    self._context = None

  @contextlib.asynccontextmanager
  async def serving(self):
    """Serves the model's endpoint, and what the environment's episodes share."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post('/v1/chat/completions', self._complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, '127.0.0.1', 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    client = vf.EvalClientConfig(
      base_url=f'http://127.0.0.1:{port}/v1', api_key_var='M2JAX_NO_KEY'
    )
    self._context = vf.ModelContext(model='m2jax', client=client)
    try:
      async with self.env.serving():
        yield
    finally:
      await runner.cleanup()

  async def _complete(self, request):
    """The model's endpoint: of the episode that the request belongs to."""
    session = self._traces.get(request.headers.get('X-Session-ID'))
    if session is None:
      raise web.HTTPNotFound
    message = await session.ask(await request.json())
    reason = 'tool_calls' if message.get('tool_calls') else 'stop'
    return web.json_response(
      {
        'id': 'm2jax',
        'object': 'chat.completion',
        'created': int(time.time()),
        'model': 'm2jax',
        'choices': [{'index': 0, 'finish_reason': reason, 'message': message}],
        'usage': {'prompt_tokens': 0, 'completion_tokens': 0, 'total_tokens': 0},
      }
    )

  async def size(self):
    if not self.env.taskset.bounded:
      return None
    self._read += self._rows
    return len(self._read)

  async def open(self, session, row):
    self._read += itertools.islice(self._rows, max(0, row + 1 - len(self._read)))
    if row >= len(self._read):
      raise Refused(f'there is no row {row}, only {len(self._read)}')
    task = self._read[row]
    if task.data.image or task.data.agent_user:
      raise Refused('its tasks need a container: of those, m2jax plays Harbor tasks')
    found = self._sessions[session] = Session()

    def traced(trace):
      self._traces[trace.id] = found

    found.task = asyncio.create_task(
      self.env.run_episode(task, self._context, on_trace=traced)
    )
    body = await found.next()
    if body is None:
      raise Refused(f'it ended before the first turn: {_errors(found.episode)}')
    messages = _texts(body['messages'])
    roles = [message['role'] for message in messages]
    if roles not in (['user'], ['system', 'user']):
      raise Refused(f'its prompt is the messages {roles}: one of the user is played')
    return {'messages': messages, 'tools': body.get('tools', [])}

  async def turn(self, session, message):
    return await self._sessions[session].turn(message)

  async def reward(self, session):
    episode = self._sessions[session].episode
    if episode is None:
      raise Refused('the episode has not ended')
    if not episode.ok:
      raise Refused(f'the episode failed: {_errors(episode)}')
    if len(episode.traces) != 1:
      raise Refused(f'{len(episode.traces)} agents ran: episodes of one are played')
    return episode.traces[0].reward

  async def close(self, session):
    found = self._sessions.pop(session, None)
    self._traces = {k: v for k, v in self._traces.items() if v is not found}
    if found is not None and found.task is not None:
      found.task.cancel()
      await asyncio.wait({found.task}, timeout=10)


def _errors(episode):
  errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
  return '; '.join(f'{e.type}: {e.message}' for e in errors)[:500] or 'no error'


async def main(env, pipe):
  """Answers requests until standard input ends."""
  player = Player(env, env['max_turns'])
  loop = asyncio.get_running_loop()
  reader = asyncio.StreamReader(limit=1 << 26)
  await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

  async def answer(request):
    number, op = request.pop('id'), request.pop('op')
    try:
      found = {'id': number, 'ok': await getattr(player, op)(**request)}
    except Exception as error:
      what = '' if isinstance(error, Refused) else f'{type(error).__name__}: '
      found = {'id': number, 'error': f'{what}{error}'[:1000]}
    pipe.write(json.dumps(found) + '\n')
    pipe.flush()

  async with player.serving():
    pipe.write('{"id": null, "ok": null}\n')
    pipe.flush()
    running = set()
    while line := await reader.readline():
      task = asyncio.create_task(answer(json.loads(line)))
      running.add(task)
      task.add_done_callback(running.discard)


if __name__ == '__main__':
  out = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # what the environment prints is no answer
  sys.modules[ALONE] = sys.modules['__main__']
  try:
    asyncio.run(main(json.loads(sys.argv[1]), out))
  except Exception as error:
    what = '' if isinstance(error, Refused) else f'{type(error).__name__}: '
    print(json.dumps({'id': None, 'error': f'{what}{error}'[:1000]}), file=out)
    out.flush()
    raise
