"""Demonstrations in an agent's own prompts: it runs unmodified, a teacher is its model.

The agent talks to a real gateway whose engine is scripted: `Author` answers every
prompt with the teacher's next turn, as the tool call that the agent offers its model.
So the chats of SFT are what the agent really sends, and training starts from them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import re
import shlex
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from m2jax import agents, tasks
from m2jax.agents.episodes import EpisodeConfig
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.rollout.api import GenerateRequest, GenerateResult, NewTokens
from m2jax.text import chat, markup, tokenizer

# Prompts are only read by the author: a tokenizer of little more than bytes is enough.
_VOCABULARY = 300
_CONTEXT_TOKENS = 1 << 20
_MESSAGE = re.compile(
  f'{re.escape(markup.ROLE)}(\\w+)\n?(.*?){re.escape(markup.EOS)}', re.DOTALL
)
_RESPONSE = re.compile('<response>(.*?)</response>', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class _Handle:
  future: concurrent.futures.Future

  def cancel(self) -> None:
    """Does nothing: the answer is there at once."""


class _Script:
  """The turns of one task; an agent that repeats a request gets the same turn."""

  def __init__(self, turns: tasks.Lesson):
    self._turns = turns
    self._by_prompt: dict[bytes, tasks.Turn] = {}
    self._last: tasks.Turn | None = None

  def answer(self, prompt: bytes, observation: str) -> tasks.Turn:
    if prompt not in self._by_prompt:
      try:
        given = observation if self._by_prompt else None
        self._last = self._turns.send(given)
      except StopIteration as end:  # of a finished lesson: the answer once more
        self._last = end.value or self._last
      self._by_prompt[prompt] = self._last
    return self._by_prompt[prompt]


class Author:
  """An engine (`gateway.exchange.Engine`) that answers with a teacher's turns.

  A prompt belongs to the open task with the longest instruction that it contains.
  """

  alive = True
  context_tokens = _CONTEXT_TOKENS

  def __init__(self, config: agents.AuthorConfig, tok: tokenizer.Tokenizer):
    self._config, self._tokenizer = config, tok
    self._scripts: dict[str, _Script] = {}  # by instruction
    self._lock = threading.Lock()

  def open(self, instruction: str, turns: tasks.Lesson) -> None:
    """Answers prompts with this instruction from now on."""
    with self._lock:
      self._scripts[instruction] = _Script(turns)

  def close(self, instruction: str) -> None:
    """Forgets a task."""
    with self._lock:
      del self._scripts[instruction]

  def submit(self, request: GenerateRequest, on_tokens=None) -> _Handle:
    """Answers at once. Raises ValueError for a prompt without an open task."""
    ids = np.asarray(request.prompt_ids, np.int32)
    text = self._tokenizer.decode(ids)
    with self._lock:
      found = [instruction for instruction in self._scripts if instruction in text]
      if not found:
        raise ValueError('the prompt has the instruction of no open task')
      script = self._scripts[max(found, key=len)]
      turn = script.answer(ids.tobytes(), _observation(text))
    tokens = self._encode(turn)
    certain, version = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), int)
    if on_tokens is not None:
      on_tokens(NewTokens(tokens.tolist(), certain))
    future = concurrent.futures.Future()
    result = GenerateResult(tokens, certain, version, 'stop', cached_tokens=0)
    future.set_result(result)
    return _Handle(future)

  def stats(self) -> dict[str, Any]:
    """Nothing to report."""
    return {}

  def _encode(self, turn: tasks.Turn) -> np.ndarray:
    """The turn as the model would have generated it."""
    message = self.message(turn)
    ask = {'role': 'user', 'content': ''}
    ids, owned = tokenizer.encode_chat(self._tokenizer, chat.segments([ask, message]))
    return np.asarray(ids, np.int32)[np.asarray(owned)]

  def message(self, turn: tasks.Turn) -> dict[str, Any]:
    """The turn as an assistant message with the agent's tools."""
    config, rename = self._config, self._config.rename
    message = {'role': 'assistant', 'content': '', 'reasoning_content': turn.thought}
    if turn.tool:
      name = rename.get(turn.tool, turn.tool)
      arguments = {rename.get(k, k): v for k, v in turn.arguments.items()}
    elif config.submit:
      name = config.submit_tool
      submit = config.submit.format(answer=shlex.quote(turn.content))
      arguments = {config.submit_argument: submit}
    else:
      return message | {'content': turn.content}
    function = {'name': name, 'arguments': json.dumps(arguments)}
    return message | {'tool_calls': [{'type': 'function', 'function': function}]}


def _observation(prompt: str) -> str:
  """The text of the last message of a prompt: of a tool, or of the user."""
  role, text = _MESSAGE.findall(prompt)[-1]
  return _RESPONSE.findall(text)[-1] if role == 'tool' else text


async def collect(
  specs: Sequence[str],
  teacher: tasks.TeacherConfig,
  config: EpisodeConfig,
  *,
  on_done: Callable[[int], None] = lambda done: None,
) -> list[tasks.Demonstration]:
  """Makes one demonstration of each task; of those with one instruction, the first.

  Args:
    specs: specs of the tasks.
    teacher: settings of the teacher.
    config: the agent, and how its episodes run.
    on_done: called with the number finished so far.

  Raises:
    ValueError: no episode could be judged; says why the last one could not.
  """
  unique = {}
  for spec in specs:
    unique.setdefault(tasks.make(spec).instruction, spec)
  tok = tokenizer.train(unique, _VOCABULARY)
  author = Author(config.agent.author, tok)
  agent, done, failure = agents.make(config.agent), 0, ''
  running = asyncio.Semaphore(config.concurrency)

  async def one(spec: str, gateway: Gateway) -> tasks.Demonstration | None:
    nonlocal done, failure
    async with running:
      found = await _demonstrate(spec, teacher, config, agent, author, gateway)
    done += 1
    on_done(done)
    if isinstance(found, str):
      failure = found
      return None
    return found

  settings = GatewayConfig(model_name=config.model, inline_bytes=1 << 20)
  with Gateway(settings, tok, author, lambda completion: None) as gateway:
    found = await asyncio.gather(*(one(spec, gateway) for spec in unique.values()))
  await agent.close()
  judged = [demonstration for demonstration in found if demonstration is not None]
  if not judged:
    raise ValueError(f'no demonstration: the last episode ended with: {failure}')
  return judged


async def _demonstrate(
  spec: str,
  teacher: tasks.TeacherConfig,
  config: EpisodeConfig,
  agent: agents.Agent,
  author: Author,
  gateway: Gateway,
) -> tasks.Demonstration | str:
  """One demonstration, or what failed in its infrastructure."""
  task, mistakes = tasks.make(spec), []
  key = f'author-{uuid.uuid4().hex}'
  gateway.sessions.open(key, 'evaluation')
  author.open(task.instruction, tasks.lesson(task, teacher, mistakes))
  try:
    async with agents.open_task(agent, task, config.backend, config.limits) as opened:
      endpoint = agents.Endpoint(gateway.base_url, key, config.model)
      episode = await agent.prepare(task, opened, endpoint)
      outcome = await agents.run_within(agent, task, episode)
      success = await agent.reward(task, opened, outcome)
  finally:
    author.close(task.instruction)
    gateway.sessions.close(key)
  if outcome.end_reason == 'infrastructure':
    return outcome.error
  return tasks.Demonstration(spec, outcome.messages, outcome.tools, success, mistakes)
