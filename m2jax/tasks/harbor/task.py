"""The kind `harbor`: tasks of a dataset of Harbor task directories.

    DATASET/tasks/{train,dev,held_out}/NAME/     task directories (`directory`, which
                                                 has further forms of a dataset)
    DATASET/sites/KEY/                           Python packages of environments

A spec is `harbor/SPLIT/NAME@DATASET`, or `harbor/SPLIT/NAME?SETTINGS@DATASET`, JSON of
the ceilings and of the settings of containers that differ from the default.

A task that a pipeline made runs in a sandbox, and a `verifier` judges its work in
another. One that another tool made runs in containers of its image (`container`), and
so does every task with the backend of a container engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import random
import reprlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from m2jax import sandbox
from m2jax.checks import require
from m2jax.tasks import task as task_lib
from m2jax.tasks.harbor import container, schema, standard, verifier
from m2jax.tasks.harbor import directory as directory_lib
from m2jax.tasks.harbor.container import SetupFailed
from m2jax.tasks.harbor.directory import SPLITS
from m2jax.tasks.terminal import shell

SHOWN_CHARS = 4000  # of a command's output
_SOLUTION = '.solution'


@dataclasses.dataclass(frozen=True)
class Config(task_lib.TasksConfig):
  """A dataset of task directories.

  Attributes:
    dataset: directory, as `experiments.make_tasks` writes it, or of any Harbor tasks.
    ceilings: the most that its tasks may ask for.
    containers: how tasks that other tools made run.
    shares: split -> relative share of the tasks of a dataset that has no splits.
    unsupported: 'fail' or 'skip' for tasks that cannot run here (`BadTask`).
  """

  kind: str = 'harbor'
  dataset: str = ''
  ceilings: schema.Ceilings = schema.CEILINGS
  containers: standard.Containers = standard.Containers()
  shares: Mapping[str, float] = dataclasses.field(
    default_factory=lambda: dict(directory_lib.SHARES)
  )
  unsupported: str = 'fail'

  def __post_init__(self):
    super().__post_init__()
    require(
      self, not self.partial_credit, 'partial_credit', '0: rewards are the task’s'
    )
    shares = self.shares.values()
    known = set(self.shares) <= set(SPLITS) and min(shares, default=-1) >= 0
    require(self, known and sum(shares) > 0, 'shares', f'positive, of {SPLITS}')
    require(self, self.unsupported in ('fail', 'skip'), 'unsupported', 'fail or skip')

  def changes(self) -> str:
    """The settings of a task that differ from the default, as JSON; '' for none."""
    changed = _changed(self.ceilings)
    if containers := _changed(self.containers):
      changed['containers'] = containers
    # A spec has '@' before the dataset.
    text = json.dumps(changed, separators=(',', ':')).replace('@', '\\u0040')
    return text if changed else ''


def _changed(config: Any) -> dict[str, Any]:
  usual, ours = (dataclasses.asdict(c) for c in (type(config)(), config))
  return {name: value for name, value in ours.items() if value != usual[name]}


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
  containers: standard.Containers = standard.Containers()
  tools: Sequence[Mapping[str, Any]] = (shell.TOOL,)

  @property
  def wall_s(self) -> float | None:
    """See `tasks.Task.wall_s`."""
    settings = self.directory.settings
    own = self.directory.metadata.wall_s or None
    return own if settings is None else settings.agent_s

  @contextlib.asynccontextmanager
  async def open(
    self,
    *,
    backend: str = 'namespaces',
    limits: sandbox.Limits | None = None,
    host: sandbox.Host | None = None,
  ) -> AsyncIterator[task_lib.Environment]:
    """Opens a sandbox with the task's workspace; see `tasks.Task.open`.

    Args:
      backend: for a container 'podman', 'docker' or 'harbor:NAME'; with any other, that
        of a task that another tool made is of `Containers.engine`.
      limits: settings of the sandbox; for a container, what task.toml does not declare,
        and the elapsed time of a command.

    Raises:
      SetupFailed: setup.sh failed, or the container does not become healthy.
      BadTask: it cannot run here.
    """
    if run := self._run(backend, limits):
      seen = host.read_only if host else ()
      async with container.opened(run, _executor, seen) as environment:
        yield environment
      return
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
      raise verifier.InvalidVerdict(f'{self.spec}: {_said(verdict)}')
    if verdict.outcome == verifier.FAILED:
      environment.notes.append(_said(verdict))
    return verdict.reward

  async def judge(
    self, environment: task_lib.Environment, answer: str = ''
  ) -> verifier.Verdict:
    """The verdict with its reason."""
    box = environment.box
    if run := self._run(box.backend, box.limits):
      return await container.judged(run, environment)
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
    if run := self._run(box.backend, box.limits):
      return await container.solved(run, box)
    for path, data in self.directory.solution().items():
      await box.write(f'{_SOLUTION}/{path}', data)
    command = (
      f'export M2JAX_SOLUTION="$PWD/{_SOLUTION}" M2JAX_WORKSPACE="$PWD"\n'
      f'bash {_SOLUTION}/solve.sh; code=$?; rm -rf {_SOLUTION}; exit $code'
    )
    return await box.exec(command)

  def _run(self, backend: str, limits: sandbox.Limits | None) -> container.Run | None:
    """How the task runs in containers; None: it runs in a sandbox."""
    found, engine = self.directory, backend
    if not (backend in standard.ENGINES or backend.startswith('harbor:')):
      if found.settings is None:
        return None
      engine = self.containers.engine
    if found.settings is None:
      found = found.as_standard()
    return container.Run(found, self.containers, engine, limits or sandbox.Limits())


def _said(verdict: verifier.Verdict) -> str:
  """A verdict's reason, and the end of what test.sh printed."""
  shown = [
    f'{name}: {verdict.details[name]}'
    for name in ('stdout', 'stderr')
    if verdict.details.get(name)
  ]
  return '\n'.join([verdict.reason, *shown])


def families(config: Config) -> Mapping[str, float]:
  """Relative frequency of each family; those of the training split by default."""
  if config.weights:
    return dict(config.weights)
  counts: dict[str, float] = {}
  for _, family in _listed(config, 'train'):
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
  listing = _listed(config, split)
  if family is not None:
    listing = [item for item in listing if item[1] == family]
  elif config.weights:
    listing = [item for item in listing if config.weights.get(item[1], 0) > 0]
  if not listing:
    which = f' of family {family!r}' if family else ''
    raise ValueError(
      f'tasks.dataset={config.dataset!r} has no task{which} in tasks/{split}/, and no '
      f'other whose split is {split} (tasks.shares); make some with '
      'experiments.make_tasks'
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
    given = json.loads(changes or '{}')
    containers = standard.Containers(**given.pop('containers', {}))
    ceilings = schema.Ceilings(**given)
  except (AttributeError, RecursionError, TypeError, ValueError) as error:
    raise ValueError(
      f'{reprlib.repr(spec)} has no ceilings of Harbor tasks: {error}'
    ) from error
  path = directory_lib.locate(Path(dataset), parts[1], parts[2])
  found = directory_lib.read(path, ceilings)
  return of_directory(found, spec, parts[1], containers)


def of_directory(
  found: directory_lib.Directory,
  spec: str = '',
  split: str = 'train',
  containers: standard.Containers = standard.DEFAULT,
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
    containers=containers,
  )


def _listed(config: Config, split: str) -> tuple[tuple[str, str], ...]:
  shares = tuple(sorted(config.shares.items()))
  skip = config.unsupported == 'skip'
  return _listing(config.dataset, split, config.ceilings, shares, skip)


@functools.lru_cache(maxsize=16)
def _listing(
  dataset: str,
  split: str,
  ceilings: schema.Ceilings,
  shares: tuple[tuple[str, float], ...],
  skip: bool,
) -> tuple[tuple[str, str], ...]:
  """(name, family) of a split's tasks, sorted."""
  found, bad = [], []
  paths = directory_lib.paths(Path(dataset), split, dict(shares)) if dataset else []
  for path in paths:
    try:
      found.append(directory_lib.read(path, ceilings))
    except schema.BadTask as error:
      bad.append(error)
  if bad and not skip:
    if len(bad) == 1:
      raise bad[0]
    raise schema.BadTask(
      f'{len(bad)} of {len(paths)} tasks cannot run here (tasks.unsupported=skip '
      f'leaves them out), the first: {bad[0]}'
    ) from bad[0]
  for error in bad:
    logging.warning('left out: %s', error)
  return tuple((task.path.name, task.metadata.family) for task in found)


def _executor(box: sandbox.Sandbox) -> task_lib.Execute:
  async def execute(name: str, arguments: Mapping[str, Any]) -> str:
    result = await box.exec(shell.command_of(name, arguments))
    return shell.observation(result, SHOWN_CHARS)

  return execute
