"""BFCL's multi-turn entries as tasks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import m2jax
import m2jax_pipelines
from m2jax import sandbox
from m2jax.tasks import task as task_lib
from m2jax_pipelines.tasks.bfcl import data

# Entries by number: neighbours share scenarios, so splits are ranges.
SPLITS = {'train': (0, 100), 'dev': (100, 150), 'held_out': (150, 200)}
CALLS_PER_TURN = 20  # BFCL's MAXIMUM_STEP_LIMIT
_CALL_S = 20.0
_LINE_BYTES = 1 << 20
NEXT = {
  'type': 'function',
  'function': {
    'name': 'next_request',
    'description': 'Call this when the request is done: returns the next request.',
    'parameters': {'type': 'object', 'properties': {}},
  },
}
_RULES = (
  '\n\nDo this with the tools. Then call next_request for the next request, until it '
  'says that there is none; then answer.'
)
_NO_MORE = 'There is no further request: answer now.'


@dataclasses.dataclass(frozen=True)
class Config(task_lib.TasksConfig):
  """BFCL has no settings."""

  kind: str = 'bfcl'


@dataclasses.dataclass(frozen=True)
class _Environment(task_lib.Environment):
  """judged: the verdict on each turn that has ended."""

  judged: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class BfclTask:
  """A `tasks.Task` with the entry's tools and `next_request`."""

  spec: str
  split: str
  number: int
  instruction: str
  requests: Sequence[str]
  tools: Sequence[Mapping[str, Any]]
  max_tool_calls: int
  baseline_calls: int
  family: str = data.CATEGORY

  @contextlib.asynccontextmanager
  async def open(
    self, *, backend: str = 'namespaces', limits: sandbox.Limits | None = None
  ) -> AsyncIterator[task_lib.Environment]:
    """Starts the tools' process; see `tasks.Task.open`."""
    packages = m2jax.__path__[0], m2jax_pipelines.__path__[0], data.root()
    roots = [str(Path(package).parent) for package in packages]
    process = await asyncio.create_subprocess_exec(
      *(sys.executable, '-m', 'm2jax_pipelines.tasks.bfcl.backend', str(self.number)),
      stdin=asyncio.subprocess.PIPE,
      stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.DEVNULL,
      env={'PATH': os.defpath, 'PYTHONPATH': os.pathsep.join(roots)},
      limit=_LINE_BYTES,
    )
    judged: list[Mapping[str, Any]] = []
    try:
      yield _Environment(self._executor(process, judged), judged=judged)
    finally:
      with contextlib.suppress(ProcessLookupError):
        process.kill()
      await process.wait()

  def _executor(self, process, judged) -> task_lib.Execute:
    async def execute(name: str, arguments: Mapping[str, Any]) -> str:
      if name == NEXT['function']['name']:
        if len(judged) < len(self.requests):
          judged.append(await _ask(process, {'end_turn': True}))
        left = self.requests[len(judged) :]
        return left[0] if left else _NO_MORE
      if not isinstance(arguments, Mapping):
        raise task_lib.BadCall('the arguments are not an object')
      if len(judged) == len(self.requests):
        raise task_lib.BadCall('there is no further request')
      answer = await _ask(process, {'call': name, 'arguments': dict(arguments)})
      if answer['error']:
        raise task_lib.BadCall(answer['shown'])
      return answer['shown']

    return execute

  async def verify(self, environment: _Environment, answer: str) -> float:
    """1 if every turn was ended and valid, else 0. An answer ends the last turn."""
    judged = environment.judged
    if len(judged) == len(self.requests) - 1:
      with contextlib.suppress(task_lib.BadCall):  # the tools have stopped
        await environment.execute(NEXT['function']['name'], {})
    done = len(judged) == len(self.requests)
    return float(done and all(turn['valid'] for turn in judged))


async def _ask(process, request: Mapping[str, Any]) -> dict[str, Any]:
  """The backend's answer.

  Raises:
    BadCall: the arguments cannot be sent, or the tools ran out of their limits.
  """
  try:
    line = json.dumps(request).encode() + b'\n'
    json.loads(line)  # as the backend reads it: numbers have a limit of digits
  except (TypeError, ValueError, RecursionError) as error:
    raise task_lib.BadCall(f'the arguments are not JSON: {str(error)[:200]}') from error
  if len(line) > _LINE_BYTES:
    raise task_lib.BadCall(f'the arguments have more than {_LINE_BYTES} bytes')
  try:
    process.stdin.write(line)
    async with asyncio.timeout(_CALL_S):
      await process.stdin.drain()
      line = await process.stdout.readline()
    return json.loads(line)
  except (TimeoutError, ValueError, ConnectionError) as error:
    with contextlib.suppress(ProcessLookupError):
      process.kill()
    raise task_lib.BadCall('the tools ran out of time or memory and stopped') from error


def families(config: Config) -> Mapping[str, float]:
  """One family."""
  return {data.CATEGORY: 1.0}


def spec(
  split: str, index: int, seed: int, config: Config, family: str | None = None
) -> str:
  """The spec of the index-th entry of a shuffled, repeated listing of the split.

  Raises:
    ValueError: an unknown split or a negative index.
  """
  if split not in SPLITS:
    raise ValueError(f'unknown split {split!r}: expected one of {sorted(SPLITS)}')
  if index < 0:
    raise ValueError(f'task index is {index}: expected 0 or more')
  order = list(range(*SPLITS[split]))
  random.Random(f'{seed}').shuffle(order)
  return f'bfcl/{split}/{order[index % len(order)]}'


@functools.lru_cache(maxsize=256)
def make(spec: str) -> BfclTask:
  """Returns the task that a spec names.

  Raises:
    ValueError: there is no such entry.
  """
  parts = spec.split('/')
  known = len(parts) == 3 and parts[1] in SPLITS and parts[2].isdecimal()
  if not known or int(parts[2]) not in range(*SPLITS[parts[1]]):
    raise ValueError(f'{spec!r} is no entry: expected bfcl/SPLIT/NUMBER')
  entry = data.entries()[int(parts[2])]
  requests = data.requests(entry)
  return BfclTask(
    spec=spec,
    split=parts[1],
    number=int(parts[2]),
    instruction=requests[0] + _RULES,
    requests=requests,
    tools=(*data.tools(entry), NEXT),
    max_tool_calls=CALLS_PER_TURN * len(requests),
    baseline_calls=sum(map(len, entry['ground_truth'])) + len(requests) - 1,
  )
