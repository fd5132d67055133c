"""The run doctor: deterministic detectors over the records of a run.

`examine` reads metrics.jsonl, the logs, the data pool and config.json of a workdir,
also while its job writes them, and returns findings with their evidence and likely
causes; `rules.propose` turns them into one change of the configuration. Thresholds are
relative to the run itself and are constants with their reason beside each detector.

  history, logs, pool, settings, tokenizers   read a run
  training, policy, flow                      detectors: pure functions of the records
  robust                                      comparisons of a series with its past
  causes, rules                               tables: kinds and causes, proposed changes
  live                                        examines a job while it runs
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from m2jax.evolve.doctor import (
  causes,
  finding,
  flow,
  history,
  logs,
  policy,
  pool,
  settings,
  tokenizers,
  training,
)
from m2jax.evolve.doctor.finding import Finding
from m2jax.evolve.doctor.history import History
from m2jax.observe import printable
from m2jax.pool import database
from m2jax.train.workdir import in_use

_POOL, _WRITTEN_LAST = 'pool.db', 'report.html'

__all__ = ['Finding', 'examine', 'of_history']


def examine(
  workdir: pathlib.Path,
  *,
  pool_url: str = '',
  log_files: Iterable[pathlib.Path] = (),
  now_s: float | None = None,
  cheap: bool = False,
) -> list[Finding]:
  """The findings of a run: effects of others last, errors first, in order of windows.

  Args:
    workdir: the run's directory.
    pool_url: its pool; '' is WORKDIR/pool.db, if there is one.
    log_files: logs besides WORKDIR/*.log.
    now_s: the present time; None is the clock's.
    cheap: only the newest `history.CHEAP_BYTES` of the records, and the logs; neither
      pool nor tokenizers.

  Raises:
    OSError: the records or one of `log_files` cannot be read.
    ValueError: the pool of `pool_url` cannot be opened.
  """
  config = settings.read(workdir)
  records = history.read(workdir, history.CHEAP_BYTES if cheap else None)
  log = logs.read(workdir, log_files)
  of_pool, newest_s = ([], 0.0) if cheap else _pool(workdir, pool_url)
  signs = flow.Signs(
    time.time() if now_s is None else now_s,
    in_use(workdir),
    (workdir / _WRITTEN_LAST).exists(),
    max(newest_s, log.newest_s),
  )
  found = [
    *of_history(records, config, signs),
    *of_pool,
    *(() if cheap else tokenizers.examine(workdir, config)),
    *logs.errors(log),
  ]
  explained = (causes.explained(x, config) for x in _merged(found))
  return sorted(
    (logs.with_lines(x, log) for x in explained),
    key=lambda x: (*causes.order(x), x.first_s or 0.0),
  )


def of_history(
  records: History, config: Mapping[str, Any], signs: flow.Signs
) -> Iterator[Finding]:
  """The findings of the records alone, without severity and causes."""
  if records.damaged:
    yield Finding(
      'damaged_metrics',
      f'{records.damaged:,} lines of metrics.jsonl are not records: '
      + printable.one_line('; '.join(records.damage), 600),
      evidence=(finding.evidence('damaged lines', [records.damaged], (), 0.0),),
    )
  for name, steps in records.repeated.items():
    yield Finding(
      'repeated_steps',
      f'step {steps[0]:,} and others are recorded again without a marker',
      name,
      min(steps),
      max(steps),
      evidence=(finding.evidence('repeated steps', steps, steps),),
    )
  yield from training.not_finite(records)
  for phase in records.phases.values():
    yield from training.loss(phase)
    yield from training.gradient(phase)
    yield from training.entropy(phase)
    yield from training.experts(phase)
    yield from training.router_bias(phase, config)
    yield from training.loss_mask(phase)
    yield from training.schedule(phase, config)
    yield from flow.saves(phase)
    yield from flow.throughput(phase)
  if (rl := records.phases.get('rl')) is not None:
    yield from policy.ratio(rl, config)
    yield from policy.mismatch(rl, config)
    yield from policy.advantages(rl)
    yield from policy.success(rl)
    yield from policy.length(rl)
    yield from policy.staleness(rl, config)
    yield from flow.infrastructure(rl)
    yield from flow.lost_work(rl)
    yield from flow.waiting(rl, config)
    yield from flow.forks(rl)
  yield from flow.silence(records, signs)
  yield from flow.pauses(records)
  yield from flow.storage(records)


def _pool(workdir: pathlib.Path, url: str) -> tuple[list[Finding], float]:
  """Findings of the pool, and when its newest completion ended."""
  if not url and not (workdir / _POOL).is_file():
    return [], 0.0
  try:
    opened = database.open_read_only(url or workdir / _POOL)
  except ValueError as error:
    if url:
      raise
    return [_unreadable(error)], 0.0
  try:
    found = list(pool.examine(opened, tokenizers.vocab_size(workdir)))
    return found, pool.newest_s(opened)
  except (sa.exc.SQLAlchemyError, ValueError) as error:
    return [_unreadable(error)], 0.0
  finally:
    opened.close()


def _unreadable(error: Exception) -> Finding:
  shown = finding.evidence('pools that cannot be read', [1], (), 0.0)
  return Finding('damaged_pool', printable.one_line(error, 400), evidence=(shown,))


def _merged(found: Iterable[Finding]) -> list[Finding]:
  """One finding of a kind and phase: of several the first, with the others' evidence.

  The window is that of the first which has one, up to the end of the last.
  """
  out: dict[tuple[str, str], Finding] = {}
  for x in found:
    key = x.kind, x.phase
    if (first := out.get(key)) is None:
      out[key] = x
      continue
    if first.first_step is None:
      window = x.first_step, x.last_step, x.first_s, x.last_s
    else:
      window = (
        min(t for t in (first.first_step, x.first_step) if t is not None),
        max(t for t in (first.last_step, x.last_step) if t is not None),
        min(t for t in (first.first_s, x.first_s) if t is not None),
        max(t for t in (first.last_s, x.last_s) if t is not None),
      )
    first_step, last_step, first_s, last_s = window
    more = '' if x.summary in first.summary else f'; {x.summary}'
    evidence = (*first.evidence, *x.evidence)[:8]
    out[key] = dataclasses.replace(
      first,
      summary=(first.summary + more)[:800],
      first_step=first_step,
      last_step=last_step,
      first_s=first_s,
      last_s=last_s,
      evidence=evidence,
    )
  return list(out.values())
