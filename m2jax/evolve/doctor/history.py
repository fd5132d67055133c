"""Reads a run's metrics.jsonl for the detectors: streamed, in bounded memory.

Unlike `observe.metrics.read`, which refuses a damaged file, this reads whatever can be
read and counts the rest: a file that another program damaged is a finding.

It reads the newest `MAX_BYTES`. Per phase it stores the series of `WANTED` as float32
columns, of at least the newest `KEEP_RECORDS` records. Markers void later steps as in
`observe.metrics`; a record whose step does not follow that of the previous one replaces
the records from that step on.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import json
import math
import os
import pathlib
import stat
from collections.abc import Mapping
from typing import Any

import numpy as np

from m2jax.observe import metrics, names, sample_names

KEEP_RECORDS = 1 << 19  # a run of days; 100 MB with all series
MAX_BYTES = 512 << 20  # of the end of the file, which is read in seconds
CHEAP_BYTES = 16 << 20  # of it that a job reads of itself: some thousands of records
MAX_LINE_BYTES = 1 << 20  # a record has a few kilobytes
MAX_NAMES = 64  # names with values that are not finite; bounds a hostile file
MAX_NOT_FINITE = 1 << 14  # records of each; the first ones are enough
MAX_DAMAGED = 8  # damaged lines that are quoted
_MAX_STEP = 2**53
_NESTED = frozenset((dict, list))
# Phases whose records are a series over steps. Others score a set of documents.
SERIES_PHASES = ('pretrain', 'frozen', 'sft', 'more_sft', 'rl')
# The series that detectors read, by their names in `observe.names`.
WANTED = tuple(
  map(
    names.checked,
    (
      *('loss', 'entropy', 'grad_norm', 'skipped', 'max_violation', 'tokens_per_s'),
      *('progress', 'success', 'reward', 'groups', 'groups_zero_advantage'),
      *('trajectories', 'trajectories_masked', 'ratio', 'clip_fraction'),
      *('approx_kl', 'abs_log_ratio', 'mismatch/mean', 'mismatch/max', 'old_logprob'),
      *('policy/lag_mean', 'input_tokens', 'replay/disagreement', 'rollouts_per_s'),
      *('wait_s', 'step_s', 'pool/pending', 'pool/completed', 'pool/taken'),
      *('pool/failed', 'pool/reissued', 'engine/tokens_per_s', 'gateway/forks'),
      *('trained/tool', 'trained/user', 'trained/system', 'trained/prompt'),
      'trained/ends',
      *('router_bias_rms', 'engine/version', 'checkpoint/save_s', 'disk/free_bytes'),
    ),
  )
)
# Derived from histograms: mean sampled tokens of the trajectories that ended.
LENGTH = 'mean of generated_length'
_BINS = {
  sample_names.name('generated', 'length', sample_names.label('length', edge)): middle
  for edge, middle in ((0.0, 0.0), *((2.0**i, 1.5 * 2**i) for i in range(40)))
}


@dataclasses.dataclass(frozen=True)
class Phase:
  """The surviving records of one phase, in order of steps.

  Attributes:
    name: the phase.
    step, time_s, lineage: those of each record, [n]: int64, float64, int64.
    series: name → [n] float32; NaN where a record does not have a finite value.
  """

  name: str
  step: np.ndarray
  time_s: np.ndarray
  lineage: np.ndarray
  series: Mapping[str, np.ndarray]

  def finite(self, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(indices of the records that have a finite value, these values as float64)."""
    values = self.series.get(name)
    if values is None:
      return np.zeros(0, np.int64), np.zeros(0)
    at = np.flatnonzero(np.isfinite(values))
    return at, values[at].astype(np.float64)

  def all_finite(self, *names: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """The same of several names: indices of the records that have all of them."""
    columns = [self.series[name] for name in names]
    at = np.flatnonzero(np.all(np.isfinite(columns), axis=0))
    return at, [column[at].astype(np.float64) for column in columns]


@dataclasses.dataclass(frozen=True)
class NotFinite:
  """Where values of one name were not finite, in surviving records.

  Attributes:
    phase, name: the phase of the records, and the key in them.
    count: number of records, at most `MAX_NOT_FINITE`.
    first_step, last_step, first_s, last_s: window.
  """

  phase: str
  name: str
  count: int
  first_step: int
  last_step: int
  first_s: float
  last_s: float


@dataclasses.dataclass(frozen=True)
class History:
  """What a metrics.jsonl contains.

  Attributes:
    phases: by name, those of `SERIES_PHASES` that have records.
    evaluated_s: times of the newest evaluation records.
    not_finite: by phase and name.
    records: number of records read.
    damaged: number of damaged lines.
    damage: where and what, of the first damaged lines.
    repeated: by phase, steps that came again without a marker.
  """

  phases: Mapping[str, Phase] = dataclasses.field(default_factory=dict)
  evaluated_s: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
  not_finite: tuple[NotFinite, ...] = ()
  records: int = 0
  damaged: int = 0
  damage: tuple[str, ...] = ()
  repeated: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

  @property
  def last(self) -> Phase | None:
    """The phase of the newest record."""
    return max(self.phases.values(), key=lambda p: p.time_s[-1], default=None)


def read(workdir: str | os.PathLike, max_bytes: int | None = None) -> History:
  """Reads WORKDIR/metrics.jsonl; without one the history is empty.

  Of a file above `max_bytes` (`MAX_BYTES`) it reads the end. An incomplete last line,
  as a live run or SIGKILL leaves it, is ignored.

  Raises:
    OSError: the file cannot be read.
  """
  path = pathlib.Path(workdir) / metrics.FILE_NAME
  found = _Builder()
  try:
    mode = path.stat().st_mode
  except FileNotFoundError:
    return found.history()
  if not stat.S_ISREG(mode):  # a pipe would block forever
    found.damage(0, 'not a regular file')
    return found.history()
  with open(path, 'rb') as file:
    number, most = 0, max_bytes or MAX_BYTES
    if (size := os.fstat(file.fileno()).st_size) > most:
      file.seek(size - most)
      while (line := file.readline(MAX_LINE_BYTES)) and not line.endswith(b'\n'):
        pass
    while line := file.readline(MAX_LINE_BYTES):
      number += 1
      if not line.endswith(b'\n'):
        if len(line) < MAX_LINE_BYTES:
          break  # the end of the file
        found.damage(number, f'more than {MAX_LINE_BYTES:,} bytes')
        while (line := file.readline(MAX_LINE_BYTES)) and not line.endswith(b'\n'):
          pass
        continue
      try:
        found.add(line)
      except (ValueError, RecursionError) as error:
        found.damage(number, str(error)[:120] or type(error).__name__)
  return found.history()


class _Columns:
  """The records of a phase while they are read."""

  def __init__(self):
    self.step, self.lineage = array.array('q'), array.array('q')
    self.time_s = array.array('d')
    self.series = {name: array.array('f') for name in (*WANTED, LENGTH)}
    self.appends = [(name, self.series[name].append) for name in WANTED]

  def columns(self) -> list[array.array]:
    return [self.step, self.lineage, self.time_s, *self.series.values()]

  def drop(self, part: slice) -> None:
    for column in self.columns():
      del column[part]


class _Builder:
  """Builds a `History` line by line."""

  def __init__(self):
    self._phases: dict[str, _Columns] = {}
    self._evaluated_s = array.array('d')
    self._not_finite: dict[tuple[str, str], tuple[array.array, array.array]] = {}
    self._repeated: dict[str, list[int]] = {}
    self._records = self._damaged = 0
    self._damage: list[str] = []
    self._decoder = json.JSONDecoder(parse_constant=lambda name: None)

  def damage(self, number: int, what: str) -> None:
    self._damaged += 1
    if len(self._damage) < MAX_DAMAGED:
      self._damage.append(f'line {number}: {what}')

  def add(self, line: bytes) -> None:
    """Adds a record or marker. Raises ValueError or RecursionError for others."""
    record = self._decoder.decode(line.decode())
    if not isinstance(record, dict):
      raise ValueError('not an object')
    if _whole(record, 'schema') > metrics.SCHEMA:
      raise ValueError(f'schema {record["schema"]}, from a newer version')
    if 'supersedes' in record:
      marker = record['supersedes']
      if not isinstance(marker, dict) or not isinstance(marker.get('phase'), str):
        raise ValueError('supersedes: not a marker')
      self._void(marker['phase'], _whole(marker, 'after_step', -1))
      return
    phase, step = record.get('phase'), _whole(record, 'step')
    if not isinstance(phase, str) or phase not in names.PHASES:
      raise ValueError('phase: not one of a run')
    lineage, time_s = _whole(record, 'lineage'), record.get('time_s', -1)
    if type(time_s) not in (int, float) or not 0 <= time_s < 1e12:
      raise ValueError('time_s: not a time')
    if not _NESTED.isdisjoint(map(type, record.values())):
      raise ValueError('a value is an object or a list')
    self._records += 1
    if phase == 'eval':
      self._evaluated_s.append(time_s)
      if len(self._evaluated_s) >= 2 * KEEP_RECORDS:
        del self._evaluated_s[:KEEP_RECORDS]
    if phase in SERIES_PHASES:
      self._add_row(phase, step, time_s, lineage, record)
    if None in record.values():
      for name, value in record.items():
        if value is None:
          self._add_not_finite(phase, name, step, time_s)

  def _add_row(self, phase, step, time_s, lineage, record: dict[str, Any]) -> None:
    columns = self._phases.setdefault(phase, _Columns())
    if columns.step and step <= columns.step[-1]:
      repeated = self._repeated.setdefault(phase, [])
      if len(repeated) < MAX_NAMES:
        repeated.append(step)
      self._void(phase, step - 1)
    columns.step.append(step)
    columns.lineage.append(lineage)
    columns.time_s.append(time_s)
    get, nan = record.get, math.nan
    try:
      for name, append in columns.appends:
        append(get(name, nan))
    except (TypeError, OverflowError):  # a null, a text, or an integer of 400 digits
      for column in columns.series.values():
        del column[len(columns.step) - 1 :]
      for name, append in columns.appends:
        value = get(name)
        known = type(value) is float or type(value) is int and abs(value) < _MAX_STEP
        append(value if known else nan)
    columns.series[LENGTH].append(_mean_length(record))
    if len(columns.step) >= 2 * KEEP_RECORDS:
      columns.drop(slice(0, KEEP_RECORDS))

  def _add_not_finite(self, phase: str, name: str, step: int, time_s: float) -> None:
    key = phase, name[:80]
    if key not in self._not_finite and len(self._not_finite) == MAX_NAMES:
      return
    steps, times_s = self._not_finite.setdefault(
      key, (array.array('q'), array.array('d'))
    )
    if len(steps) < MAX_NOT_FINITE:  # steps of a phase increase, or void later ones
      steps.append(step)
      times_s.append(time_s)

  def _void(self, phase: str, after_step: int) -> None:
    if (columns := self._phases.get(phase)) is not None:
      first = bisect.bisect_right(columns.step, after_step)
      columns.drop(slice(first, None))
      for (of, _), (steps, times_s) in self._not_finite.items():
        if of == phase:
          first = bisect.bisect_right(steps, after_step)
          del steps[first:], times_s[first:]

  def history(self) -> History:
    phases = {}
    for name, columns in self._phases.items():
      if columns.step:
        step, lineage, time_s, *series = map(np.array, columns.columns())
        found = dict(zip(columns.series, series, strict=True))
        for key, values in found.items():  # such as 1e999
          for i in np.flatnonzero(np.isinf(values))[:MAX_NOT_FINITE]:
            self._add_not_finite(name, key, int(step[i]), float(time_s[i]))
        phases[name] = Phase(name, step, time_s, lineage, found)
    return History(
      phases=phases,
      evaluated_s=np.array(self._evaluated_s),
      not_finite=tuple(
        NotFinite(*key, len(steps), min(steps), max(steps), min(times_s), max(times_s))
        for key, (steps, times_s) in self._not_finite.items()
        if steps
      ),
      records=self._records,
      damaged=self._damaged,
      damage=tuple(self._damage),
      repeated={phase: tuple(steps) for phase, steps in self._repeated.items()},
    )


def _whole(values: dict[str, Any], name: str, least: int = 0) -> int:
  value = values.get(name)
  if type(value) is not int or not least <= value <= _MAX_STEP:
    raise ValueError(f'{name}: not a whole number')
  return value


def _mean_length(record: dict[str, Any]) -> float:
  """Mean tokens of the trajectories that ended, from the middles of their bins."""
  total = tokens = 0.0
  for name in record.keys() & _BINS.keys():
    count = record[name]
    if type(count) in (int, float) and 0 < count < _MAX_STEP:
      total += count
      tokens += count * _BINS[name]
  return tokens / total if total else math.nan
