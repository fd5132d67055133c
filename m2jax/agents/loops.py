"""Loop detection: whether the last turns of a thread repeat, and what follows.

Pure functions over the record of the turns. The rules are those of the OpenHands SDK
(github.com/OpenHands/software-agent-sdk, `StuckDetector`): the same calls with the same
results, errors in a row, two turns that alternate. A reaction is an ordinary further
request, so trajectories remain token-exact: a message joins the last result of the
turn, and the next prompt extends the recorded ids.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax.checks import require

IDENTICAL, ERROR, ALTERNATING = 'identical', 'error', 'alternating'
REACTIONS = ('message', 'resample', 'end')


@dataclasses.dataclass(frozen=True)
class RetryConfig:
  """When a turn's completion is sampled again; the earlier one leaves the context.

  Attributes:
    malformed: additional samples after a tool call that could not be parsed.
    length: additional samples after a response that reached `max_tokens`.
    most: maximum additional samples in an episode.
    temperature: their temperature; None is that of the first sample.
  """

  malformed: int = 0
  length: int = 0
  most: int = 8
  temperature: float | None = None

  def __post_init__(self):
    for name in ('malformed', 'length', 'most'):
      require(self, getattr(self, name) >= 0, name, 'at least 0')
    ok = self.temperature is None or 0 <= self.temperature <= 2
    require(self, ok, 'temperature', 'in [0, 2], or None')


@dataclasses.dataclass(frozen=True)
class LoopsConfig:
  """What counts as a loop, and the reaction. A count of 0 turns a rule off.

  Attributes:
    identical: turns in a row with the same calls and the same results; OpenHands has 4.
    errors: turns in a row in which every call fails, with the same calls or the same
      errors; OpenHands has 3.
    alternating: turns in a row that alternate between two, an even number; OpenHands
      has 6.
    reaction: 'message' adds `message` to the last result, 'resample' draws the next
      completion at `temperature`, 'end' ends the episode with the reason 'loop'.
    message: what the model is shown.
    temperature: temperature of the next completion.
    most: maximum reactions in an episode.
  """

  identical: int = 0
  errors: int = 0
  alternating: int = 0
  reaction: str = 'message'
  message: str = 'You repeat yourself. Try something else.'
  temperature: float = 1.0
  most: int = 4

  def __post_init__(self):
    for name, least in (('identical', 2), ('errors', 2), ('alternating', 4)):
      value = getattr(self, name)
      require(self, value == 0 or value >= least, name, f'0, or at least {least}')
    require(self, self.alternating % 2 == 0, 'alternating', 'even')
    require(self, self.reaction in REACTIONS, 'reaction', f'one of {REACTIONS}')
    require(self, 0 <= self.temperature <= 2, 'temperature', 'in [0, 2]')
    require(self, self.most >= 0, 'most', 'at least 0')


@dataclasses.dataclass(frozen=True)
class Turn:
  """A completion and what followed it.

  Attributes:
    content: text of the completion outside its calls.
    calls: (name, arguments as canonical JSON), ….
    results: what the model was shown of them.
  """

  content: str = ''
  calls: tuple[tuple[str, str], ...] = ()
  results: tuple[str, ...] = ()

  @property
  def failed(self) -> bool:
    """Whether it has results and all are errors."""
    return bool(self.results) and all(r.startswith('error:') for r in self.results)


@dataclasses.dataclass(frozen=True)
class Action:
  """What follows a turn. The default is nothing.

  Attributes:
    message: text that joins the last result of the turn.
    temperature: that of the next completion; None is unchanged.
    end: the reason with which the episode ends; '' continues it.
  """

  message: str = ''
  temperature: float | None = None
  end: str = ''


def turn(message: Mapping[str, Any], results: Sequence[str]) -> Turn:
  """The record of a turn from an OpenAI message and the results of its calls."""
  calls = tuple(
    (call['function']['name'], _canonical(call['function']['arguments']))
    for call in message.get('tool_calls') or ()
  )
  return Turn(message.get('content') or '', calls, tuple(results))


def detect(turns: Sequence[Turn], config: LoopsConfig) -> str:
  """The rule that the last turns meet: one of the three names, or ''.

  Example:
    >>> same = Turn('', (('ls', '{}'),), ('a',))
    >>> detect([same, same], LoopsConfig(identical=2))
    'identical'
  """

  def last(count: int) -> Sequence[Turn]:
    return turns[-count:] if 0 < count <= len(turns) else ()

  def key(t: Turn) -> tuple:
    return t.calls, t.results

  found = last(config.errors)
  if found and all(t.failed for t in found):
    if len({t.calls for t in found}) == 1 or len({t.results for t in found}) == 1:
      return ERROR
  found = last(config.identical)
  if found and found[0].calls and len({key(t) for t in found}) == 1:
    return IDENTICAL
  found = last(config.alternating)
  if found and all(t.calls for t in found):
    even, odd = ({key(t) for t in found[start::2]} for start in (0, 1))
    if len(even) == len(odd) == 1 and even != odd:
      return ALTERNATING
  return ''


def react(config: LoopsConfig) -> Action:
  """The action on a loop."""
  if config.reaction == 'end':
    return Action(end='loop')
  if config.reaction == 'resample':
    return Action(temperature=config.temperature)
  return Action(message=config.message)


def _canonical(arguments: Any) -> str:
  try:
    return json.dumps(json.loads(arguments), sort_keys=True)
  except (TypeError, ValueError, RecursionError):
    return str(arguments)
