"""One run of `benchmarks.doctor`, in a process of its own; no command of a person.

Argument: JSON of a `Task`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import sys
from typing import Any

from absl import flags, logging

from benchmarks.doctor_faults import Fault, Healthy, Moment, jobs
from experiments import common, fields, pretrain
from m2jax.forge import run
from m2jax.forge.config import ForgeConfig
from m2jax.forge.roles import in_process
from m2jax.observe import metrics


@dataclasses.dataclass(frozen=True)
class Task:
  """What to run.

  Attributes:
    list, name: a fault or a healthy run; name '' is the job `base`.
    seed: the run's seed.
    workdir: directory of the run.
    base: that of the job `base` with this seed.
    changes: settings changed besides, as JSON values by dotted name.
    stop_after: end after this update, as by SIGTERM; 0: at the end.
  """

  list: str
  name: str
  seed: int
  workdir: str
  base: str
  changes: dict[str, Any] = dataclasses.field(default_factory=dict)
  stop_after: int = 0


def entries(of: str) -> dict[str, Fault | Healthy]:
  """The faults, or healthy runs, of a list."""
  found = importlib.import_module(f'benchmarks.doctor_faults.{of}').FAULTS
  named = {entry.name: entry for entry in found}
  if len(named) != len(found):
    raise ValueError(f'{of}: several faults have the same name')
  return named


def config(task: Task) -> tuple[str, Any]:
  """The job of a task, and its settings."""
  if not task.name:
    return 'base', jobs.config('base', task.seed)
  entry = entries(task.list)[task.name]
  c = jobs.config(entry.job, task.seed, pathlib.Path(task.base))
  return entry.job, jobs.changed(jobs.changed(c, entry.config), task.changes)


def main() -> None:
  task = Task(**json.loads(sys.argv[1]))
  flags.FLAGS(sys.argv[:1])
  logging.use_absl_handler()
  job, settings = config(task)
  workdir = pathlib.Path(task.workdir)
  entry = entries(task.list)[task.name] if task.name else None
  common.quiet()
  if isinstance(entry, Fault):
    first = entry.first(task.seed, jobs.LENGTH[entry.job])
    moment = Moment(first, workdir, task.seed)
    _follow(job, lambda step: setattr(moment, 'update', step))
    if entry.patch is not None:
      entry.patch(moment)
  if task.stop_after:
    from m2jax.train import stopping

    _follow(job, lambda step: step >= task.stop_after and stopping.request())
  with common.pipelines(), common.interruptible():
    if job == 'pretrain':
      flags.FLAGS.workdir = task.workdir
      pretrain.common.values = lambda: settings.to_dict()
      pretrain.main()
    else:
      built = common.build(ForgeConfig, fields.complete(settings, ForgeConfig))
      common.start(built.mesh)
      run.run(built, workdir, rollouts=in_process.rollouts_in(workdir))


def _follow(job: str, on_update) -> None:
  """Calls `on_update(step)` once the record of an update of the job is written."""
  phase = {'sft': 'sft', 'pretrain': 'pretrain'}.get(job, 'rl')
  write = metrics.MetricsWriter.write

  def writing(self, of, step, *scalars, **more):
    write(self, of, step, *scalars, **more)
    if of == phase:
      on_update(step)

  metrics.MetricsWriter.write = writing


if __name__ == '__main__':
  main()
