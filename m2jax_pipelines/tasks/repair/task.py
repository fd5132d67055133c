"""Repair tasks: a file with a function that does not do what the instruction says."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from m2jax import sandbox
from m2jax.checks import require
from m2jax.tasks import task as task_lib
from m2jax_pipelines.tasks.repair import code, programs

_VALUES = range(13)
_HIDDEN = tuple(itertools.product(_VALUES, repeat=2))
_DRAWN = 24  # a bug has to change a value on one of this many calls
_SHOWN_CHARS = 120


def _tool(name: str, description: str, *arguments: str) -> Mapping[str, Any]:
  parameters = {
    'type': 'object',
    'properties': {argument: {'type': 'string'} for argument in arguments},
    'required': list(arguments),
  }
  function = {'name': name, 'description': description, 'parameters': parameters}
  return {'type': 'function', 'function': function}


TOOLS = (
  _tool('read', f'Read {code.FILE}.'),
  _tool('edit', 'Replace a text that occurs once.', 'old', 'new'),
  _tool('test', 'Call f.'),
)


@dataclasses.dataclass(frozen=True)
class Config(task_lib.TasksConfig):
  """Distribution of the repairs.

  Attributes:
    steps: minimum and maximum number of steps of a program, each a family `steps_N`.
    spare_calls: tool calls beyond those of read, edit and test.
  """

  kind: str = 'repair'
  steps: tuple[int, int] = (1, 4)
  spare_calls: int = 3

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'steps', tuple(self.steps))
    low, high = self.steps
    allowed = 1 <= low <= high <= programs.MAX_STEPS
    require(self, allowed, 'steps', f'within 1-{programs.MAX_STEPS}')
    require(self, not self.partial_credit, 'partial_credit', '0: right or wrong')
    require(self, self.spare_calls >= 0, 'spare_calls', '0 or more')
    known = all(name in _families(self.steps) for name in self.weights)
    require(self, known, 'weights', f'of {_families(self.steps)}')


@dataclasses.dataclass(frozen=True)
class _Environment(task_lib.Environment):
  backend: str = 'namespaces'
  limits: sandbox.Limits = dataclasses.field(default_factory=sandbox.Limits)


@dataclasses.dataclass(frozen=True)
class RepairTask:
  """A `tasks.Task`.

  Attributes:
    program: what the function should be.
    bug: what the file has instead.
    shown: the calls of the tool `test`.
    hidden: the calls that the verdict is on, made in a new sandbox: all pairs of 0 to
      12.
  """

  spec: str
  family: str
  split: str
  program: programs.Program
  bug: programs.Bug
  shown: tuple[tuple[int, int], ...]
  hidden: tuple[tuple[int, int], ...]
  max_tool_calls: int
  baseline_calls: int = 3
  tools: Sequence[Mapping[str, Any]] = TOOLS

  @property
  def instruction(self) -> str:
    return f'Fix {code.FILE}: f should {self.program.words}.'

  @property
  def broken(self) -> str:
    """The file's text at the start."""
    return programs.apply(self.program, self.bug).code

  @contextlib.asynccontextmanager
  async def open(
    self, *, backend: str = 'namespaces', limits: sandbox.Limits | None = None
  ) -> AsyncIterator[task_lib.Environment]:
    """Opens a sandbox with the file; see `tasks.Task.open`."""
    limits = limits or sandbox.Limits()
    async with await _sandbox(self.broken.encode(), backend, limits) as box:
      execute = functools.partial(self._execute, box)
      yield _Environment(execute, box.workspace, box, backend=backend, limits=limits)

  async def _execute(
    self, box: sandbox.Sandbox, name: str, arguments: Mapping[str, Any]
  ) -> str:
    wanted = {'read': set(), 'edit': {'old', 'new'}, 'test': set()}.get(name)
    if wanted is None:
      raise task_lib.BadCall(f'no tool {name!r}; use read, edit or test')
    strings = all(isinstance(value, str) for value in arguments.values())
    if set(arguments) != wanted or not strings:
      raise task_lib.BadCall(
        f'{name} takes {" and ".join(sorted(wanted)) or "nothing"}'
      )
    if name == 'test':
      return await self._test(box)
    try:
      text = (await box.read(code.FILE, code.MAX_BYTES)).decode()
    except (FileNotFoundError, sandbox.SandboxPathError, UnicodeDecodeError):
      raise task_lib.BadCall(f'{code.FILE} is gone, or no text any more') from None
    return text.rstrip() if name == 'read' else await _edit(box, text, **arguments)

  async def _test(self, box: sandbox.Sandbox) -> str:
    found = await code.values(box, self.shown)
    if isinstance(found, str):
      return found[:_SHOWN_CHARS]
    for call, value in zip(self.shown, found, strict=True):
      if not code.equal([value], [self.program(*call)]):
        shown = repr(value)[:_SHOWN_CHARS]
        return f'f{call} is {shown}, should be {self.program(*call)}'
    return 'ok'

  async def verify(self, environment: _Environment, answer: str) -> float:
    """1 if the file's function has the right values on the hidden calls, else 0.

    An empty answer fails.
    """
    try:
      content = await environment.box.read(code.FILE, code.MAX_BYTES)
    except (FileNotFoundError, sandbox.SandboxPathError):
      return 0.0
    opened = _sandbox(content, environment.backend, environment.limits)
    async with await opened as box:
      found = await code.values(box, self.hidden)
    right = code.equal(found, [self.program(*call) for call in self.hidden])
    return float(right and bool(answer.strip()))


async def _sandbox(content: bytes, backend: str, limits: sandbox.Limits):
  return await sandbox.create(
    contents={code.FILE: content}, backend=backend, limits=limits
  )


async def _edit(box: sandbox.Sandbox, text: str, old: str, new: str) -> str:
  count = text.count(old) if old else 0
  if count != 1:
    raise task_lib.BadCall(f'old occurs {count} times, not once')
  changed = text.replace(old, new).encode(errors='replace')
  if len(changed) > code.MAX_BYTES:
    raise task_lib.BadCall(f'{code.FILE} would be above {code.MAX_BYTES} bytes')
  try:
    await box.write(code.FILE, changed)
  except sandbox.WorkspaceFull as error:  # the file's own code, when a test ran it
    raise task_lib.BadCall('no space is left in the workspace') from error
  return 'edited'


def _families(steps: tuple[int, int]) -> list[str]:
  return [f'steps_{n}' for n in range(steps[0], steps[1] + 1)]


def families(config: Config) -> Mapping[str, float]:
  """Relative frequency of each family; equal if the config has no weights."""
  return dict(config.weights) or dict.fromkeys(_families(config.steps), 1.0)


def spec(split: str, index: int, seed: int, config: Config, family: str | None) -> str:
  """The spec of the index-th task; see `tasks.spec`."""
  if split not in programs.SPLITS or index < 0:
    raise ValueError(f'repair: no task {index} of the split {split!r}')
  weights = families(config)
  if family is None:
    rng = random.Random(f'family/{split}/{seed}/{index}')
    family = rng.choices(sorted(weights), [weights[n] for n in sorted(weights)])[0]
  elif family not in _families((1, programs.MAX_STEPS)):
    raise ValueError(f'unknown family {family!r}: expected one of {sorted(weights)}')
  return f'repair/{split}/{family}/{seed}/{index}?{config.spare_calls}'


@functools.lru_cache(maxsize=4096)
def make(spec: str) -> RepairTask:
  """The task of a spec. Raises ValueError if it is not one of `spec`."""
  try:
    name, _, spare = spec.partition('?')
    kind, split, family, _, _ = name.split('/')
    steps, spare_calls = int(family.removeprefix('steps_')), int(spare)
  except ValueError as error:
    raise ValueError(
      f'{spec!r} is no repair task: expected repair/SPLIT/steps_N/SEED/INDEX?SPARE'
    ) from error
  rng = random.Random(name)
  calls = [(rng.choice(_VALUES), rng.choice(_VALUES)) for _ in range(_DRAWN)]
  program, bug = programs.draw(rng, split, steps, calls)
  broken = programs.apply(program, bug)
  shown = next(call for call in calls if program(*call) != broken(*call))
  return RepairTask(
    spec=spec,
    family=family,
    split=split,
    program=program,
    bug=bug,
    shown=(shown, calls[0]),
    hidden=_HIDDEN,
    max_tool_calls=3 + spare_calls,
  )
