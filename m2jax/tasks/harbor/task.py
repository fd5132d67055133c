"""The kind `harbor`: tasks of a dataset of Harbor task directories.

    DATASET/tasks/{train,dev,held_out}/NAME/     task directories (`directory`)
    DATASET/sites/KEY/                           Python packages of environments

A spec is `harbor/SPLIT/NAME@DATASET`, or `harbor/SPLIT/NAME?CEILINGS@DATASET`, JSON of
the ceilings that differ from the default.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m2jax import sandbox
from m2jax.checks import require
from m2jax.tasks import task as task_lib
from m2jax.tasks.harbor import directory as directory_lib
from m2jax.tasks.harbor import schema, verifier
from m2jax.tasks.terminal import shell

SPLITS = ('train', 'dev', 'held_out')
SHOWN_CHARS = 4000  # of a command's output
_SOLUTION = '.solution'


class SetupFailed(sandbox.SandboxError):
  """A task's workspace cannot be set up."""


@dataclasses.dataclass(frozen=True)
class Config(task_lib.TasksConfig):
  """A dataset of task directories.

  Attributes:
    dataset: directory, as `experiments.make_tasks` writes it.
    ceilings: the most that its tasks may ask for.
  """

  kind: str = 'harbor'
  dataset: str = ''
  ceilings: schema.Ceilings = schema.CEILINGS

  def __post_init__(self):
    super().__post_init__()
    require(
      self, not self.partial_credit, 'partial_credit', '0: rewards are the task’s'
    )

  def changes(self) -> str:
    """The ceilings that differ from the default, as JSON; '' for none."""
    usual = dataclasses.asdict(schema.CEILINGS)
    ours = dataclasses.asdict(self.ceilings)
    changed = {name: value for name, value in ours.items() if value != usual[name]}
    return json.dumps(changed, separators=(',', ':')) if changed else ''


@dataclasses.dataclass(frozen=True)
class HarborTask:
  """A `tasks.Task` over a task directory, with the one tool `sh`."""

  spec: str
  family: str
  split: str
  instruction: str
  max_tool_calls: int
  baseline_calls: int
  directory: directory_lib.Directory
  tools: Sequence[Mapping[str, Any]] = (shell.TOOL,)

  @contextlib.asynccontextmanager
  async def open(
    self,
    *,
    backend: str = 'namespaces',
    limits: sandbox.Limits | None = None,
    host: sandbox.Host | None = None,
  ) -> AsyncIterator[task_lib.Environment]:
    """Opens a sandbox with the task's workspace; see `tasks.Task.open`.

    Raises:
      SetupFailed: setup.sh failed.
    """
    files = self.directory.workspace()
    site = verifier.site(self.directory, backend)
    env = {'PYTHONPATH': site} if site else {}
    hide = self.directory.metadata.hide
    if host:
      host = await asyncio.to_thread(verifier.without, host, hide)
    else:
      host = await asyncio.to_thread(verifier.host, self.directory.dataset, hide=hide)
    async with await sandbox.create(
      contents=files,
      backend=backend,
      limits=limits,
      env=env,
      host=host,
    ) as box:
      if script := self.directory.setup():
        done = await box.exec(script)
        if done.returncode:
          raise SetupFailed(f'setup.sh exited with {done.returncode}: {done.stderr}')
      yield task_lib.Environment(_executor(box), box.workspace, box)

  async def verify(self, environment: task_lib.Environment, answer: str) -> float:
    """The reward of the task's own verifier; see `tasks.Task.verify`.

    Raises:
      InvalidVerdict: the verifier could not decide.
    """
    verdict = await self.judge(environment, answer)
    if verdict.outcome == verifier.INVALID:
      raise verifier.InvalidVerdict(f'{self.spec}: {verdict.reason}')
    return verdict.reward

  async def judge(
    self, environment: task_lib.Environment, answer: str = ''
  ) -> verifier.Verdict:
    """The verdict with its reason."""
    box = environment.box
    return await verifier.verify(
      self.directory,
      environment.workspace,
      answer,
      backend=box.backend,
      limits=box.limits,
    )

  async def solve(self, environment: task_lib.Environment) -> sandbox.ExecResult:
    """Runs the task's own solution in an environment."""
    box = environment.box
    for path, data in self.directory.solution().items():
      await box.write(f'{_SOLUTION}/{path}', data)
    command = (
      f'export M2JAX_SOLUTION="$PWD/{_SOLUTION}" M2JAX_WORKSPACE="$PWD"\n'
      f'bash {_SOLUTION}/solve.sh; code=$?; rm -rf {_SOLUTION}; exit $code'
    )
    return await box.exec(command)


def families(config: Config) -> Mapping[str, float]:
  """Relative frequency of each family; those of the training split by default."""
  if config.weights:
    return dict(config.weights)
  counts: dict[str, float] = {}
  for _, family in _listing(config.dataset, 'train', config.ceilings):
    counts[family] = counts.get(family, 0.0) + 1.0
  return counts


def spec(
  split: str, index: int, seed: int, config: Config, family: str | None = None
) -> str:
  """The spec of the index-th task of a shuffled, repeated listing of the split.

  Raises:
    ValueError: an unknown split, a negative index, or no task of the family.
  """
  if split not in SPLITS:
    raise ValueError(f'unknown split {split!r}: expected one of {SPLITS}')
  if index < 0:
    raise ValueError(f'task index is {index}: expected 0 or more')
  listing = _listing(config.dataset, split, config.ceilings)
  if family is not None:
    listing = [item for item in listing if item[1] == family]
  elif config.weights:
    listing = [item for item in listing if config.weights.get(item[1], 0) > 0]
  if not listing:
    which = f' of family {family!r}' if family else ''
    raise ValueError(
      f'tasks.dataset={config.dataset!r} has no task{which} in tasks/{split}/; make '
      'some with experiments.make_tasks'
    )
  epoch, place = divmod(index, len(listing))
  order = list(range(len(listing)))
  random.Random(f'{seed}/{epoch}').shuffle(order)
  name, _ = listing[order[place]]
  changes = config.changes()
  name = f'{name}?{changes}' if changes else name
  return f'harbor/{split}/{name}@{Path(config.dataset).resolve()}'


@functools.lru_cache(maxsize=1024)
def make(spec: str) -> HarborTask:
  """Returns the task that a spec names.

  Raises:
    ValueError: there is no such task.
  """
  name, _, dataset = spec.partition('@')
  name, _, changes = name.partition('?')
  parts = name.split('/')
  if len(parts) != 3 or parts[1] not in SPLITS or not dataset:
    raise ValueError(f'{spec!r} is no Harbor task: expected harbor/SPLIT/NAME@DATASET')
  try:
    ceilings = schema.Ceilings(**json.loads(changes or '{}'))
  except (TypeError, ValueError) as error:
    raise ValueError(f'{spec!r} has no ceilings of Harbor tasks: {error}') from error
  path = Path(dataset) / 'tasks' / parts[1] / parts[2]
  found = directory_lib.read(path, ceilings)
  return of_directory(found, spec, parts[1])


def of_directory(
  found: directory_lib.Directory, spec: str = '', split: str = 'train'
) -> HarborTask:
  """The task of a directory that was read."""
  metadata = found.metadata
  return HarborTask(
    spec=spec or f'harbor/{split}/{found.path.name}@{found.dataset}',
    family=metadata.family,
    split=split,
    instruction=found.instruction,
    max_tool_calls=metadata.max_tool_calls,
    baseline_calls=metadata.baseline_calls,
    directory=found,
  )


@functools.lru_cache(maxsize=16)
def _listing(
  dataset: str, split: str, ceilings: schema.Ceilings
) -> tuple[tuple[str, str], ...]:
  """(name, family) of a split's tasks, sorted."""
  root = Path(dataset) / 'tasks' / split
  if not dataset or not root.is_dir():
    return ()
  names = sorted(p.name for p in root.iterdir() if not p.name.startswith('.'))
  found = [directory_lib.read(root / name, ceilings) for name in names]
  return tuple((task.path.name, task.metadata.family) for task in found)


def _executor(box: sandbox.Sandbox) -> task_lib.Execute:
  async def execute(name: str, arguments: Mapping[str, Any]) -> str:
    result = await box.exec(shell.command_of(name, arguments))
    return shell.observation(result, SHOWN_CHARS)

  return execute
