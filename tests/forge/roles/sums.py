"""Tasks without a sandbox, and an agent whose verdicts differ under any policy.

A task is to read two numbers with a tool and to answer with their sum.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random

from m2jax import tasks

READ = {
  'type': 'function',
  'function': {
    'name': 'read',
    'description': 'Read a number.',
    'parameters': {
      'type': 'object',
      'properties': {'name': {'type': 'string'}},
      'required': ['name'],
    },
  },
}


@dataclasses.dataclass(frozen=True)
class Config(tasks.TasksConfig):
  kind: str = 'tests.forge.roles.sums'


@dataclasses.dataclass(frozen=True)
class TeacherConfig(tasks.TeacherConfig):
  kind: str = 'tests.forge.roles.sums'


@dataclasses.dataclass(frozen=True)
class Sum:
  spec: str
  numbers: dict[str, int]
  family: str = 'two_numbers'
  instruction: str = 'What is a + b?'
  tools: tuple = (READ,)
  max_tool_calls: int = 2
  baseline_calls: int = 2

  @contextlib.asynccontextmanager
  async def open(self, *, backend, limits):
    async def execute(name, arguments):
      if arguments.get('name') not in self.numbers:
        raise tasks.BadCall('there are a and b')
      return str(self.numbers[arguments['name']])

    yield tasks.Environment(execute)

  async def verify(self, environment, answer):
    return float(answer.strip() == str(sum(self.numbers.values())))


def families(config):
  return {'two_numbers': 1.0}


def spec(split, index, seed, config, family):
  return f'{config.kind}/{split}/{seed}/{index}'


def make(spec):
  rng = random.Random(spec)
  return Sum(spec, {name: rng.randrange(30) for name in 'ab'})


async def demonstrate(task, environment, teacher):
  messages = [{'role': 'user', 'content': task.instruction}]
  for i, name in enumerate(task.numbers):
    function = {'name': 'read', 'arguments': json.dumps({'name': name})}
    call = {'id': f'call_{i}', 'type': 'function', 'function': function}
    turn = {'role': 'assistant', 'content': '', 'reasoning_content': f'read {name}'}
    messages.append(turn | {'tool_calls': [call]})
    shown = await environment.execute('read', {'name': name})
    messages.append({'role': 'tool', 'tool_call_id': f'call_{i}', 'content': shown})
  answer = str(sum(task.numbers.values()))
  messages.append({'role': 'assistant', 'content': answer, 'reasoning_content': 'add'})
  success = await task.verify(environment, answer)
  return tasks.Demonstration(task.spec, messages, task.tools, success)
