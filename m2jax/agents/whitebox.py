"""The white-box agent: completions, tool calls and observations over plain HTTP.

It knows a base URL and a key, as any agent does (docs/facts/m2-and-forge.md §4.4); it
is white-box because its loop is part of this code. An infrastructure failure is masked
from the loss, every other end of an episode is judged (law 5).

Its context is managed inside the episode (`agents.context`): by a policy, or by the
model itself through tools. A sub-agent (`delegate`) is a thread of its own in the same
environment and under the same key, so that its completions are samples of the same
trajectory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from m2jax.agents import context, http, loops, model_client, scaffold
from m2jax.agents.agent import Agent, AgentConfig, Endpoint, Outcome, Shown
from m2jax.agents.context import ContextConfig
from m2jax.agents.loops import LoopsConfig, RetryConfig
from m2jax.agents.model_client import ContextExceeded, InfrastructureFailure
from m2jax.agents.rules import Rules, RulesFailed
from m2jax.agents.sub_agents import DELEGATE, TOOL, SubAgentsConfig
from m2jax.agents.thread import Thread
from m2jax.checks import require
from m2jax.tasks import BadCall, Environment, Execute, Task
from m2jax.tasks.task import Respond
from m2jax.text import markup
from m2jax.text.parsing import Status

_BROKEN = (Status.MALFORMED_STRUCTURE, Status.UNCLOSED_BLOCK, Status.UNCLOSED_THINKING)


@dataclasses.dataclass(frozen=True)
class WhiteboxConfig(AgentConfig):
  """How an episode runs. The task limits the number of turns.

  Attributes:
    max_tokens: maximum response tokens per completion.
    observation_bytes: maximum bytes of an observation; the middle of a longer tool
      output is replaced by a marker.
    sampling: additional fields of the request, e.g. {'temperature': 0}; a training
      session overrides those that would change the sampled distribution. A `seed` is
      that of an episode's first completion; the n-th after it has seed + n.
    retries: additional attempts after a connection failure or an HTTP 429 or 5xx.
    retry_delay_s: pause before the first retry; doubles with each.
    request_timeout_s: wall-clock limit of one completion.
    context: how the context is managed.
    sub_agents: what may be delegated.
    instruction: the user's message; `{instruction}` is the task's.
    rename: name of a tool or of an argument of the task's -> what the model is shown.
    descriptions: name of a tool of the task's, or '*' for all others -> its
      description; `{description}` is the task's.
    retry: when a completion is sampled again.
    loops: what counts as a loop, and the reaction.
    rules: source of a rules.py (`agents.rules`); its actions replace those of `loops`.
      '': none.
  """

  kind: str = 'whitebox'
  max_tokens: int = 128
  observation_bytes: int = 2048
  sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  retries: int = 3
  retry_delay_s: float = 0.2
  request_timeout_s: float = 600.0
  context: ContextConfig = ContextConfig()
  sub_agents: SubAgentsConfig = SubAgentsConfig()
  instruction: str = '{instruction}'
  rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
  descriptions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  retry: RetryConfig = RetryConfig()
  loops: LoopsConfig = LoopsConfig()
  rules: str = ''

  def __post_init__(self):
    has = '{instruction}' in self.instruction
    require(self, has, 'instruction', "a text with '{instruction}'")

  def shown(
    self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
  ) -> list[Shown]:
    """See `AgentConfig.shown`; one chat per turn if thinking is dropped."""
    messages, tools = self.rewritten(messages, tools)
    [chat] = super().shown(messages, self.offered(tools))
    if self.context.thinking == 'keep':
      return [chat]
    return scaffold.by_turn(chat)

  def rewritten(
    self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
  ) -> tuple[list[dict], list[dict]]:
    """A task's messages and tools, as the model is shown them."""
    tools = scaffold.described(tools, self.descriptions)
    return scaffold.shown(messages, tools, self.rename, self.instruction)

  def offered(self, tools: Sequence[Mapping[str, Any]], depth: int = 0) -> list[dict]:
    """A task's tools, as the model is shown them, and the agent's own."""
    own = [context.ACTIONS[name] for name in self.context.actions]
    if depth < self.sub_agents.depth:
      own.append(TOOL)
    return [*tools, *own]


Config = WhiteboxConfig


@dataclasses.dataclass
class _Episode:
  """One episode.

  Attributes:
    post: posts a completion request and returns the body of the response.
    count: counts the tokens of messages (`thread.Count`).
    body: what the bodies of all requests have in common.
    execute: runs calls of the tools in `names`.
    tools: the task's tools, as the model sees them.
    names: their names, and those of their arguments -> the task's.
    independent: the task's tools whose calls of one turn run at the same time.
    turn_reward: reward of the turn that just ended; None: turns get none.
    respond: takes whole turns, in place of `execute`; None: calls run one by one.
    main: the main thread.
    started_s: start on the monotonic clock.
    outcome: the result, filled in as the episode proceeds; its messages are those of
      all threads, as they came, and no edit removes any. Completions that were sampled
      again are not among them.
    edits, delegations, completions, retries, reactions: so far.
  """

  post: Callable[[dict], Awaitable[dict]]
  count: Callable[[list[dict]], Awaitable[tuple[int, int]]]
  body: dict[str, Any]
  execute: Execute
  tools: list[dict]
  names: Mapping[str, str]
  independent: frozenset[str]
  turn_reward: Callable[[], Awaitable[float]] | None
  respond: Respond | None
  main: Thread
  started_s: float
  outcome: Outcome
  edits: int = 0
  delegations: int = 0
  completions: int = 0
  retries: int = 0
  reactions: int = 0


class Whitebox(Agent):
  """The agent; its methods raise for no output of the model or the gateway."""

  def __init__(self, config: WhiteboxConfig):
    self._config = config
    self._client = http.make_client()
    self._rules = Rules(config.rules) if config.rules else None

  async def prepare(
    self, task: Task, environment: Environment, endpoint: Endpoint
  ) -> _Episode:
    config = self._config
    if self._rules is not None:
      await self._rules.start()
    said, given = environment.instruction, environment.tools
    user = {'role': 'user', 'content': task.instruction if said is None else said}
    given = task.tools if given is None else given
    [user], tools = config.rewritten([user], given)
    offered = config.offered(tools)
    if environment.respond is not None and (config.rename or len(offered) > len(tools)):
      raise ValueError(
        f'task {task.spec}: its environment takes whole turns (`Environment.respond`): '
        "set no rename, no context.actions and no sub_agents.depth for the agent's"
      )
    scaffold.check_names(offered)
    post, count = model_client.make(self._client, endpoint, config, offered)
    messages = [*self._system(), user]
    return _Episode(
      post=post,
      count=count,
      body={
        'model': endpoint.model,
        'max_tokens': config.max_tokens,
        **config.sampling,
        **endpoint.sampling,
      },
      execute=environment.execute,
      tools=tools,
      names=scaffold.names(given, config.rename),
      independent=environment.independent,
      turn_reward=environment.turn_reward,
      respond=environment.respond,
      main=Thread(messages, config.context, count, offered, task.max_tool_calls + 1),
      started_s=time.monotonic(),
      outcome=Outcome(messages=list(messages), tools=offered),
    )

  async def run(self, episode: _Episode) -> None:
    outcome, thread = episode.outcome, episode.main
    try:
      outcome.end_reason = await self._converse(thread, episode)
      outcome.answer = thread.answer
    except InfrastructureFailure as error:
      outcome.end_reason, outcome.error = 'infrastructure', str(error)
    except RulesFailed as error:
      outcome.end_reason, outcome.error = 'rules', str(error)

  async def finish(self, episode: _Episode) -> Outcome:
    episode.outcome.wall_s = time.monotonic() - episode.started_s
    return episode.outcome

  async def close(self) -> None:
    await self._client.aclose()
    if self._rules is not None:
      await self._rules.close()

  def _system(self) -> list[dict]:
    system = self._config.system
    return [] if system is None else [{'role': 'system', 'content': system}]

  async def _converse(self, thread: Thread, episode: _Episode) -> str:
    """Completions and calls until the thread's answer; returns its end reason."""
    try:
      while thread.turns < thread.max_turns:
        await self._make_room(thread, episode)
        reply = await self._sample(thread, episode)
        choice = reply['choices'][0]
        if choice['finish_reason'] == 'length':
          return 'length'
        goes_on = await self._act(choice, thread, episode)
        if episode.turn_reward is not None:
          episode.outcome.rewards[reply['id']] = await episode.turn_reward()
        if not goes_on:
          thread.answer = choice['message'].get('content') or ''
          return 'answer'
        if end := await self._after(thread, episode):
          return end
        if thread.act():
          episode.edits += 1
    except ContextExceeded:
      return 'context'
    return 'max_turns'

  async def _sample(self, thread: Thread, episode: _Episode) -> dict:
    """The turn's completion, sampled again as the retry rules say."""
    retry, fields = self._config.retry, thread.change()
    left = {'length': retry.length, 'malformed': retry.malformed}
    while True:
      limit = await self._limit(thread, episode.body['max_tokens'])
      reply = await self._complete(thread, episode, max_tokens=limit, **fields)
      reason = _unusable(reply['choices'][0])
      if not left.get(reason) or episode.retries >= retry.most:
        return reply
      left[reason] -= 1
      episode.retries += 1
      thread.withdraw()
      episode.outcome.messages.pop()
      if retry.temperature is not None:
        fields = {'temperature': retry.temperature}

  async def _after(self, thread: Thread, episode: _Episode) -> str:
    """Acts on a loop, or as the rules say; returns an end reason, or ''."""
    found, config = loops.Action(), self._config.loops
    if self._rules is not None:
      left = thread.max_turns - thread.turns
      found = await self._rules.act(thread.history, left)
    if found == loops.Action() and episode.reactions < config.most:
      if loops.detect(thread.history[thread.reacted :], config):
        found = loops.react(config)
        episode.reactions += 1
        thread.reacted = len(thread.history)
    if found.message and (joined := thread.join(found.message)):
      episode.outcome.messages[-1] = {**episode.outcome.messages[-1], **joined}
    thread.temperature = found.temperature
    return found.end

  async def _complete(self, thread: Thread, episode: _Episode, **fields: Any) -> dict:
    """Samples a completion and adds it to the thread; returns the response."""
    if (seed := episode.body.get('seed')) is not None:
      fields['seed'] = seed + episode.completions  # not the same numbers each turn
    episode.completions += 1
    reply = await episode.post(episode.body | thread.fields() | fields)
    choice = reply['choices'][0]
    thread.completed(scaffold.sendable(choice['message']), reply.get('usage'))
    episode.outcome.messages.append(choice['message'])
    return reply

  async def _limit(self, thread: Thread, most: int) -> int:
    """Tokens of the next completion: `most`, or what is left of the budget.

    Raises:
      ContextExceeded: the prompt alone exceeds it, and no edit has shortened it.
    """
    if not self._config.context.tokens:  # the engine ends a response at its own
      return most
    room = await thread.room(most)
    if room < 1:
      raise ContextExceeded
    return room

  async def _make_room(self, thread: Thread, episode: _Episode) -> None:
    """Edits the context by the policy if the next completion would exceed it."""
    config, room = self._config.context, self._config.max_tokens
    if not config.policy or episode.edits >= config.max_edits:
      return
    if not await thread.overflow(room):
      return
    edit = await thread.fitting(
      context.edits(thread.messages, thread.head, config), room
    )
    if edit is None:  # head alone: nothing can be removed
      return
    if config.policy == context.SUMMARISE:
      edit = await self._summarise(thread, episode)
    thread.replace(*edit)
    episode.edits += 1

  async def _summarise(
    self, thread: Thread, episode: _Episode
  ) -> tuple[str, list[dict]]:
    """Lets the model write notes, in one more completion; the edit with them."""
    tokens = self._config.context.notes_tokens
    ask = {'role': 'system', 'content': context.SUMMARISE_NOW}
    for keep in range(len(context.turns(thread.messages)), -1, -1):
      kept = context.window(thread.messages, keep)
      if await thread.fits([*kept, ask], tokens):
        break
    if kept != thread.messages:
      thread.replace(context.WINDOW, kept)
    thread.add(ask)
    episode.outcome.messages.append(ask)
    limit = await self._limit(thread, tokens)
    reply = await self._complete(thread, episode, max_tokens=limit)
    notes = (reply['choices'][0]['message'].get('content') or '').strip()
    head = thread.head
    edited = context.restart(thread.messages, head, notes)
    if not await thread.fits(edited, self._config.max_tokens):
      edited = context.restart(thread.messages, head)
    return context.SUMMARISE, edited

  async def _act(self, choice: dict, thread: Thread, episode: _Episode) -> bool:
    """Runs a message's tool calls; returns False if it has none and is the answer."""
    outcome, message = episode.outcome, choice['message']
    calls = message.get('tool_calls') or ()
    thread.turns += not calls or any(
      call['function']['name'] not in self._config.context.actions for call in calls
    )
    if not calls:
      if _unusable(choice) != 'malformed':
        return episode.respond is not None and await self._respond(
          message, thread, episode
        )
      # A tool message needs the id of a call, so this is a user message.
      outcome.tool_errors += 1
      error = {'role': 'user', 'content': 'error: malformed tool call'}
      self._add(error, thread, episode)
      thread.history.append(loops.turn(message, [error['content']]))
      return True
    if episode.respond is not None:
      return await self._respond(message, thread, episode)
    names = {episode.names.get(call['function']['name'], '') for call in calls}
    run = [
      functools.partial(self._timed, call['function'], thread, episode)
      for call in calls
    ]
    results = await in_order(run, together=names <= episode.independent)
    for call, (observation, seconds) in zip(calls, results, strict=True):
      shown = {'role': 'tool', 'tool_call_id': call['id'], 'content': observation}
      thread.add(shown)
      episode.outcome.messages.append(shown | {'duration_s': seconds})
    thread.history.append(loops.turn(message, [shown for shown, _ in results]))
    return True

  async def _respond(self, message: dict, thread: Thread, episode: _Episode) -> bool:
    """Gives the environment a whole turn; returns False if that was the last one."""
    try:
      follows = await episode.respond(message)
    except Exception as error:
      raise InfrastructureFailure(f'the environment: {error!r}') from error
    episode.outcome.tool_calls += len(message.get('tool_calls') or ())
    contents = []
    for shown in follows or ():
      content = cut(shown['content'], self._config.observation_bytes)
      self._add({**shown, 'content': content}, thread, episode)
      contents.append(content)
    thread.history.append(loops.turn(message, contents))
    return follows is not None

  def _add(self, message: dict, thread: Thread, episode: _Episode) -> None:
    thread.add(message)
    episode.outcome.messages.append(message)

  async def _timed(
    self, function: dict, thread: Thread, episode: _Episode
  ) -> tuple[str, float]:
    """Runs one call; returns the observation and its duration in seconds."""
    started_s = time.monotonic()
    observation = await self._call(function, thread, episode)
    return observation, round(time.monotonic() - started_s, 4)

  async def _call(self, function: dict, thread: Thread, episode: _Episode) -> str:
    """Runs one call; returns the observation."""
    outcome, name = episode.outcome, function['name']
    try:
      offered = [tool['function']['name'] for tool in thread.tools]
      if name not in offered:
        raise BadCall(f'no tool {name!r}; use {", ".join(offered)}')
      arguments = scaffold.arguments(function)
      limits = self._config.sub_agents
      if name in self._config.context.actions or (name == DELEGATE and limits.depth):
        return await self._own(name, arguments, thread, episode)
      arguments = {episode.names.get(k, k): v for k, v in arguments.items()}
      shown = await episode.execute(episode.names[name], arguments)
    except BadCall as error:
      outcome.tool_errors += 1
      return f'error: {error}'
    except (InfrastructureFailure, RulesFailed):
      raise
    except Exception as error:
      raise InfrastructureFailure(f'tool {name}: {error!r}') from error
    outcome.tool_calls += 1
    return cut(shown, self._config.observation_bytes)

  async def _own(
    self, name: str, arguments: Mapping, thread: Thread, episode: _Episode
  ) -> str:
    """Runs a call of one of the agent's own tools. Raises BadCall."""
    if name == DELEGATE:
      return await self._delegate(arguments, thread, episode)
    notes = arguments.get('notes', '')
    if episode.edits >= self._config.context.max_edits:
      thread.turns += 1  # else the model could ask forever
      raise BadCall('no more edits of the context')
    if not isinstance(notes, str):
      raise BadCall('notes must be a string')
    thread.asked = name, cut(notes, self._config.observation_bytes)
    return 'done'

  async def _delegate(
    self, arguments: Mapping, thread: Thread, episode: _Episode
  ) -> str:
    """Runs a sub-agent in the same environment; returns its answer. Raises BadCall."""
    config, limits = self._config, self._config.sub_agents
    task = arguments.get('task')
    if not isinstance(task, str) or not task.strip():
      raise BadCall(f'{DELEGATE} takes one string: task')
    if episode.delegations >= limits.count:
      raise BadCall('no more sub-agents')
    episode.delegations += 1
    depth = thread.depth + 1
    user = {'role': 'user', 'content': cut(task, config.observation_bytes)}
    tools = config.offered(episode.tools, depth)
    sub = Thread(
      [*self._system(), user], config.context, thread.count, tools, limits.max_turns,
      depth,
    )  # fmt: skip
    episode.outcome.messages.append(user)
    end_reason = await self._converse(sub, episode)
    if end_reason != 'answer':
      return f'error: the sub-agent ended: {end_reason}'
    return cut(sub.answer, config.observation_bytes)


make = Whitebox


def _unusable(choice: Mapping[str, Any]) -> str:
  """Why a completion cannot be acted on: 'length', 'malformed', or ''.

  Content contains tool-call markup if a call could not be parsed or was only quoted by
  the model; the parser's status distinguishes the two.
  """
  if choice['finish_reason'] == 'length':
    return 'length'
  message, broken = choice['message'], choice.get('parse_status') in _BROKEN
  if message.get('tool_calls') or not broken:
    return ''
  return 'malformed' if markup.TOOL_CALL in (message.get('content') or '') else ''


async def in_order(
  calls: Sequence[Callable[[], Awaitable[Any]]], *, together: bool
) -> list[Any]:
  """Results of calls in their order: run at the same time, or one after the other.

  An exception cancels the calls that run.
  """
  if not together:
    return [await call() for call in calls]
  try:
    async with asyncio.TaskGroup() as group:
      running = [group.create_task(call()) for call in calls]
  except ExceptionGroup as errors:
    raise errors.exceptions[0] from None
  return [task.result() for task in running]


def cut(text: str, limit_bytes: int) -> str:
  """Returns the text if it fits, else its first and last bytes around a marker.

  Lone surrogates become '?', so that the result can be encoded.

  Args:
    limit_bytes: maximum UTF-8 bytes of the text, not counting the marker.
  """
  data = text.encode('utf-8', 'replace')
  if len(data) <= limit_bytes:
    return data.decode()
  tail_bytes = limit_bytes // 2
  head = data[: limit_bytes - tail_bytes].decode('utf-8', 'ignore')
  tail = data[len(data) - tail_bytes :].decode('utf-8', 'ignore')
  return f'{head}\n[{len(data) - limit_bytes} bytes cut]\n{tail}'
