"""Context management: pure functions on an agent's messages, and their settings.

docs/facts/m2-and-forge.md §4.4: context management is an action inside the environment,
s' = f(s, a, o), so that the state that is trained is the state that was sampled. An
edit gives the messages of the next request; the gateway records the prompt of that
request, and the completions before and after it are samples of one trajectory.

Messages are OpenAI dicts. The first `head` of them, the system message and the task,
always stay. A turn is an assistant message with what follows it up to the next one. No
function changes its argument, leaves a tool result without its call, or a call without
its result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from m2jax.checks import require

Messages = list[dict[str, Any]]

DROP_RESULTS, WINDOW, SUMMARISE, RESTART = (
  'drop_results',
  'window',
  'summarise',
  'restart',
)
DROP_THINKING = 'drop_thinking'
POLICIES = ('', DROP_RESULTS, WINDOW, SUMMARISE, RESTART)
DROPPED = '[dropped]'  # instead of a tool result
NOTES = 'Your notes so far:\n'
# Joins the last tool result, so that the request extends the recorded ids and keeps the
# thinking before it (`text.chat`).
SUMMARISE_NOW = (
  'Your context ends here. Call no tool: answer with notes of all that you still need.'
)


def _tool(name: str, description: str, **properties: Any) -> Mapping[str, Any]:
  parameters = {'type': 'object', 'properties': properties}
  if properties:
    parameters['required'] = list(properties)
  function = {'name': name, 'description': description, 'parameters': parameters}
  return {'type': 'function', 'function': function}


# Edits that the model can be offered as tools.
ACTIONS: Mapping[str, Mapping[str, Any]] = {
  DROP_RESULTS: _tool(DROP_RESULTS, 'Drop the results of your earlier calls.'),
  RESTART: _tool(
    RESTART, 'Start again with the task and these notes.', notes={'type': 'string'}
  ),
}


@dataclasses.dataclass(frozen=True)
class ContextConfig:
  """How an agent manages its context.

  Attributes:
    policy: the edit that is made when the next completion would exceed the budget:
      'drop_results' replaces the results of earlier tool calls by a marker, 'window'
      removes earlier turns, 'summarise' lets the model write notes, in a completion of
      its own, and restarts with them, 'restart' restarts without; '' makes none.
    actions: names of `ACTIONS` that the model is offered as tools. A turn that only
      calls them is not counted against the task's limit.
    tokens: the budget of prompt and response; 0 is the engine's context. An episode
      that exceeds it ends, as one does that exceeds the engine's, if no policy shortens
      it.
    threshold: share of the budget above which the policy acts, in (0, 1].
    keep_turns: last turns that `drop_results` and `window` leave unchanged; fewer if
      the result would not fit.
    keep_first: first turns that `window` keeps.
    notes_tokens: maximum tokens of the notes of `summarise`.
    max_edits: maximum edits in an episode.
    thinking: 'keep', or 'drop': prompts contain no reasoning of earlier turns.
  """

  policy: str = ''
  actions: tuple[str, ...] = ()
  tokens: int = 0
  threshold: float = 1.0
  keep_turns: int = 1
  keep_first: int = 0
  notes_tokens: int = 96
  max_edits: int = 8
  thinking: str = 'keep'

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.policy in POLICIES, 'policy', f'one of {POLICIES}')
    check(set(self.actions) <= set(ACTIONS), 'actions', f'among {tuple(ACTIONS)}')
    check(0 < self.threshold <= 1, 'threshold', 'in (0, 1]')
    check(self.thinking in ('keep', 'drop'), 'thinking', "'keep' or 'drop'")
    for name in ('tokens', 'keep_turns', 'keep_first', 'max_edits'):
      check(getattr(self, name) >= 0, name, 'at least 0')
    check(self.notes_tokens > 0, 'notes_tokens', 'positive')


def turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
  """The index at which each turn starts."""
  return [i for i, message in enumerate(messages) if message['role'] == 'assistant']


def drop_results(messages: Messages, keep: int) -> Messages:
  """Replaces the tool results before the last `keep` turns by a marker.

  Results that are no longer than the marker stay.
  """
  starts = turns(messages)
  end = starts[-keep] if 0 < keep <= len(starts) else len(messages) if not keep else 0
  return [
    {**message, 'content': DROPPED}
    if i < end and message['role'] == 'tool' and _bytes(message) > len(DROPPED)
    else message
    for i, message in enumerate(messages)
  ]


def window(messages: Messages, keep: int, first: int = 0) -> Messages:
  """Removes all turns but the first `first` and the last `keep`."""
  starts = [*turns(messages), len(messages)]
  count = len(starts) - 1
  begin, end = starts[min(first, count)], starts[max(count - keep, min(first, count))]
  return messages[:begin] + messages[end:]


def restart(messages: Messages, head: int, notes: str = '') -> Messages:
  """The head, and a user message with the notes if there are any."""
  kept = messages[:head]
  return [*kept, {'role': 'user', 'content': NOTES + notes}] if notes else kept


def without_thinking(messages: Messages) -> Messages:
  """Removes the reasoning of all turns."""
  own = 'reasoning_content', 'reasoning', 'reasoning_details'
  return [{k: v for k, v in message.items() if k not in own} for message in messages]


def edits(
  messages: Messages, head: int, config: ContextConfig
) -> Iterator[tuple[str, Messages]]:
  """The edits of a policy that change the messages, with their names.

  Each is at most as long as the one before it; the last is the shortest there is. For
  'summarise' these are the edits of 'restart', before the notes are known.
  """
  found: list[tuple[str, Messages]] = []
  if config.policy == DROP_RESULTS:
    found += (
      (DROP_RESULTS, drop_results(messages, keep))
      for keep in range(config.keep_turns, -1, -1)
    )
  elif config.policy == WINDOW:
    found += (
      (WINDOW, window(messages, keep, config.keep_first))
      for keep in range(config.keep_turns, -1, -1)
    )
  if config.policy:
    found.append((RESTART, restart(messages, head)))
  last = messages
  for name, edited in found:
    if edited != last:
      yield name, edited
      last = edited


def most_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
  """Upper bound of the tokens that messages of a tool or a user add to a prompt.

  A token of a byte-level tokenizer is at least one byte.
  """
  return 64 + sum(64 + _bytes(message) for message in messages)


def _bytes(message: Mapping[str, Any]) -> int:
  return len((message.get('content') or '').encode('utf-8', 'replace'))
