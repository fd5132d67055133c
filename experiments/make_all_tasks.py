r"""Makes a few tasks of every pipeline: `make forge-tasks`.

python -m experiments.make_all_tasks --workdir=workdir/tasks --count=5

Pipelines are found, not listed. Each runs as `experiments.make_tasks` in its own
subfolder of the workdir; one whose programs or packages are missing is skipped with the
reason, and one that fails does not stop the others. Ctrl-C stops at once; a second run
continues. A table at the end counts what is there. docs/pipelines.md.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys

import rich.box
import rich.table
from absl import flags

from experiments import common
from m2jax.observe import console

with common.pipelines():
  from m2jax_pipelines import discovery, records, report

COUNT = flags.DEFINE_integer('count', 5, 'Tasks of each pipeline.', lower_bound=1)
PIPELINES = flags.DEFINE_list(
  'pipelines',
  None,
  'Only these: names, or import paths. By default all that are found.',
)
BACKEND = flags.DEFINE_string('backend', 'namespaces', 'Of the sandboxes.')
_STOP_S = 30.0


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of the table.

  Attributes:
    pipeline: its name.
    tasks, rejected: candidates of all runs in the folder.
    seconds: time per task, as if candidates were tried one after the other; 0 for none.
    note: why it was skipped or failed.
  """

  pipeline: str
  tasks: int = 0
  rejected: int = 0
  seconds: float = 0.0
  note: str = ''


def made(name: str, workdir: pathlib.Path, note: str = '') -> Row:
  """What a pipeline's records say."""
  rows = records.read(workdir / 'records.jsonl')
  tasks = sum(row['outcome'] == records.ADMITTED for row in rows)
  rejected = sum(row['outcome'] == records.REJECTED for row in rows)
  seconds = report.seconds(rows) / tasks if tasks else 0.0
  return Row(name, tasks, rejected, seconds, note)


def run(name: str, workdir: pathlib.Path, count: int, backend: str) -> Row:
  """Makes a pipeline's tasks in a process of its own; raises KeyboardInterrupt."""
  try:
    missing = discovery.unavailable(name)
  except ValueError as error:
    return made(name, workdir, f'failed: {error}')
  if missing:
    return made(name, workdir, f'skipped: {missing}')
  command = [
    *(sys.executable, '-m', 'm2jax', 'make_tasks', f'--pipeline={name}'),
    *(f'--workdir={workdir}', f'--config.count={count}', f'--config.backend={backend}'),
  ]
  process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
  try:
    _, errors = process.communicate()
  except KeyboardInterrupt:
    # A terminal sends it to both; a signal to this process alone does not reach it.
    process.send_signal(signal.SIGINT)
    try:
      process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
    raise
  if process.returncode == common.INTERRUPTED:
    raise KeyboardInterrupt
  last = next((line for line in reversed(errors.splitlines()) if line.strip()), '')
  note = f'failed: {last.strip()[:120]}' if process.returncode else ''
  row = made(name, workdir, note)
  few = not note and row.tasks < count
  return dataclasses.replace(row, note='no candidates are left') if few else row


def table(rows: list[Row]) -> rich.table.Table:
  """The table at the end."""
  found = rich.table.Table(box=rich.box.SIMPLE)
  for name in ('pipeline', 'tasks', 'seconds a task', 'rejected', ''):
    found.add_column(name, justify='left' if name in ('pipeline', '') else 'right')
  for row in rows:
    seconds = f'{row.seconds:.1f}' if row.tasks else '-'
    found.add_row(row.pipeline, str(row.tasks), seconds, str(row.rejected), row.note)
  return found


def main():
  root, rows = common.workdir(), []
  for name in PIPELINES.value or discovery.names():
    workdir = root / name.rpartition('.')[2]
    print(f'{name}: {workdir}', flush=True)
    rows.append(run(name, workdir, COUNT.value, BACKEND.value))
  (root / 'made.json').write_text(json.dumps([dataclasses.asdict(r) for r in rows]))
  console.Console().print(table(rows))
  failed = [row.pipeline for row in rows if row.note.startswith('failed')]
  if failed:
    raise common.BadInput(f'failed: {", ".join(failed)}')


if __name__ == '__main__':
  common.run(main)
