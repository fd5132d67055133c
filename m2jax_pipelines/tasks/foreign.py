"""What the kinds `openenv` and `verifiers` share: specs, verdicts, a scripted teacher.

Their environments are other people's programs, which take whole turns of the model's
(`tasks.Environment.respond`), say their instruction and tools when they are opened, and
reward in numbers of their own. Specs: KIND/SPLIT/SEED/INDEX@PLACE?SETTINGS, where PLACE
names the environment and SETTINGS is JSON of what differs from the config's defaults.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from m2jax import sandbox
from m2jax.checks import require
from m2jax.tasks import demonstrations
from m2jax.tasks import task as task_lib

SPLITS = ('train', 'dev', 'held_out')
_ROUNDING = 1e-6  # of a sum of weighted rewards
_Config = TypeVar('_Config', bound=task_lib.TasksConfig)


@dataclasses.dataclass(frozen=True)
class ForeignConfig(task_lib.TasksConfig):
  """Settings of both kinds.

  Attributes:
    max_turns: maximum messages of the model's in an episode; the environment then
      judges what was done.
    reward_range: least and most reward of an episode, which become the verdicts 0 and
      1, linearly. A reward outside is an error, and the episode is not judged.
    timeout_s: time limit of each request to the environment.
  """

  kind: str
  max_turns: int = 8
  reward_range: tuple[float, float] = (0.0, 1.0)
  timeout_s: float = 60.0

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'reward_range', tuple(self.reward_range))
    low, high = self.reward_range
    good = math.isfinite(low) and math.isfinite(high) and low < high
    require(self, good, 'reward_range', 'the least and the most, two numbers')
    require(self, self.max_turns >= 1, 'max_turns', '1 or more')
    require(self, 0 < self.timeout_s < math.inf, 'timeout_s', 'positive')
    require(self, not self.partial_credit, 'partial_credit', '0: rewards are theirs')


def spec(config: ForeignConfig, place: str, split: str, index: int, seed: int) -> str:
  """The spec of a task: `place` is the value of the config's field PLACE.

  Raises:
    ValueError: an unknown split or a negative index.
  """
  if split not in SPLITS:
    raise ValueError(f'unknown split {split!r}: expected one of {SPLITS}')
  if index < 0:
    raise ValueError(f'task index is {index}: expected 0 or more')
  default = type(config)()
  settings = {
    field.name: getattr(config, field.name)
    for field in dataclasses.fields(config)
    if field.name not in ('kind', 'weights', place)
    and getattr(config, field.name) != getattr(default, field.name)
  }
  text = json.dumps(settings, separators=(',', ':'), sort_keys=True)
  name = f'{config.kind}/{split}/{seed}/{index}@{getattr(config, place)}'
  return f'{name}?{text}' if settings else name


def parse(
  spec: str, config: type[_Config], place: str
) -> tuple[str, int, int, _Config]:
  """Split, seed, index and config of a spec.

  Raises:
    ValueError: `spec` is not one of `foreign.spec`.
  """
  name, _, rest = spec.partition('@')
  where, _, text = rest.partition('?')
  try:
    kind, split, seed, index = name.split('/')
    settings = json.loads(text or '{}')
    if split not in SPLITS or int(index) < 0 or not where:
      raise ValueError('unknown split, negative index or nothing after @')
    return split, int(seed), int(index), config(**{place: where}, kind=kind, **settings)
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
      f'{spec[:300]!r} is no task: expected KIND/SPLIT/SEED/INDEX@{place.upper()}'
      f'?SETTINGS ({error})'
    ) from error


def verdict(spec: str, reward: Any, config: ForeignConfig) -> float:
  """The success in [0, 1] that a reward means.

  Raises:
    SandboxError: it is no number or outside of `config.reward_range`.
  """
  low, high = config.reward_range
  if isinstance(reward, int | float) and math.isfinite(reward):
    success = (reward - low) / (high - low)
    if -_ROUNDING <= success <= 1 + _ROUNDING:
      return min(max(success, 0.0), 1.0)
  raise sandbox.SandboxError(
    f'task {spec}: its environment rewards {str(reward)[:80]}, which is no number in '
    f'[{low:g}, {high:g}]: set tasks.reward_range to the least and most it gives'
  )


async def no_tool(name: str, arguments: Mapping[str, Any]) -> str:
  """The `execute` of an environment that takes whole turns."""
  raise task_lib.BadCall(f'no tool {name!r} by itself: the environment takes turns')


def results(message: Mapping[str, Any], texts: Sequence[str]) -> list[dict]:
  """The tool messages that answer a message's calls, in their order."""
  calls = message.get('tool_calls') or ()
  return [
    {'role': 'tool', 'tool_call_id': call['id'], 'content': text}
    for call, text in zip(calls, texts, strict=True)
  ]


@dataclasses.dataclass(frozen=True)
class TeacherConfig(demonstrations.TeacherConfig):
  """A teacher that plays one script, for environments that one script solves.

  Attributes:
    script: JSON list of the turns: `{"tool": NAME, "arguments": {...}}`, or
      `{"content": TEXT}`; each may have a `thought`.
  """

  kind: str
  script: str = '[]'

  def turns(self) -> list[dict]:
    """The script's messages, as OpenAI dicts. Raises ValueError if it is no script."""
    try:
      found = []
      for i, turn in enumerate(json.loads(self.script)):
        message = {
          'role': 'assistant',
          'content': turn.get('content', ''),
          'reasoning_content': turn.get('thought', 'next'),
        }
        if 'tool' in turn:
          arguments = json.dumps(turn.get('arguments', {}))
          function = {'name': turn['tool'], 'arguments': arguments}
          call = {'id': f'call_{i}', 'type': 'function', 'function': function}
          message['tool_calls'] = [call]
        found.append(message)
    except (AttributeError, TypeError, ValueError) as error:
      raise ValueError(f'teacher.script is no script: {error}') from error
    if not found:
      raise ValueError(
        'teacher.script is empty: give its turns, or chats by sft.recorded=FILE'
      )
    return found


async def demonstrate(
  task: task_lib.Task, environment: task_lib.Environment, teacher: TeacherConfig
) -> demonstrations.Demonstration:
  """Plays the script in the environment; see `tasks.Demonstration`."""
  assert environment.respond is not None  # both kinds have it
  messages = [{'role': 'user', 'content': environment.instruction}]
  success = 0.0
  for message in teacher.turns():
    messages.append(message)
    follows = await environment.respond(message)
    if follows is None:
      success = await task.verify(environment, message['content'])
      break
    messages += follows
  return demonstrations.Demonstration(
    task.spec, messages, environment.tools or (), success
  )
