r"""What is in a dataset of Harbor tasks, whether it works, and one task by hand.

  python -m experiments.tasks list DATASET
  python -m experiments.tasks check DATASET --workdir=workdir/check --parallel=2
  python -m experiments.tasks try DATASET --task=NAME

`list` reads every task.toml and runs nothing. `check` builds each task's image and runs
it twice: its solution must get the reward 1, and no work at all less than 1. It exits
with 1 unless that is so for all; the same command continues, and repeats nothing that
has passed with the same files and settings. `try` opens a task's container in a shell,
and judges what was done when the shell ends. docs/harbor.md.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rich.box
import rich.table
from absl import flags

from experiments import common
from m2jax import sandbox
from m2jax.observe import console
from m2jax.sandbox import containers
from m2jax.sandbox.containers import images
from m2jax.tasks import harbor
from m2jax.tasks.harbor import directory as directory_lib

with common.pipelines():
  from m2jax_pipelines import records

VERBS = ('list', 'check', 'try')
VERB = flags.DEFINE_enum('verb', None, VERBS, 'What to do; also the first argument.')
DATASET = flags.DEFINE_string('dataset', None, 'Directory; also the second argument.')
TASK = flags.DEFINE_list('task', None, 'Only these: names of their directories.')
SHOWN = flags.DEFINE_integer('shown', 100, 'Most tasks that `list` prints.', 1)
PARALLEL = flags.DEFINE_integer('parallel', 1, 'Tasks that `check` runs at a time.', 1)
_CONFIG = 'configs/tasks.py'
OK = 'ok'
_REASON_CHARS = 400


@dataclasses.dataclass(frozen=True)
class Found:
  """A task of a dataset; `reason` says why it cannot run here, and is '' if it can."""

  split: str
  path: Path
  directory: harbor.Directory | None
  reason: str = ''


def with_arguments(argv: list[str]) -> list[str]:
  """Makes flags of VERB and DATASET, and adds --config if it is not there."""
  words = []
  while len(argv) > 1 and len(words) < 2 and not argv[1].startswith('-'):
    words.append(argv[1])
    argv = [argv[0], *argv[2:]]
  given = zip(('verb', 'dataset'), words, strict=False)
  ours = [f'--{name}={word}' for name, word in given]
  if not any(a.startswith('--config=') for a in argv):
    ours.append(f'--config={_CONFIG}')
  return [argv[0], *ours, *argv[1:]]


def main():
  values = common.values()
  if not VERB.value or not DATASET.value:
    raise common.BadInput(f'give one of {", ".join(VERBS)}, and a directory of tasks')
  values['tasks']['dataset'] = DATASET.value
  config = common.build(harbor.Config, values['tasks'], 'config.tasks')
  limits = common.build(sandbox.Limits, values['limits'], 'config.limits')
  present = list(found(config))
  if not present:
    raise common.BadInput(
      f'{DATASET.value}: no task: a task is a folder with task.toml'
    )
  names = {task.path.name for task in present}
  if unknown := [name for name in TASK.value or () if name not in names]:
    raise common.BadInput(f'--task={unknown[0]}: not in {DATASET.value}')
  chosen = [t for t in present if t.path.name in (TASK.value or names)]
  if VERB.value == 'list':
    _list(chosen)
  elif VERB.value == 'check':
    path = common.workdir() / 'check.jsonl'
    if common.FRESH.value:
      path.unlink(missing_ok=True)
    causes = check(config, limits, chosen, path, PARALLEL.value)
    print(f'written to {path}')
    sys.exit(int(causes.total() != causes[OK]))
  else:
    if len(chosen) != 1:
      raise common.BadInput('--task: give the name of the one task to try')
    asyncio.run(_try(config, limits, chosen[0]))


def found(config: harbor.Config) -> Iterator[Found]:
  """Every task of the dataset, once."""
  seen = set()
  for split in harbor.SPLITS:
    for path in directory_lib.paths(Path(config.dataset), split, config.shares):
      if path not in seen:
        seen.add(path)
        try:
          yield Found(split, path, directory_lib.read(path, config.ceilings))
        except harbor.BadTask as error:
          yield Found(split, path, None, _short(error, path))


def _short(error: Any, path: Path) -> str:
  """An error without the path of its task."""
  text = ' '.join(str(error).replace(f'{path}/', '').replace(f'{path}: ', '').split())
  return text if len(text) <= _REASON_CHARS else f'… {text[-_REASON_CHARS:]}'


# list -------------------------------------------------------------------------------


def _list(found: list[Found]) -> None:
  table = _table(
    'task', 'split', 'family', 'agent', 'tests', 'resources', 'network', ''
  )
  for task in found[: SHOWN.value]:
    table.add_row(task.path.name, task.split, *_cells(task))
  screen = console.Console()
  screen.print(table)
  if len(found) > SHOWN.value:
    print(f'and {len(found) - SHOWN.value} more: --shown={len(found)} prints all')
  refused = sum(task.directory is None for task in found)
  print(f'{len(found)} tasks, of which {refused} cannot run here')


def _cells(task: Found) -> list[str]:
  """A task's family, times, resources, network and what it lacks."""
  if task.directory is None:
    return ['-'] * 5 + [f'refused: {task.reason}']
  found, settings = task.directory, task.directory.settings
  solution = (task.path / 'solution' / 'solve.sh').is_file()
  notes = [] if solution else ['no solution']
  family, tests = found.metadata.family, f'{found.verifier_s:g} s'
  if settings is None:
    return [family, '-', tests, '-', 'none', ', '.join(['of m2jax', *notes])]
  if settings.separate is not None:
    notes.append('separate verifier')
  machine = settings.machine
  sizes = {'memory': machine.memory_bytes, 'disk': machine.storage_bytes}
  resources = [f'{machine.cpus:g} CPUs'] if machine.cpus else []
  resources += [f'{size >> 20} MB {name}' for name, size in sizes.items() if size]
  agent = f'{settings.agent_s:g} s' if settings.agent_s else '-'
  network = settings.agent_network or machine.network
  return [family, agent, tests, ', '.join(resources) or '-', network, ', '.join(notes)]


def _table(*names: str) -> rich.table.Table:
  table = rich.table.Table(box=rich.box.SIMPLE)
  for name in names:
    table.add_column(name, overflow='fold')
  return table


# check ------------------------------------------------------------------------------


def check(
  config: harbor.Config,
  limits: sandbox.Limits,
  chosen: list[Found],
  path: Path,
  jobs: int,
) -> collections.Counter[str]:
  """Checks what has not passed yet, and prints it; returns the tasks of each cause.

  Args:
    config, limits: settings of the tasks and of their containers.
    chosen: the tasks.
    path: JSON lines of what was checked.
    jobs: tasks at a time.

  Raises:
    SandboxUnavailable: nothing can run here.
  """
  log = records.Records(path)
  passed = {row['key'] for row in log.rows if row['cause'] == OK}
  keys = {task.path: _key(config, limits, task) for task in chosen}
  left = collections.deque(t for t in chosen if keys[t.path] not in passed)
  for name, other in config.containers.replaced.items():
    print(f'{name} is replaced by {other}')
  if done := len(chosen) - len(left):
    print(f'{done} have passed before, with the same files and settings')
  causes: collections.Counter[str] = collections.Counter({OK: done} if done else {})
  with console.progress() as bar:
    line = bar.add_task('tasks', total=len(left))

    async def work() -> None:
      while left:
        task = left.popleft()
        row = await _checked(config, limits, task)
        log.append(key=keys[task.path], task=task.path.name, **row)
        causes[row['cause']] += 1
        bar.console.print(_line(task.path.name, row))
        bar.advance(line)

    async def run() -> None:
      try:
        async with asyncio.TaskGroup() as group:
          for _ in range(jobs):
            group.create_task(work())
      finally:
        await sandbox.shutdown()

    try:
      asyncio.run(run())
    except* sandbox.SandboxUnavailable as group:
      raise group.exceptions[0] from None
    finally:
      log.close()
  table = _table('cause', 'tasks')
  for cause, count in causes.most_common():
    table.add_row(cause, str(count))
  console.Console().print(table)
  return causes


def _line(name: str, row: Mapping[str, Any]) -> str:
  rewards = [
    f'{what} {"-" if (reward := row[what]) is None else f"{reward:g}"}'
    for what in ('solution', 'nothing')
  ]
  reason = f' ({row["reason"]})' if row['reason'] else ''
  return f'{name}: {", ".join(rewards)}: {row["cause"]}{reason}'


def _key(config: harbor.Config, limits: sandbox.Limits, task: Found) -> str:
  """A hash of the task's files and of the settings that a check depends on."""
  settings = config.changes(), json.dumps(dataclasses.asdict(limits))
  digest = hashlib.sha256(repr((task.path.name, task.reason, settings)).encode())
  if task.directory is not None:
    for name in ('task.toml', 'instruction.md'):
      digest.update((task.path / name).read_bytes())
    for folder in ('environment/', 'tests/', 'solution/'):
      for path, data in sorted(task.directory.files(folder).items()):
        digest.update(repr((folder, path, hashlib.sha256(data).hexdigest())).encode())
  return digest.hexdigest()


async def _checked(config, limits, task: Found) -> dict[str, Any]:
  """The rewards of solution and nothing (None: not judged), the cause and its reason.

  Raises:
    SandboxUnavailable: nothing can run here.
  """
  row = dict(solution=None, nothing=None, cause='refused', reason=task.reason)
  if task.directory is None:
    return row
  for what in ('solution', 'nothing'):
    try:
      row[what], reason = await attempt(config, limits, task, what == 'solution')
    except sandbox.SandboxUnavailable:
      raise
    except harbor.BadTask as error:
      cause = 'refused' if 'solution' not in str(error) else 'no solution'
      return {**row, 'cause': cause, 'reason': _short(error, task.path)}
    except (sandbox.SandboxError, OSError) as error:
      return {**row, 'cause': _cause(error), 'reason': _short(error, task.path)}
    if row[what] is None:
      return {**row, 'cause': 'verifier gives no reward', 'reason': reason}
    if (what == 'solution') != (row[what] == 1):
      cause = 'solution fails' if what == 'solution' else 'nothing passes'
      return {**row, 'cause': cause, 'reason': reason}
  return {**row, 'cause': OK}


def _cause(error: Exception) -> str:
  if isinstance(error, images.BuildFailed):
    return 'image is not built'
  return 'not set up' if isinstance(error, harbor.SetupFailed) else 'engine failed'


async def attempt(
  config: harbor.Config, limits: sandbox.Limits, task: Found, solve: bool
) -> tuple[float | None, str]:
  """A reward, None if it is not judged, and why it is not 1."""
  made = harbor.of_directory(
    task.directory, split=task.split, containers=config.containers
  )
  async with made.open(limits=limits) as environment:
    said = ''
    if solve:
      done = await made.solve(environment)
      if done.returncode or done.timed_out:
        end = 'in time' if done.timed_out else f'with {done.returncode}'
        said = f'solve.sh did not end {end}: {(done.stderr or done.stdout)[-200:]}; '
        said = said if done.timed_out else said.replace('did not end', 'ended')
    verdict = await made.judge(environment)
  shown = [verdict.details.get(name) for name in ('stdout', 'stderr')]
  reason = said + '; '.join(filter(None, [verdict.reason, *shown]))
  reward = None if verdict.outcome == harbor.INVALID else verdict.reward
  return reward, _short(reason, task.path)


# try --------------------------------------------------------------------------------


async def _try(config: harbor.Config, limits: sandbox.Limits, task: Found) -> None:
  """A shell in the task's container, and the verdict when it ends."""
  if task.directory is None:
    raise common.BadInput(f'{task.path}: {task.reason}')
  made = harbor.of_directory(
    task.directory, split=task.split, containers=config.containers
  )
  print(f'{made.instruction.strip()}\n')
  try:
    async with made.open(limits=limits) as environment:
      if isinstance(environment.box, containers.ContainerSandbox):
        print('The shell is in the container; its end is judged.', flush=True)
        command, env = environment.box.shell(sys.stdin.isatty())
        await asyncio.to_thread(subprocess.run, command, env=env)
      else:
        await _by_lines(environment)
      verdict = await made.judge(environment)
  finally:
    await sandbox.shutdown()
  print(f'\n{verdict.outcome}, reward {verdict.reward:g} {verdict.reason}'.rstrip())
  for text in map(verdict.details.get, ('stdout', 'stderr')):
    if text:
      print(text)


async def _by_lines(environment) -> None:
  """Runs each line of the input as a command, where no shell can be attached."""
  print('Each line is one command; the end of the input is judged.', flush=True)
  while line := await asyncio.to_thread(sys.stdin.readline):
    done = await environment.box.exec(line)
    print(f'{done.stdout}{done.stderr}', end='', flush=True)


if __name__ == '__main__':
  sys.argv = with_arguments(sys.argv)
  common.run(main, sandbox.SandboxUnavailable, sandbox.SandboxError)
