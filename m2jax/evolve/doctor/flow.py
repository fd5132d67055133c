"""Detectors of the run's flow: throughput, silence, lost work, storage.

Pure functions of the records and of the time; thresholds are relative to the run's own
cadence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from m2jax.evolve.doctor import finding, robust, settings, windows
from m2jax.evolve.doctor.finding import Finding
from m2jax.evolve.doctor.history import History, Phase
from m2jax.evolve.doctor.training import AFTER, BEFORE, RECENT

SLOWER = 3.0  # below the baseline's 0.1 quantile: other work halves a throughput
SILENT_MEDIANS = 20.0  # × the median time between records
SILENT_LONGEST = 3.0  # × the longest one so far: compiling and saving are in it
SILENT_S = 120.0  # at least: a program that compiles is silent for a minute
CADENCE = 12  # records from which a cadence is known
MASKED = 0.1  # share of trajectories: a sandbox fails in one of hundreds
MASKED_LEAST = 8  # trajectories
LOST = 0.25  # attempts lost per trajectory group taken, over `CADENCE` records
FAILED = 0.1  # share of items that fail
FAILED_LEAST = 8
WAITING = 0.8  # share of a step: the learner trains in the rest
BLOCKED = 0.6  # share of the queue that is completed and may not be taken
SAVING = 0.5  # share of the time between records that no step explains
SAVING_LEAST_S = 30.0
SAVES = 3  # whose share of the time is judged
SAVE_SHARE, SAVE_LEAST_S = 0.3, 5.0  # of the time between them
LOW_DISK_BYTES = 1 << 30  # a log, a database's journal and a checkpoint need room
FORKS_FACTOR, FORKS_LEAST = 3.0, 0.3  # × the baseline's 0.9 quantile, per trajectory
_RATES = ('tokens_per_s', 'rollouts_per_s', 'engine/tokens_per_s')


@dataclasses.dataclass(frozen=True)
class Signs:
  """Whether a run is alive.

  Attributes:
    now_s: the present time, seconds since the epoch.
    running: whether a process holds the workdir; None if that is unknown.
    finished: whether the job wrote what it writes last.
    newest_s: newest sign of life besides the records: the pool, a log; 0 if none.
  """

  now_s: float
  running: bool | None = None
  finished: bool = False
  newest_s: float = 0.0


def throughput(phase: Phase) -> Iterator[Finding]:
  """A rate that falls to another level."""
  for name in _RATES:
    at, x = phase.finite(name)
    if name == 'tokens_per_s':  # an update without advantage has no tokens to train
      at, x = at[x > 0], x[x > 0]
    parts = robust.shifts(x, before=BEFORE, after=RECENT, factor=SLOWER, down=True)
    for first, last, bound in parts[:1]:
      yield windows.of_series(
        'throughput_drop',
        f'{name} falls to {np.median(x[first : last + 1]):.3g}, below {bound:.3g}',
        phase,
        *(name, at, x, (first, last), bound),
        f'the 0.1 quantile of the {BEFORE} records before / {SLOWER:g}',
      )
      return  # the others fall with it


def silence(history: History, signs: Signs) -> Iterator[Finding]:
  """A run that gives no sign of life, or whose process ended before the run did."""
  phase = history.last
  if phase is None or signs.finished:
    return
  progress = phase.finite('progress')[1]
  if len(progress) and progress[-1] >= 1 - 1e-9:
    return  # what follows a phase has no records of steps
  rows = len(phase.step) - 1, len(phase.step) - 1
  if signs.running is False:
    done = f' after {progress[-1]:.0%} of its budget' if len(progress) else ''
    yield windows.in_window(
      'ended_early',
      f'the process ended at step {phase.step[-1]:,}{done}',
      phase,
      rows,
      (finding.evidence('progress', progress[-8:]),) if len(progress) else (),
    )
    return
  gaps = _gaps(phase)
  if len(gaps) < CADENCE:
    return
  bound = max(SILENT_MEDIANS * np.median(gaps), SILENT_LONGEST * gaps.max(), SILENT_S)
  ends = [phase.time_s[-1], signs.newest_s, *history.evaluated_s[-1:]]
  silent_s = signs.now_s - max(ends)
  if silent_s > bound:
    shown = finding.evidence(
      'seconds between records', [*gaps[-8:], silent_s], (), bound, _silent_words()
    )
    yield windows.in_window(
      'stuck',
      f'no sign of life for {silent_s:.0f} s; a record came every '
      f'{np.median(gaps):.3g} s',
      phase,
      rows,
      (shown,),
    )


def pauses(history: History) -> Iterator[Finding]:
  """Long gaps in the records that neither an evaluation nor a restart explains."""
  for phase in history.phases.values():
    gaps = np.diff(phase.time_s)
    if len(gaps) <= CADENCE:
      continue
    same = np.diff(phase.lineage) == 0
    longest = np.maximum.accumulate(np.where(same, gaps, 0))
    bound = np.full(len(gaps), np.inf)
    median = np.median(gaps)
    bound[CADENCE:] = np.maximum(
      np.maximum(SILENT_MEDIANS * median, SILENT_LONGEST * longest[CADENCE - 1 : -1]),
      SILENT_S,
    )
    for i in np.flatnonzero(same & (gaps > bound))[:1]:
      if _evaluated(history, phase.time_s[i], phase.time_s[i + 1]):
        continue
      shown = finding.evidence(
        'seconds between records',
        gaps[max(0, i - 8) : i + 1],
        phase.step[max(0, i - 8) + 1 : i + 2],
        bound[i],
        _silent_words(),
      )
      yield windows.in_window(
        'pause',
        f'{gaps[i]:.0f} s without a record; one came every {median:.3g} s',
        phase,
        (int(i), int(i) + 1),
        (shown,),
      )


def _silent_words() -> str:
  return (
    f'{SILENT_MEDIANS:g} × the median gap, {SILENT_LONGEST:g} × the longest, at least '
    f'{SILENT_S:g} s'
  )


def _gaps(phase: Phase) -> np.ndarray:
  """Seconds between records of the same process."""
  return np.diff(phase.time_s)[np.diff(phase.lineage) == 0]


def _evaluated(history: History, first_s: float, last_s: float) -> bool:
  times = history.evaluated_s
  return bool(np.any((times >= first_s) & (times <= last_s)))


def infrastructure(phase: Phase) -> Iterator[Finding]:
  """A share of trajectories that end as infrastructure failures."""
  at, (total, masked) = phase.all_finite('trajectories', 'trajectories_masked')
  share = masked / np.maximum(total, 1)
  for first, last in robust.sustained(share, AFTER, MASKED)[:1]:
    lost = masked[first : last + 1].sum()
    if lost >= MASKED_LEAST:
      yield windows.of_series(
        'infrastructure',
        f'{lost / total[first : last + 1].sum():.0%} of the trajectories are '
        'infrastructure failures',
        phase,
        *('trajectories_masked / trajectories', at, share, (first, last)),
        *(MASKED, f'the median of {AFTER} records'),
      )


def lost_work(phase: Phase) -> Iterator[Finding]:
  """Items that fail, and attempts that agents lose: dead workers."""
  for kind, name, words, bound in (
    ('failed_items', 'pool/failed', 'items fail', FAILED),
    ('dead_worker', 'pool/reissued', 'attempts are lost', LOST),
  ):
    at, (counter, taken) = phase.all_finite(name, 'pool/taken')
    if len(at) <= CADENCE:
      continue
    lost, taken = _increments(counter), _increments(taken)
    ones = np.ones(CADENCE)
    lost_in, taken_in = (np.convolve(y, ones, 'valid') for y in (lost, taken))
    share = lost_in / np.maximum(lost_in + taken_in, 1)
    over = np.flatnonzero((share > bound) & (lost_in >= FAILED_LEAST))
    if len(over):
      first, last = int(over[0]), int(over[-1]) + CADENCE - 1
      inside = first + np.flatnonzero(lost[first : last + 1] > 0)
      part = int(inside[0]) + 1, int(inside[-1]) + 1
      yield windows.of_series(
        kind,
        f'{lost[first : last + 1].sum():.0f} {words} while '
        f'{taken[first : last + 1].sum():.0f} items are taken',
        phase,
        *(name, at, counter, part, None),
        f'more than {bound:.0%} over {CADENCE} records',
      )


def _increments(counter: np.ndarray) -> np.ndarray:
  """What a counter gained from record to record; a restart sets it to 0."""
  return np.maximum(np.diff(counter), 0)


def waiting(phase: Phase, config: Mapping[str, Any]) -> Iterator[Finding]:
  """A learner that waits: for a window of stragglers, or after it did not before."""
  at, (wait, step, completed) = phase.all_finite('wait_s', 'step_s', 'pool/completed')
  share = wait / np.maximum(step, 1e-9)
  capacity = settings.number(config, 'rl.capacity')
  if not capacity or capacity < 4:
    return
  blocked = np.minimum(share / WAITING, completed / capacity / BLOCKED)
  for part in robust.sustained(blocked, RECENT, 1.0)[:1]:
    yield windows.of_series(
      'window_blocked',
      f'the learner waits {np.median(share[part[0] : part[1] + 1]):.0%} of a step '
      'while completed items are outside the window',
      phase,
      *('wait_s / step_s', at, share, part, WAITING),
      f'and {BLOCKED:.0%} of the capacity of {capacity:g} is completed',
    )


def storage(history: History) -> Iterator[Finding]:
  """Time between updates that neither the step nor an evaluation explains: saving."""
  phase = history.phases.get('rl')
  if phase is None:
    return
  at, x = phase.finite('step_s')
  if len(x) <= CADENCE:
    return
  elapsed, same = np.diff(phase.time_s[at]), np.diff(phase.lineage[at]) == 0
  adjacent = np.diff(phase.step[at]) == 1
  times = history.evaluated_s
  quiet = np.array(
    np.searchsorted(times, phase.time_s[at][1:], 'right')
    == np.searchsorted(times, phase.time_s[at][:-1], 'left')
  )
  keep = same & adjacent & quiet
  rest = np.where(keep, np.maximum(elapsed - x[1:], 0), 0)
  total = elapsed[keep].sum()
  if rest.sum() > max(SAVING * total, SAVING_LEAST_S):
    long = np.flatnonzero(rest > 0.1 * rest.max()) + 1
    shown = np.r_[0.0, rest]
    yield windows.of_series(
      'slow_storage',
      f'{rest.sum() / total:.0%} of the time is between updates, not in them',
      phase,
      *('seconds outside of steps', at, shown, (int(long[0]), int(long[-1]))),
      *(None, f'more than {SAVING:.0%} and {SAVING_LEAST_S:g} s, without evaluations'),
    )


def saves(phase: Phase) -> Iterator[Finding]:
  """Training that waits for its checkpoints; a disk that is nearly full."""
  at, x = phase.finite('checkpoint/save_s')
  times, slow = phase.time_s[at], []
  for i in range(SAVES, len(x)):
    took_s, elapsed_s = x[i - SAVES + 1 : i + 1].sum(), times[i] - times[i - SAVES]
    if took_s > max(SAVE_SHARE * elapsed_s, SAVE_LEAST_S):
      slow.append(i)
  if slow:
    first = slow[0] - SAVES + 1  # of these the first long one
    first += int(np.argmax(x[first : slow[0] + 1] > SAVE_LEAST_S / SAVES))
    part = first, slow[-1]
    yield windows.of_series(
      'slow_storage',
      f'a save takes {np.median(x[part[0] : part[1] + 1]):.3g} s of training',
      phase,
      *('checkpoint/save_s', at, x, part, SAVE_LEAST_S / SAVES),
      f'{SAVES} saves take more than {SAVE_SHARE:.0%} of the time between them',
    )
  at, x = phase.finite('disk/free_bytes')
  low = np.flatnonzero(x < LOW_DISK_BYTES)
  if len(low):
    yield windows.of_series(
      'low_disk',
      f'{x[low].min() / 2**20:,.0f} MiB are free where the run writes',
      phase,
      *('disk/free_bytes', at, x, (int(low[0]), int(low[-1])), LOW_DISK_BYTES),
      'checkpoints, journals and logs need room',
    )


def forks(phase: Phase) -> Iterator[Finding]:
  """Requests that stop extending what was recorded: more forks per trajectory."""
  at, (counted, trajectories) = phase.all_finite('gateway/forks', 'trajectories')
  if len(at) < 2:
    return
  rate = _increments(counted) / np.maximum(trajectories[1:], 1)
  for first, last, bound in robust.shifts(
    rate, before=BEFORE, after=AFTER, factor=FORKS_FACTOR, floor=FORKS_LEAST
  )[:1]:
    level = np.median(rate[first : last + 1])
    yield windows.of_series(
      'forks',
      f'{level:.2g} forks per trajectory, above {bound:.2g}',
      phase,
      *('gateway/forks per trajectory', at[1:], rate, (first, last), bound),
      f'{FORKS_FACTOR:g} × the 0.9 quantile of the {BEFORE} records before',
    )
