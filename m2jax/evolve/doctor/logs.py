"""Reads the end of a run's logs, and finds the lines that belong to a finding.

Logs contain text of models, tools and clients: what is quoted is printable and short.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator

from m2jax.evolve.doctor import causes, finding
from m2jax.evolve.doctor.finding import Finding
from m2jax.observe import printable

MAX_BYTES = 8 << 20  # of the end of each file
MAX_FILES = 32
MAX_LINES = 5  # quoted by a finding
_LINE_CHARS = 240
_AROUND_S = 60.0  # an error is logged shortly before or after its effect is recorded
# absl: 'E1130 11:23:45.123456 140… file.py:12] message', in local time.
_ABSL = re.compile(r'[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.\d+ ')
_HARMLESS = 'slow_operation_alarm.cc'  # XLA: compiling takes minutes on a laptop
_NUMBERS = re.compile(r'0x[0-9a-f]+|\d+')


@dataclasses.dataclass(frozen=True)
class Line:
  """A line of a log.

  Attributes:
    text: the line.
    time_s: its time in seconds since the epoch; None if it has none.
  """

  text: str
  time_s: float | None


@dataclasses.dataclass(frozen=True)
class Log:
  """The ends of the logs of a run.

  Attributes:
    lines: the lines, file by file.
    newest_s: when the newest file was written; 0 without files.
  """

  lines: tuple[Line, ...] = ()
  newest_s: float = 0.0


def read(workdir: pathlib.Path, more: Iterable[pathlib.Path] = ()) -> Log:
  """Reads WORKDIR/*.log and further files.

  Raises:
    OSError: one of `more` cannot be read.
  """
  paths = [*sorted(workdir.glob('*.log'))[:MAX_FILES], *more]
  lines: list[Line] = []
  newest_s = 0.0
  for path in paths:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
      continue
    newest_s = max(newest_s, status.st_mtime)
    with open(path, 'rb') as file:
      file.seek(max(0, status.st_size - MAX_BYTES), os.SEEK_SET)
      data = file.read(MAX_BYTES)
    for text in data.decode('utf-8', 'replace').splitlines():
      lines.append(Line(text, _time_s(text, status.st_mtime)))
  return Log(tuple(lines), newest_s)


def _time_s(text: str, written_s: float) -> float | None:
  """The time of a line of absl's, which has no year: the last before `written_s`."""
  if not (match := _ABSL.match(text)):
    return None
  month, day, hour, minute, second = map(int, match.groups())
  in_year = lambda year: datetime.datetime(year, month, day, hour, minute, second)
  try:
    year = datetime.datetime.fromtimestamp(written_s).year
    at = in_year(year).timestamp()
    if at > written_s + 86_400:
      at = in_year(year - 1).timestamp()
  except (ValueError, OverflowError, OSError):
    return None
  return at


def with_lines(found: Finding, log: Log) -> Finding:
  """The finding with the lines of its kind and, if both have a time, of its window."""
  pattern = causes.KINDS[found.kind].log
  if found.log or not pattern:
    return found
  matches = re.compile(pattern).search
  out: list[str] = []
  for line in log.lines:
    if line.time_s is not None and found.first_s is not None:
      last_s = found.last_s if found.last_s is not None else found.first_s
      if not found.first_s - _AROUND_S <= line.time_s <= last_s + _AROUND_S:
        continue
    if line.text[:1] != 'I' and matches(line.text[:2000]):
      out.append(printable.one_line(line.text, _LINE_CHARS))
      if len(out) == MAX_LINES:
        break
  return dataclasses.replace(found, log=tuple(out))


def around(findings: Iterable[Finding], log: Log, most: int = 80) -> list[str]:
  """The newest lines within a minute of a finding's window, without INFO of absl's.

  Lines without a time, such as those of a traceback, belong to the line before them.
  """
  windows = [
    (f.first_s - _AROUND_S, (f.last_s or f.first_s) + _AROUND_S)
    for f in findings
    if f.first_s is not None
  ]
  out: collections.deque[str] = collections.deque(maxlen=most)
  inside = not windows
  for line in log.lines:
    if line.time_s is not None:
      near = any(first <= line.time_s <= last for first, last in windows)
      inside = (near or not windows) and line.text[:1] != 'I'
    if inside:
      out.append(printable.one_line(line.text, _LINE_CHARS))
  return list(out)


def errors(log: Log) -> Iterator[Finding]:
  """Errors and tracebacks in the logs; lines that differ in numbers only are one."""
  matches = re.compile(causes.KINDS['logged_errors'].log).search
  counts: collections.Counter[str] = collections.Counter()
  first: dict[str, Line] = {}
  for line in log.lines:
    if matches(line.text[:2000]) and _HARMLESS not in line.text[:200]:
      form = _NUMBERS.sub('#', line.text[:_LINE_CHARS])
      counts[form] += 1
      first.setdefault(form, line)
  if counts:
    shown = counts.most_common(MAX_LINES)
    times = [x.time_s for x in first.values() if x.time_s is not None]
    yield Finding(
      'logged_errors',
      f'{counts.total():,} errors in the log, of {len(counts):,} kinds',
      first_s=min(times, default=None),
      last_s=max(times, default=None),
      evidence=(
        finding.evidence('lines of each kind', [n for _, n in shown], (), 0.0, ''),
      ),
      log=tuple(printable.one_line(first[f].text, _LINE_CHARS) for f, _ in shown),
    )
