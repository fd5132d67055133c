"""The run's metrics: append-only `metrics.jsonl`, fanned out to TensorBoard and views.

DESIGN §6 (Observability) and law 5. One JSON object per line:

  {"schema": 1, "lineage": 0, "time_s": …, "phase": "rl", "step": 12, scalars…}
  {"schema": 1, "lineage": 1, "time_s": …,
   "supersedes": {"phase": "rl", "after_step": 10}}

`lineage` counts the processes that wrote the file: 0, then +1 for each reopening. The
second kind is a marker: every earlier record of that phase with a later step belongs to
weights that no longer exist. Nothing is rewritten; `read` omits the superseded records.
JSON has no NaN: a non-finite number is written as null and read back as NaN.

Each record is one `write(2)` by the caller, so a SIGKILL after `write` has returned
loses nothing, and one during it truncates at most the last line, which the next opening
removes. (A power loss may lose the last seconds: there is no fsync.) A separate thread
serves TensorBoard and the listeners, so that the caller does not wait for them.

`names.py` lists every name. A name that is missing there is still written, with one
warning: a run of hours does not fail over a name. The tests turn it into an error.
"""

from __future__ import annotations

import json
import math
import operator
import os
import pathlib
import queue
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from m2jax.observe import names, tensorboard

SCHEMA = 1
FILE_NAME = 'metrics.jsonl'
TENSORBOARD_DIR = 'tensorboard'
RESERVED = frozenset(('schema', 'lineage', 'phase', 'step', 'time_s', 'supersedes'))

# Created once: json.dumps with options creates an encoder on every call.
_ENCODER = json.JSONEncoder(separators=(',', ':'), allow_nan=False)

Record = dict[str, Any]
Listener = Callable[[Record], None]


class MetricsError(ValueError):
  """`metrics.jsonl` cannot be read; the message names the line and says what to do."""


class MetricsWriter:
  """Writes one workdir's metrics; every method may be called from any thread.

  Example:
    with MetricsWriter(workdir) as metrics:
      metrics.supersede('rl', after_step=10)       # after restoring step 10
      metrics.write('rl', 11, {'loss': 0.3, 'policy/lag_mean': 1.2})
  """

  def __init__(self, workdir: str | os.PathLike, *, use_tensorboard: bool = True):
    """Opens or creates the file; removes an incomplete last line and logs that.

    Args:
      workdir: directory of the run; created if missing.
      use_tensorboard: also write event files, one run per phase, in
        workdir/tensorboard/<phase>.

    Raises:
      MetricsError: the file is damaged before its last line, or was written by a newer
        version.
      OSError: the directory cannot be written.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self._path = workdir / FILE_NAME
    self.lineage = _repair(self._path) + 1
    self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    self._lock = threading.Lock()
    self._closed = False
    self._listeners: list[Listener] = []
    self._checked: set[tuple[str, str]] = set()  # (phase, name) seen before
    self._queue: queue.SimpleQueue = queue.SimpleQueue()
    self._events = (
      tensorboard.EventFiles(workdir / TENSORBOARD_DIR, suffix=f'.{self.lineage:04d}')
      if use_tensorboard
      else None
    )
    self._thread = threading.Thread(
      target=self._fan_out, name='metrics-fan-out', daemon=True
    )
    self._thread.start()

  def write(
    self, phase: str, step: int, scalars: Mapping[str, Any] | None = None, /, **more
  ) -> None:
    """Appends one record: one `write(2)`, after which a SIGKILL cannot lose it.

    Args:
      phase: one of `names.PHASES`; steps increase within a phase.
      step: the phase's step, >= 0.
      scalars, more: numbers (NumPy and JAX scalars too), booleans or short strings;
        None is omitted.

    Raises:
      TypeError: a value is not a scalar, or step is not an integer.
      UnlistedMetric: a warning, once per name that is not in `names.METRICS`.
      ValueError: a key is reserved, phase is empty, or step is negative.
      OSError: the disk is full or gone; the file is unchanged.
    """
    record = self._head()
    record['phase'], record['step'] = _phase_and_step(phase, step, lowest=0)
    for source in (scalars or {}), more:
      for key, value in source.items():
        if key in RESERVED:
          raise ValueError(f'metrics: scalar {key!r} has the name of a record field')
        if value is not None:
          record[key] = _scalar(key, value)
          if (phase, key) not in self._checked:
            self._check(phase, key)
    self._append(record)

  def free_bytes(self) -> int | None:
    """Free space of the workdir's file system; None where that is unknown."""
    try:
      return shutil.disk_usage(self._path.parent).free
    except OSError:
      return None

  def supersede(self, phase: str, after_step: int) -> None:
    """Voids the phase's records so far with step > after_step.

    Call it after restoring a checkpoint, for each phase that had advanced further;
    after_step = −1 voids the whole phase. TensorBoard drops the same steps.

    Raises:
      TypeError, ValueError, OSError: as `write`.
    """
    phase, after_step = _phase_and_step(phase, after_step, lowest=-1)
    marker = self._head()
    marker['supersedes'] = {'phase': phase, 'after_step': after_step}
    self._append(marker)

  def add_listener(self, listener: Listener) -> None:
    """Calls `listener(record)` for every later record, in file order, from one thread.

    A listener that raises is logged and removed: a view never stops a job.
    """
    with self._lock:
      self._listeners = [*self._listeners, listener]

  def flush(self) -> None:
    """Waits until listeners and event files have every record written so far."""
    done = threading.Event()
    with self._lock:
      if self._closed:
        return
      self._queue.put(done)
    done.wait()

  def close(self) -> None:
    """Flushes and closes; later writes raise ValueError. Closing twice is fine."""
    with self._lock:
      if self._closed:
        return
      self._closed = True
      os.close(self._fd)
      self._queue.put(None)
    self._thread.join()

  def __enter__(self) -> MetricsWriter:
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def _check(self, phase: str, name: str) -> None:
    self._checked.add((phase, name))
    for what in names.unlisted(phase, [name]):
      warnings.warn(
        f'metrics: {what} is not in m2jax/observe/names.py: add a line with its unit '
        'and meaning',
        names.UnlistedMetric,
        stacklevel=3,
      )

  def _head(self) -> Record:
    return {
      'schema': SCHEMA,
      'lineage': self.lineage,
      'time_s': round(time.time(), 3),
    }

  def _append(self, record: Record) -> None:
    try:
      line = _ENCODER.encode(record)
    except ValueError:  # a non-finite number, which is rare
      line = _ENCODER.encode({k: _strict(v) for k, v in record.items()})
    data = line.encode() + b'\n'
    with self._lock:
      if self._closed:
        raise ValueError(f'metrics: {self._path} is closed')
      write_all(self._fd, data)
      self._queue.put(record)

  def _fan_out(self) -> None:
    """Serves event files and listeners until close; flushes within a second."""
    flush_at_s = math.inf
    while True:
      wait_s = None if flush_at_s == math.inf else flush_at_s - time.monotonic()
      try:
        entry = self._queue.get(timeout=wait_s and max(0.0, wait_s))
      except queue.Empty:
        entry = threading.Event()  # nobody waits for it: time to flush
      if isinstance(entry, dict):
        self._serve(entry)
        flush_at_s = min(flush_at_s, time.monotonic() + 1)
        if time.monotonic() < flush_at_s:
          continue
      self._on_events('flush')
      flush_at_s = math.inf
      if isinstance(entry, threading.Event):
        entry.set()
      if entry is None:
        self._on_events('close')
        return

  def _serve(self, record: Record) -> None:
    if 'supersedes' in record:
      marker = record['supersedes']
      self._on_events('purge', marker['phase'], marker['after_step'] + 1)
      return
    scalars = {k: v for k, v in record.items() if k not in RESERVED}
    self._on_events('add', record['phase'], record['step'], record['time_s'], scalars)
    for listener in self._listeners:
      try:
        listener(record)
      except Exception:
        logging.exception('metrics: listener %r failed and is removed', listener)
        with self._lock:
          self._listeners = [x for x in self._listeners if x is not listener]

  def _on_events(self, method: str, *args) -> None:
    if self._events is None:
      return
    try:
      getattr(self._events, method)(*args)
    except Exception:  # JSONL is the source of truth: go on without event files
      logging.exception(
        'metrics: cannot write TensorBoard files; continuing without them'
      )
      self._events = None


def read(workdir: str | os.PathLike, phase: str | None = None) -> list[Record]:
  """Records of the surviving lineage, in file order.

  Args:
    workdir: the run's directory; if it has no such file, the result is empty.
    phase: return the records of this phase only.

  Returns:
    Records, without the markers and without the records that they void. An incomplete
    last line, as SIGKILL leaves it, is ignored.

  Raises:
    MetricsError: a line before the last is damaged, or from a newer schema.
  """
  records, _ = _parse(pathlib.Path(workdir) / FILE_NAME)
  alive = survivors(records)
  return alive if phase is None else [r for r in alive if r['phase'] == phase]


def survivors(records: list[Record]) -> list[Record]:
  """Applies the markers: the records that remain, in file order."""
  alive: list[Record] = []
  for record in records:
    marker = record.get('supersedes')
    if marker is None:
      alive.append(record)
    else:
      alive = [
        r
        for r in alive
        if r['phase'] != marker['phase'] or r['step'] <= marker['after_step']
      ]
  return alive


def rss_bytes() -> int:
  """Resident memory of this process in bytes; 0 where /proc is missing."""
  try:
    with open('/proc/self/statm', 'rb') as statm:
      return int(statm.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
  except OSError:
    return 0


def _phase_and_step(phase: str, step: int, lowest: int) -> tuple[str, int]:
  if not isinstance(phase, str) or not phase:
    raise ValueError(f'metrics: phase must be a non-empty string, got {phase!r}')
  step = operator.index(step)
  if step < lowest:
    raise ValueError(f'metrics: step {step} of phase {phase!r} is below {lowest}')
  return phase, step


def _scalar(key: str, value: Any) -> float | int | bool | str:
  if type(value) not in (float, int, bool, str):
    if getattr(value, 'size', None) == 1:  # a NumPy or JAX scalar
      value = value.item()
    if not isinstance(value, (float, int, bool, str)):
      raise TypeError(
        f'metrics: {key!r} is a {type(value).__name__}, not a number, boolean or string'
      )
  return value


def _strict(value: Any) -> Any:
  return None if isinstance(value, float) and not math.isfinite(value) else value


def write_all(fd: int, data: bytes) -> None:
  """Appends all of data or, if that fails, none of it."""
  written = 0
  try:
    while written < len(data):
      written += os.write(fd, data[written:])
  except OSError:
    if written:
      os.ftruncate(fd, os.fstat(fd).st_size - written)
    raise


def _parse(path: pathlib.Path) -> tuple[list[Record], int]:
  """Returns all records, markers included, and the bytes of the complete lines."""
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    return [], 0
  end_bytes = data.rfind(b'\n') + 1
  records = []
  for number, line in enumerate(data[:end_bytes].split(b'\n')[:-1], start=1):
    where = f'{path}, line {number}'
    try:
      record = json.loads(line)
      newer = record['schema'] > SCHEMA
      record['lineage'] + 0
      if 'supersedes' in record:
        record['supersedes']['phase'], record['supersedes']['after_step']
      else:
        record['phase'], record['step']
    except (ValueError, KeyError, TypeError) as error:
      raise MetricsError(
        f'{where}: not a metrics record ({error!r}). Remove this line to continue.'
      ) from error
    if newer:
      raise MetricsError(
        f'{where}: schema {record["schema"]}; this version reads up to {SCHEMA}. '
        'Use the version that wrote it, or another workdir.'
      )
    records.append({k: math.nan if v is None else v for k, v in record.items()})
  return records, end_bytes


def _repair(path: pathlib.Path) -> int:
  """Removes an incomplete last line; returns the file's last lineage, −1 if none."""
  records, end_bytes = _parse(path)
  excess_bytes = path.stat().st_size - end_bytes if path.exists() else 0
  if excess_bytes:
    logging.warning(
      '%s: removed an incomplete last line of %d bytes', path, excess_bytes
    )
    os.truncate(path, end_bytes)
  return max((record['lineage'] for record in records), default=-1)
