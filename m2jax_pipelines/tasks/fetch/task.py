"""Draws the specs of look-up tasks and builds the tasks.

All randomness comes from the spec. Splits have no sequence of keys in common; values
are drawn for each task, so that none can be remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import random
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from m2jax import sandbox
from m2jax.checks import require
from m2jax.tasks import task as task_lib
from m2jax.tasks.verify import normalize_answer

NAME, ARGUMENT = 'get', 'key'
TOOL: Mapping[str, Any] = {
  'type': 'function',
  'function': {
    'name': NAME,
    'description': 'Look up a key.',
    'parameters': {
      'type': 'object',
      'properties': {ARGUMENT: {'type': 'string'}},
      'required': [ARGUMENT],
    },
  },
}
KEYS = tuple(
  'ash bay cod dew elm fig gum hay ivy jam kit log mud nut oak pea rye sun tin urn '
  'vat wax yam zip'.split()
)
FAMILIES = ('independent_2', 'independent_3', 'independent_4', 'chain_2', 'chain_3')
SPLITS = ('train', 'dev', 'held_out')
_SPLITS = ('dev', 'held_out', *['train'] * 4)  # of a sequence of keys, by its hash


@dataclasses.dataclass(frozen=True)
class FetchConfig(task_lib.TasksConfig):
  """Distribution of the look-up tasks.

  Attributes:
    weights: as in `TasksConfig`; empty: all families are equally frequent.
    latency_s: minimum and maximum seconds of a call; each key of a task has its own.
    spare_calls: tool calls allowed beyond `Task.baseline_calls`.
  """

  kind: str = 'fetch'
  latency_s: tuple[float, float] = (0.04, 0.12)
  spare_calls: int = 1

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'latency_s', tuple(self.latency_s))  # lists from JSON
    low, high = self.latency_s
    require(self, 0 <= low <= high <= 10, 'latency_s', 'within 0-10, the least first')
    require(self, 0 <= self.spare_calls <= 8, 'spare_calls', '0-8')


_DEFAULT = FetchConfig()


@dataclasses.dataclass(frozen=True)
class FetchTask:
  """A `tasks.Task` over a table, with the one tool `get`.

  Attributes:
    table: key -> value.
    latency_s: seconds that a look-up of each key takes.
    answer: the right final answer.
    partial_credit: factor on the share of its values that are right.
  """

  spec: str
  family: str
  split: str
  instruction: str
  max_tool_calls: int
  baseline_calls: int
  table: Mapping[str, str]
  latency_s: Mapping[str, float]
  answer: str
  partial_credit: float = 0.0
  tools: Sequence[Mapping[str, Any]] = (TOOL,)

  @contextlib.asynccontextmanager
  async def open(
    self, *, backend: str, limits: sandbox.Limits
  ) -> AsyncIterator[task_lib.Environment]:
    """Opens the table; it needs no sandbox. See `tasks.Task.open`."""
    del backend, limits
    # Look-ups change nothing, so that they may run at the same time.
    yield task_lib.Environment(self._execute, independent=frozenset({NAME}))

  async def _execute(self, name: str, arguments: Mapping[str, Any]) -> str:
    key = arguments.get(ARGUMENT)
    if name != NAME:
      raise task_lib.BadCall(f'no tool {name!r}; use {NAME}')
    if len(arguments) != 1 or not isinstance(key, str):
      raise task_lib.BadCall(f'{NAME} takes one string: {ARGUMENT}')
    if key not in self.table:
      raise task_lib.BadCall(f'no key {key[:20]!r}')
    await asyncio.sleep(self.latency_s[key])
    return self.table[key]

  async def verify(self, environment: task_lib.Environment, answer: str) -> float:
    """The verdict on the answer; see `tasks.Task.verify`."""
    want, given = self.answer.split(), normalize_answer(answer).split()
    if given == want:
      return 1.0
    right = sum(a == b for a, b in zip(given, want, strict=False))
    return self.partial_credit * right / max(len(want), len(given))


def families(config: FetchConfig) -> Mapping[str, float]:
  """Relative frequency of each family; equal if the config has no weights."""
  return dict(config.weights) or dict.fromkeys(FAMILIES, 1.0)


def spec(
  split: str,
  index: int,
  seed: int = 0,
  config: FetchConfig = _DEFAULT,
  family: str | None = None,
) -> str:
  """Returns the spec of the index-th task of a stream; see `tasks.spec`.

  Raises:
    ValueError: unknown split or family, negative index, or no positive weight.
  """
  weights = families(config)
  if split not in SPLITS:
    raise ValueError(f'unknown split {split!r}: expected one of {SPLITS}')
  if index < 0:
    raise ValueError(f'task index is {index}: expected 0 or more')
  for name in (*weights, *([family] if family else [])):
    if name not in FAMILIES:
      raise ValueError(f'unknown family {name!r}: expected one of {FAMILIES}')
  if min(weights.values()) < 0 or not sum(weights.values()) > 0:
    raise ValueError(
      f'FetchConfig.weights are {weights}: expected none below 0 and some above'
    )
  if family is None:
    names = sorted(weights)
    rng = random.Random(f'family/{split}/{seed}/{index}')
    family = rng.choices(names, [weights[name] for name in names])[0]
  changes = config.changes()
  name = f'fetch/{split}/{family}/{seed}/{index}'
  return f'{name}?{changes}' if changes else name


@functools.lru_cache(maxsize=4096)
def make(spec: str) -> FetchTask:
  """Returns the task that a spec names.

  Raises:
    ValueError: `spec` does not come from `fetch.spec`.
  """
  name, _, changes = spec.partition('?')
  parts = name.split('/')
  if len(parts) != 5 or parts[1] not in SPLITS or parts[2] not in FAMILIES:
    raise ValueError(
      f'{spec!r} is no look-up task: expected fetch/SPLIT/FAMILY/SEED/INDEX'
    )
  try:
    config = FetchConfig(**json.loads(changes or '{}'))
  except TypeError as error:
    raise ValueError(f'{spec!r}: unknown settings: {error}') from error
  split, family = parts[1:3]
  kind, _, number = family.partition('_')
  calls, rng = int(number), random.Random(spec)
  keys = rng.sample(KEYS, calls)
  while split_of(keys) != split:
    keys = rng.sample(KEYS, calls)
  values = [str(rng.randint(10, 99)) for _ in keys]
  if kind == 'chain':
    instruction, answer = f'Follow {keys[0]}.', values[-1]
    values[:-1] = keys[1:]
  else:
    instruction, answer = f'Get {" ".join(keys)}.', ' '.join(values)
  return FetchTask(
    spec=spec,
    family=family,
    split=split,
    instruction=instruction,
    max_tool_calls=calls + config.spare_calls,
    baseline_calls=calls,
    table=dict(zip(keys, values, strict=True)),
    latency_s={key: rng.uniform(*config.latency_s) for key in keys},
    answer=answer,
    partial_credit=config.partial_credit,
  )


def split_of(keys: Sequence[str]) -> str:
  """The split that a sequence of keys belongs to."""
  return _SPLITS[zlib.crc32(' '.join(keys).encode()) % len(_SPLITS)]
