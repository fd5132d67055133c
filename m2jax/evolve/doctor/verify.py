"""Verification: the faulty span again, with the change: is the evidence gone?

`prepare` makes a new workdir, WORKDIR/verify-N, from which the job's own command
resumes at the last checkpoint before the finding's window, or starts; `until` runs it
to the end of the window and the records that a detector needs behind it; `judge`
examines what it recorded. One rerun is one sample: that the evidence is gone is no
proof of the cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import shutil
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from m2jax.evolve import doctor
from m2jax.evolve.doctor import causes, history, until
from m2jax.evolve.doctor.finding import Finding
from m2jax.evolve.doctor.history import History, Phase
from m2jax.observe import metrics, printable

GONE, STILL_THERE, UNDECIDED = 'gone', 'still there', 'undecided'
NEEDED_RECORDS = 8  # behind a window: what `training.RECENT` and others compare
JOB, LOG, POOL = '.job', 'job.log', 'pool.db'
# What later phases read of earlier ones, beside their checkpoints.
_FILES = 'tokenizer.json', 'demonstrations.jsonl', 'survey.npz'
# Phases that start from SFT's weights; parts of a config that SFT leaves alone.
_AFTER_SFT = 'rl', 'more_sft'
_NOT_OF_SFT = {'rl', 'more_sft', 'engine', 'scheduler', 'gateway', 'episodes', 'roles'}
_BY_STOPPING = {'ended_early', 'stuck', 'pause'}  # a rerun is stopped, and may wait
_TAIL_LINES, _MAX_TAIL_BYTES = 3, 1 << 16
# Config files are Python; the values stay JSON, so that no text of a run is code.
_CONFIG = '''\
"""The config of a rerun: config.json, beside this file."""

import json
import pathlib

import ml_collections


def _tuples(value):
  if isinstance(value, dict):
    return {name: _tuples(part) for name, part in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def get_config():
  path = pathlib.Path(__file__).with_suffix('.json')
  return ml_collections.ConfigDict(_tuples(json.loads(path.read_text())))
'''


class NotVerifiable(ValueError):
  """A rerun could show nothing; says why."""


@dataclasses.dataclass(frozen=True)
class Plan:
  """A rerun that is prepared.

  Attributes:
    workdir: its workdir; the config is in `JOB` there.
    phase: phase of the records to reach.
    last_step: end of the finding's window.
    until_step: where the rerun ends.
    from_step: step of the checkpoint that it resumes from; −1: the phase's start.
    before: records in the window of the run.
  """

  workdir: pathlib.Path
  phase: str
  last_step: int
  until_step: int
  from_step: int
  before: int


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The outcome.

  Attributes:
    verdict: `GONE`, `STILL_THERE` or `UNDECIDED`.
    why: the reason, a sentence.
    new: kinds of errors that the run did not have.
  """

  verdict: str
  why: str
  new: tuple[str, ...] = ()


def prepare(
  run: pathlib.Path, found: Finding, config: Mapping[str, Any], changed: str = ''
) -> Plan:
  """Makes the rerun's workdir; of the run's own nothing is written.

  Args:
    run: the run's workdir.
    found: the finding that should go.
    config: the run's config with the change.
    changed: the field that changed; '' if it is code.

  Raises:
    NotVerifiable: the run has no records of the finding's phase, or a rerun cannot show
      the finding.
    OSError: something cannot be read or written.
  """
  if found.kind in _BY_STOPPING:
    raise NotVerifiable(f'a rerun is stopped at the end of the window: {found.kind}')
  records = history.read(run)
  phase = records.phases.get(found.phase) if found.phase else records.last
  if phase is None:
    raise NotVerifiable('the run has no records of the phase')
  first, last = found.first_step, found.last_step
  first = int(phase.step[0]) if first is None else first
  last = int(phase.step[-1]) if last is None else last
  stride = int(np.median(np.diff(phase.step))) if len(phase.step) > 1 else 1
  workdir = _new_directory(run)
  from_step = _copy(run, workdir, records, phase, first, changed)
  job = workdir / JOB
  job.mkdir()
  (job / 'config.py').write_text(_CONFIG)
  values = _own_ports(config)
  (job / 'config.json').write_text(json.dumps(values))
  if from_step is not None:  # else the job writes it
    (workdir / 'config.json').write_text(json.dumps(values, indent=2))
  return Plan(
    workdir,
    phase.name,
    last,
    last + NEEDED_RECORDS * stride,
    -1 if from_step is None else from_step,
    int(np.count_nonzero((phase.step >= first) & (phase.step <= last))),
  )


def command(
  plan: Plan,
  module: str,
  seconds: float,
  *,
  workdir: str = '',
  python: str = sys.executable,
  script: str = until.__file__,
) -> list[str]:
  """The rerun as a command: the job's own, ended at `plan.until_step`.

  Args:
    module: the job's, such as 'experiments.forge'.
    seconds: the limit.
    workdir: where the rerun's workdir is, if elsewhere (in a sandbox).
    python, script: interpreter, and the file of `until`, there.
  """
  place = workdir or str(plan.workdir.absolute())
  return [
    *(python, script, f'{place}/{metrics.FILE_NAME}', plan.phase),
    *(str(plan.until_step), f'{seconds:.0f}', '--', python, '-m', module),
    *(f'--config={place}/{JOB}/config.py', f'--workdir={place}', '--nodoctor'),
  ]


def judge(
  plan: Plan, found: Finding, before: Sequence[Finding], status: int
) -> Verdict:
  """What the rerun's records say.

  Args:
    before: all findings of the run.
    status: exit status of `command`.
  """
  now = doctor.examine(plan.workdir)
  records = history.read(plan.workdir)
  known = {x.kind for x in before} | _BY_STOPPING
  new = tuple(x.kind for x in now if x.severity == causes.ERROR and x.kind not in known)
  again = [
    x
    for x in now
    if (x.kind, x.phase) == (found.kind, found.phase)
    and (x.last_step is None or x.last_step > plan.from_step)
  ]
  if again:
    return Verdict(STILL_THERE, again[0].summary, new)
  why = _undecided(plan, found, records.phases.get(plan.phase), status)
  if why:
    return Verdict(UNDECIDED, why, new)
  reached = int(records.phases[plan.phase].step[-1])
  return Verdict(GONE, f'not found again up to step {reached:,}', new)


def _undecided(plan: Plan, found: Finding, phase: Phase | None, status: int) -> str:
  """Why the records show nothing; '' if they do."""
  reached = int(phase.step[-1]) if phase is not None else -1
  where = f'at step {max(reached, 0):,} of {plan.until_step:,}'
  if status == until.OVER:
    return f'the time is over {where}'
  if status:
    return f'the rerun ended with status {status} {where}: {_tail(plan.workdir / LOG)}'
  if reached < plan.last_step:
    return f'the rerun ended {where}'
  assert phase is not None
  first = plan.last_step if found.first_step is None else found.first_step
  inside = np.count_nonzero((phase.step >= first) & (phase.step <= plan.last_step))
  if found.first_step is not None and 2 * inside < plan.before:
    return f'the rerun has {inside} records of the window, the run {plan.before}'
  for evidence in found.evidence:
    of_series = evidence.steps and evidence.name in phase.series
    if of_series and not len(phase.finite(evidence.name)[0]):
      return f'the rerun has no {evidence.name}'
  return ''


def _tail(path: pathlib.Path) -> str:
  """The last lines of a log."""
  try:
    with open(path, 'rb') as file:
      file.seek(max(0, path.stat().st_size - _MAX_TAIL_BYTES))
      lines = file.read(_MAX_TAIL_BYTES).decode('utf-8', 'replace').split('\n')
  except OSError:
    return 'it has no log'
  return printable.one_line(' | '.join(list(filter(None, lines))[-_TAIL_LINES:]), 400)


def _new_directory(run: pathlib.Path) -> pathlib.Path:
  for n in itertools.count(1):
    with contextlib.suppress(FileExistsError):
      path = run / f'verify-{n}'
      path.mkdir()
      return path
  raise AssertionError('unreachable')


def _own_ports(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config with a free port for its gateway: the run may still have its own."""
  values = dict(config)
  if isinstance(gateway := values.get('gateway'), dict) and gateway.get('port'):
    values['gateway'] = gateway | {'port': 0}
  return values


def _copy(
  run: pathlib.Path,
  to: pathlib.Path,
  records: History,
  phase: Phase,
  first_step: int,
  changed: str,
) -> int | None:
  """Copies what the rerun resumes from; returns the step, or None: it starts anew."""
  own = [s for s in _steps(run / phase.name) if s < first_step]
  rl = phase.name == 'rl'
  if own and not (rl and not (run / POOL).is_file()):
    step = max(own)
    _copy_step(run / phase.name, to / phase.name, step)
    if rl:
      _copy_pool(run / POOL, to / POOL)
    before = phase.step <= step
    until_s = float(phase.time_s[before][-1]) if before.any() else 0.0
  elif (
    phase.name in _AFTER_SFT
    and (not changed or changed.partition('.')[0] in _NOT_OF_SFT)
    and _steps(run / 'sft')
  ):
    step, until_s = 0, float(phase.time_s[0]) - 1e-3
  else:
    return None
  if phase.name in _AFTER_SFT and (steps := _steps(run / 'sft')):
    _copy_step(run / 'sft', to / 'sft', max(steps))
  for name in _FILES:
    if (run / name).is_file() and not (run / name).is_symlink():
      shutil.copy(run / name, to / name)
  _copy_records(run / metrics.FILE_NAME, to / metrics.FILE_NAME, until_s)
  return step


def _steps(directory: pathlib.Path) -> list[int]:
  """Steps of the checkpoints in a directory; an incomplete one has another name."""
  if not directory.is_dir():
    return []
  return [int(p.name) for p in directory.iterdir() if p.name.isdecimal()]


def _copy_step(source: pathlib.Path, target: pathlib.Path, step: int) -> None:
  shutil.copytree(source / str(step), target / str(step), symlinks=True)


def _copy_pool(source: pathlib.Path, target: pathlib.Path) -> None:
  """A consistent copy, also while a job writes it."""
  with (
    contextlib.closing(
      sqlite3.connect(f'{source.absolute().as_uri()}?mode=ro', uri=True)
    ) as old,
    contextlib.closing(sqlite3.connect(target)) as new,
  ):
    old.backup(new)


def _copy_records(source: pathlib.Path, target: pathlib.Path, until_s: float) -> None:
  """The records and markers that were written up to a time."""
  with open(source, 'rb') as old, open(target, 'wb') as new:
    while line := old.readline(history.MAX_LINE_BYTES):
      try:
        record = json.loads(line)
        if line.endswith(b'\n') and record['time_s'] <= until_s:
          new.write(line)
      except (ValueError, KeyError, TypeError, RecursionError):
        continue
