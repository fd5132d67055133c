r"""How often the run doctor is right: real small runs with faults, and without.

  python -m benchmarks.doctor --workdir=DIR [--list first second third healthy] \
    [--seeds 0 1 2] [--jobs 2] [--json]

Each fault of `benchmarks.doctor_faults.first` (and `second` and `third`, by authors who
had not read the detectors) runs once for each seed; each of the healthy configurations
runs once. A run is a job of the project in a process of its own (`doctor_faults.jobs`),
and is then examined as `experiments.doctor` does.

  detected   a finding that does not end before the fault begins
  diagnosed  the doctor's first such finding names the fault's category (`CATEGORY`)
  named      one of them does
  updates    from the first faulty update to the first record by which a finding of the
             fault's category, or else any that counts, is there: records are cut after
             each update, and examined again. Only findings of the records count
  verified   the run is repeated with the doctor's one proposed change, if it has one
             ('none' if not: then the cause is no setting), and the finding that it
             answers is gone
  early      findings that end before the fault begins; in healthy runs all are alarms

Runs of one workdir are made once; one that was interrupted is made anew. Compiled
programs are shared. Numbers of CPU seconds include the start of each process.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import doctor_worker, harness
from benchmarks.doctor_faults import Fault, jobs
from experiments import common
from experiments.pretrain import Config as PretrainConfig
from m2jax.evolve import doctor
from m2jax.evolve.doctor import flow, history, rules, settings
from m2jax.forge.config import ForgeConfig

LISTS = 'first', 'second', 'third', 'healthy'
_LIMIT_S = 600.0  # a run that takes longer is killed, and examined as it is

# The category of each kind of finding. Fixed before the blind lists were written.
CATEGORY: Mapping[str, str] = {
  **dict.fromkeys(('not_finite', 'loss_spike', 'loss_divergence'), 'optimizer'),
  **dict.fromkeys(('gradient_jump', 'ratio_drift'), 'optimizer'),
  **dict.fromkeys(('entropy_collapse', 'entropy_explosion'), 'optimizer'),
  **dict.fromkeys(('expert_imbalance', 'router_bias_frozen'), 'router'),
  'router_bias_runs_away': 'router',
  'clipping': 'clipping',
  'mismatch': 'engine',
  'schedule_ended': 'optimizer',
  'loss_mask': 'loss mask',
  **dict.fromkeys(('reward_saturation', 'reward_absent', 'zero_advantage'), 'data'),
  **dict.fromkeys(('success_falls', 'reward_sign'), 'reward'),
  'length_growth': 'rollout',
  **dict.fromkeys(('weights_not_published', 'weights_differ'), 'weights'),
  **dict.fromkeys(('staleness', 'window_blocked'), 'queue'),
  **dict.fromkeys(('throughput_drop', 'stuck', 'pause', 'ended_early'), 'machine'),
  **dict.fromkeys(('infrastructure', 'failed_items', 'dead_worker'), 'worker'),
  'tool_failures': 'worker',
  **dict.fromkeys(('slow_storage', 'low_disk'), 'storage'),
  **dict.fromkeys(('forks', 'retokenised', 'prefix_changed'), 'retokenisation'),
  'held_out_in_training': 'data split',
  'tokenizer': 'tokenizer',
  **dict.fromkeys(('damaged_metrics', 'repeated_steps', 'damaged_pool'), 'records'),
  'logged_errors': '',  # lines of a log alone name no cause
}


def measure(task: doctor_worker.Task, args) -> dict[str, Any]:
  """Makes one run, and examines it; of a fault with a proposal also the run with it."""
  entry = doctor_worker.entries(task.list)[task.name]
  found = _run(task, args, entry)
  out = {'list': task.list, 'name': task.name, 'seed': task.seed, **found}
  if not isinstance(entry, Fault):
    return out
  length = jobs.LENGTH[entry.job]
  first = entry.first(task.seed, length)
  scored = score(entry, first, found['findings'])
  out |= {'first': first, **scored}
  out['updates'] = delay(pathlib.Path(task.workdir), entry, first)
  proposal = found['proposal']
  if scored['detected'] and proposal is not None:
    again = dataclasses.replace(
      task,
      workdir=f'{task.workdir}-fixed',
      changes={proposal['field']: proposal['new']},
    )
    fixed = _run(again, args, entry)
    kinds = {f['kind'] for f in fixed['findings']}
    out['verified'] = proposal['kind'] not in kinds
    out['cpu_s'] += fixed['cpu_s']
    out['fixed_findings'] = sorted(kinds)
  return out


def score(
  fault: Fault, first: int, findings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Whether findings, in the doctor's order, detect and name a fault.

  Args:
    first: the last healthy update; findings whose window ends there do not count.
  """
  late = [f for f in findings if f['last_step'] is None or f['last_step'] > first]
  named = [CATEGORY[f['kind']] == fault.category for f in late]
  return {
    'detected': bool(late),
    'diagnosed': bool(named) and named[0],
    'named': any(named),
    'early': len(findings) - len(late),
    'verified': None,
  }


def delay(workdir: pathlib.Path, fault: Fault, first: int) -> int | None:
  """Updates from the first faulty one until the records alone have a finding."""
  records, config = history.read(workdir), settings.read(workdir)
  phase = records.phases.get(fault.job)
  if phase is None:
    return None
  soonest: dict[bool, int] = {}
  for n in range(1, len(phase.step) + 1):
    if phase.step[n - 1] <= first:
      continue
    part = dataclasses.replace(
      phase,
      step=phase.step[:n],
      time_s=phase.time_s[:n],
      lineage=phase.lineage[:n],
      series={name: values[:n] for name, values in phase.series.items()},
    )
    cut = dataclasses.replace(records, phases={phase.name: part}, not_finite=())
    signs = flow.Signs(float(part.time_s[-1]) + 1, True)
    for x in doctor.of_history(cut, config, signs):
      if x.last_step is None or x.last_step > first:
        right = CATEGORY[x.kind] == fault.category
        soonest.setdefault(right, int(phase.step[n - 1]) - first)
    if True in soonest:
      break
  return soonest.get(True, soonest.get(False))


def _run(task: doctor_worker.Task, args, entry=None) -> dict[str, Any]:
  """One run and what the doctor says of it."""
  workdir = pathlib.Path(task.workdir)
  shutil.rmtree(workdir, ignore_errors=True)
  workdir.mkdir(parents=True)
  started_s = time.monotonic()
  with _load(getattr(entry, 'loaded', False)):
    cpu_s, code = 0.0, 0
    if getattr(entry, 'resumed', False):
      half = dataclasses.replace(task, stop_after=jobs.LENGTH[entry.job] // 2)
      cpu_s, code = _process(half, args)
    more_s, code = _process(task, args)
  print(
    f'{task.list} {task.name or "base"} {task.seed}: {cpu_s + more_s:.0f} s of CPU, '
    f'{time.monotonic() - started_s:.0f} s',
    file=sys.stderr,
  )
  out = {'cpu_s': cpu_s + more_s, 'exit': code}
  if not task.name:
    return out
  return out | examine(workdir)


def examine(workdir: pathlib.Path) -> dict[str, Any]:
  """Findings and proposal for a run, five seconds after its last record."""
  records = history.read(workdir)
  now_s = records.last.time_s[-1] + 5 if records.last else None
  found = doctor.examine(workdir, now_s=now_s)
  proposal = rules.propose(found, settings.read(workdir), build)
  findings = [
    {
      'kind': x.kind,
      'severity': x.severity,
      'summary': x.summary,
      'first_step': x.first_step,
      'last_step': x.last_step,
      'fields': [cause.field for cause in x.causes],
    }
    for x in found
  ]
  made = dataclasses.asdict(proposal) if proposal else None
  return {'findings': findings, 'proposal': made}


def build(values: Mapping[str, Any]) -> Any:
  """The job's config: here the kinds of tasks are this benchmark's own."""
  kind = PretrainConfig if 'pretrain' in values else ForgeConfig
  return common.build(kind, dict(values))


def _process(task: doctor_worker.Task, args) -> tuple[float, int]:
  """CPU seconds and exit code of a process that runs a task."""
  env = os.environ | {
    'JAX_COMPILATION_CACHE_DIR': str(args.workdir / 'jax'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
  }
  command = [sys.executable, '-m', 'benchmarks.doctor_worker']
  command.append(json.dumps(dataclasses.asdict(task)))
  with open(pathlib.Path(task.workdir) / 'run.log', 'ab') as log:
    process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    deadline_s = time.monotonic() + _LIMIT_S
    try:
      while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
          break
        if time.monotonic() > deadline_s:
          process.kill()
        time.sleep(0.2)
    except BaseException:
      process.kill()
      raise
  process.returncode = os.waitstatus_to_exitcode(status)
  return usage.ru_utime + usage.ru_stime, process.returncode


@contextlib.contextmanager
def _load(loaded: bool) -> Iterator[None]:
  """Another process that computes all the time."""
  if not loaded:
    yield
    return
  other = subprocess.Popen([sys.executable, '-c', 'while True: pass'])
  try:
    yield
  finally:
    other.kill()
    other.wait()


def table(runs: Sequence[Mapping[str, Any]]) -> str:
  """A table of the faults of each list, one of the healthy runs, and their sums."""
  parts = []
  for name in LISTS:
    found = [r for r in runs if r['list'] == name]
    if found:
      parts.append((_healthy if name == 'healthy' else _faults)(name, found))
  total = sum(r['cpu_s'] for r in runs)
  parts.append(f'{len(runs)} runs, {total:,.0f} s of CPU.')
  return '\n\n'.join(parts)


def _faults(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
  known = doctor_worker.entries(name)
  by_name = collections.defaultdict(list)
  for r in runs:
    by_name[r['name']].append(r)
  head = ['fault', 'category', 'detected', 'diagnosed', 'named', 'updates', 'verified']
  rows = []
  for fault, of in by_name.items():
    rows.append([known[fault].what, known[fault].category, *_shares(of)])
  rows.append(['all', '', *_shares(runs)])
  early = sum(r['early'] for r in runs)
  return (
    f'List {name}:\n\n{harness.markdown([*head, "CPU s"], rows)}\n\n'
    f'{early} findings before the fault begins.'
  )


def _shares(runs: Sequence[Mapping[str, Any]]) -> list[str]:
  def share(of: Sequence[bool]) -> str:
    return f'{sum(of)} of {len(of)}' if of else 'none'

  delays = [r['updates'] for r in runs if r['updates'] is not None]
  return [
    *(share([r[key] for r in runs]) for key in ('detected', 'diagnosed', 'named')),
    harness.spread(delays, 0) if delays else 'pool',
    share([r['verified'] for r in runs if r['verified'] is not None]),
    harness.spread([r['cpu_s'] for r in runs], 0),
  ]


def _healthy(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
  rows = []
  for r in runs:
    kinds = ', '.join(f['kind'] for f in r['findings']) or 'none'
    rows.append([r['name'], r['seed'], kinds, f'{r["cpu_s"]:.0f}'])
  alarmed = sum(bool(r['findings']) for r in runs)
  return (
    f'Healthy runs:\n\n{harness.markdown(["run", "seed", "findings", "CPU s"], rows)}'
    f'\n\n{alarmed} of {len(runs)} have a finding.'
  )


def tasks(args) -> list[doctor_worker.Task]:
  """What to run: each fault with each seed, each healthy run with one of them."""
  out = []
  for name in args.list:
    found = doctor_worker.entries(name)
    for number, entry in enumerate(found):
      seeds = args.seeds
      if name == 'healthy':
        seeds = [args.seeds[number % len(args.seeds)]]
      for seed in seeds:
        if not args.only or entry in args.only:
          place = args.workdir / name / f'{entry}-{seed}'
          base = args.workdir / f'base-{seed}'
          out.append(doctor_worker.Task(name, entry, seed, str(place), str(base)))
  return out


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--list', nargs='+', choices=LISTS, default=['first', 'healthy'])
  parser.add_argument('--only', nargs='+', default=[], help='names of faults or runs')
  parser.add_argument('--jobs', type=int, default=1, help='runs at the same time')
  args = parser.parse_args()
  args.workdir = args.workdir.absolute()
  args.workdir.mkdir(parents=True, exist_ok=True)
  common.quiet()
  kept, todo = harness.Results(args.workdir / 'results.jsonl'), tasks(args)

  def once(task: doctor_worker.Task) -> dict[str, Any]:
    key = [task.list, task.name, task.seed]
    return kept.once(key, lambda: measure(task, args))

  with common.interruptible():
    of_rl = [t for t in todo if doctor_worker.entries(t.list)[t.name].job == 'rl']
    for seed, base in sorted({(t.seed, t.base) for t in of_rl}):
      task = doctor_worker.Task('', '', seed, base, base)
      kept.once(['', '', seed], lambda task=task: _run(task, args))
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
      runs = list(pool.map(once, todo))
  harness.show(args, runs, table)


if __name__ == '__main__':
  main()
