"""A thread: one context of an episode, from its task to its answer.

An episode of the white-box agent is a main thread and those of its sub-agents. A thread
holds the messages of the next request, decides when they must be edited
(`agents.context`), and says of every edit to the gateway what it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from m2jax.agents import context
from m2jax.agents.context import ContextConfig, Messages
from m2jax.agents.loops import Turn

# (messages) -> tokens of their prompt, and the size of the engine's context.
Count = Callable[[Messages], Awaitable[tuple[int, int]]]

_JOINT_TOKENS = 16  # more than the template has between a response and what follows


@dataclasses.dataclass
class Thread:
  """One context.

  Attributes:
    messages: those of the next request.
    config: how they are managed.
    count: counts tokens.
    tools: OpenAI dicts of all tools that the model is offered.
    max_turns: maximum number of completions that call a tool of the task, or none.
    depth: 0 for the main thread, 1 for its sub-agents, …
    head: number of messages that always stay.
    turns: completions so far that are counted.
    edit: the edit since the last completion, or None.
    asked: the edit that the model asked for in this turn, with its notes, or None.
    answer: text of the last message, once there is one without calls.
    history: a record of every turn.
    reacted: number of turns at the last reaction to a loop.
    temperature: temperature of the next completion; None: that of all.
  """

  messages: Messages
  config: ContextConfig
  count: Count
  tools: list[dict[str, Any]]
  max_turns: int
  depth: int = 0
  turns: int = 0
  edit: str | None = None
  asked: tuple[str, str] | None = None
  answer: str = ''
  history: list[Turn] = dataclasses.field(default_factory=list)
  reacted: int = 0
  temperature: float | None = None

  def __post_init__(self):
    self.head = len(self.messages)
    self._used = 0  # tokens of the last prompt and response
    self._sent = 0  # messages that they are of; 0: unknown
    self._limit = 0  # the engine's context; 0: not asked yet
    self._before: tuple[Messages, str | None, int, int] = ([], None, 0, 0)

  def fields(self, messages: Messages | None = None) -> dict[str, Any]:
    """What a request for the next completion says of this thread."""
    messages, edit = self.messages if messages is None else messages, self.edit
    if self.config.thinking == 'drop':
      messages = context.without_thinking(messages)
      edit = edit or (context.DROP_THINKING if context.turns(messages) else None)
    out = {'messages': messages}
    if self.tools:  # servers refuse an empty list
      out['tools'] = self.tools
    return out | {'context_edit': edit} if edit else out

  def completed(self, message: dict[str, Any], usage: Mapping[str, int] | None) -> None:
    """Adds a completion. Without `usage`, which servers may omit, prompts are counted
    anew."""
    self._before = self.messages, self.edit, self._used, self._sent
    self.messages = [*self.messages, message]
    self.edit = None
    total = (usage or {}).get('total_tokens')
    self._used, self._sent = total or 0, len(self.messages) if total else 0

  def withdraw(self) -> None:
    """Takes the last completion back, so that the same request can be made again."""
    self.messages, self.edit, self._used, self._sent = self._before

  def change(self) -> dict[str, Any]:
    """What the request for the turn's first sample has of its own."""
    changed = {} if self.temperature is None else {'temperature': self.temperature}
    self.temperature = None
    return changed

  def join(self, text: str) -> dict[str, str]:
    """Adds a text to the last result; returns its content, {} if there is none.

    The next prompt then extends the recorded ids, whatever the server's template.
    """
    last = self.messages[-1]
    if last['role'] == 'assistant':
      return {}
    joined = {'content': f'{last["content"]}\n\n{text}'}
    self.messages = [*self.messages[:-1], {**last, **joined}]
    return joined

  def add(self, message: dict[str, Any]) -> None:
    """Adds what follows a completion: a result, or an error."""
    self.messages = [*self.messages, message]

  def replace(self, edit: str, messages: Messages) -> None:
    """Makes an edit."""
    self.messages, self.edit, self._sent = messages, edit, 0

  def act(self) -> bool:
    """Makes the edit that the model asked for, after all results of its turn."""
    if self.asked is None:
      return False
    (name, notes), self.asked = self.asked, None
    if name == context.RESTART:
      self.replace(name, context.restart(self.messages, self.head, notes))
    else:
      edited = context.drop_results(self.messages, keep=1)
      if edited != self.messages:
        self.replace(name, edited)
    return True

  async def overflow(self, response_tokens: int) -> bool:
    """Whether the next completion would exceed the threshold of the budget."""
    budget = await self._budget()
    share = self.config.threshold * budget
    new = context.most_tokens(self.messages[self._sent :])
    if self._sent and self._used + new + response_tokens <= share:
      return False
    return await self._tokens() + response_tokens > share

  async def room(self, response_tokens: int) -> int:
    """Tokens of the next completion that the budget allows, up to a number."""
    if not await self.overflow(response_tokens):
      return response_tokens
    return min(response_tokens, await self._budget() - await self._tokens())

  async def fitting(
    self, candidates: Iterator[tuple[str, Messages]], response_tokens: int
  ) -> tuple[str, Messages] | None:
    """The first edit that fits the threshold; else the last one; None of none."""
    share, found = self.config.threshold * await self._budget(), None
    for found in candidates:  # noqa: B007
      if await self._count(found[1]) + response_tokens <= share:
        break
    return found

  async def fits(self, messages: Messages, response_tokens: int) -> bool:
    """Whether messages that begin a new branch fit the budget as a whole."""
    return await self._count(messages) + response_tokens <= await self._budget()

  async def _budget(self) -> int:
    if not self._limit:
      _, self._limit = await self.count(self.messages[: self.head])
    return min(self.config.tokens or self._limit, self._limit)

  async def _tokens(self) -> int:
    """Upper bound of the tokens of the next prompt.

    Recorded ids are extended, whose number may differ from that of a new encoding.
    """
    now = await self._count(self.messages)
    if not self._sent:
      return now
    before = await self._count(self.messages[: self._sent])
    return max(now, self._used + now - before + _JOINT_TOKENS)

  async def _count(self, messages: Messages) -> int:
    if self.config.thinking == 'drop':
      messages = context.without_thinking(messages)
    return (await self.count(messages))[0]
