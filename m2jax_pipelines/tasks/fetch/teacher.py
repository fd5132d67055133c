"""The scripted teacher: looks keys up in parallel in some demonstrations.

Whether it does is decided by chance, so that the policy after SFT does both and only
RL decides between them. Keys of a chain are looked up one by one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random

from m2jax.checks import require
from m2jax.tasks import demonstrations
from m2jax.tasks import task as task_lib
from m2jax_pipelines.tasks.fetch.task import ARGUMENT, NAME, FetchTask


@dataclasses.dataclass(frozen=True)
class TeacherConfig(demonstrations.TeacherConfig):
  """How the teacher acts.

  Attributes:
    parallel: probability that independent keys are looked up in one turn.
    seed: seed of the teacher's choices.
  """

  kind: str = 'fetch'
  parallel: float = 0.3
  seed: int = 0

  def __post_init__(self):
    require(self, 0 <= self.parallel <= 1, 'parallel', 'a probability')


async def demonstrate(
  task: FetchTask, environment: task_lib.Environment, config: TeacherConfig
) -> demonstrations.Demonstration:
  """Solves a task by real calls; see `tasks.task`."""
  rng = random.Random(f'teacher/{config.seed}/{task.spec}')
  messages: list[dict] = [{'role': 'user', 'content': task.instruction}]
  pending = list(task.table)  # in the order of the instruction, or of the chain
  together = task.family.startswith('independent') and rng.random() < config.parallel
  while pending:
    now, pending = (pending, []) if together else (pending[:1], pending[1:])
    await _look_up(now, environment, messages)
  messages.append(
    {'role': 'assistant', 'content': task.answer, 'reasoning_content': 'answer'}
  )
  success = await task.verify(environment, task.answer)
  return demonstrations.Demonstration(task.spec, messages, task.tools, success)


async def _look_up(
  keys: list[str], environment: task_lib.Environment, messages: list[dict]
) -> None:
  """Adds a turn with a call for each key, and the results."""
  calls = [
    {
      'id': f'call_{len(messages)}_{i}',
      'type': 'function',
      'function': {'name': NAME, 'arguments': json.dumps({ARGUMENT: key})},
    }
    for i, key in enumerate(keys)
  ]
  messages.append(
    {
      'role': 'assistant',
      'content': '',
      'reasoning_content': 'all' if len(keys) > 1 else 'next',
      'tool_calls': calls,
    }
  )
  found = await asyncio.gather(
    *(environment.execute(NAME, {ARGUMENT: key}) for key in keys)
  )
  messages += [
    {'role': 'tool', 'tool_call_id': call['id'], 'content': value}
    for call, value in zip(calls, found, strict=True)
  ]
