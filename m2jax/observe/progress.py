"""What a job is doing now, in words and counts, for views and logs.

Long operations report where they happen:

  report = progress.counted('compiling the engine', len(shapes))
  for shape in shapes:
    report()
    compile(shape)

A view listens (`terminal.RunView`); in a job without one the log does (`Logged`). With
no listener a report has no effect.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

from absl import logging

_LOG_EVERY_S = 5.0

Listener = Callable[[str, int, int], None]
_listeners: list[Listener] = []


def report(doing: str, done: int = 0, total: int = 0) -> None:
  """Says what the job does now, and how much of it is done; from any thread.

  Args:
    doing: a few words; '' if that is over.
    done, total: counts; a total of 0 is not counted.
  """
  for listener in _listeners[-1:]:
    listener(doing, done, total)


def counted(doing: str, total: int) -> Callable[[], None]:
  """A function that reports the next of `total`; call it before each."""
  numbers = itertools.count(1)
  return lambda: report(doing, min(next(numbers), total), total)


def words(doing: str, done: int, total: int) -> str:
  """A report as text: 'compiling the engine 3 of 9'."""
  return f'{doing} {done:,} of {total:,}' if total else doing


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
  """Reports go to `listener` only, while the body runs."""
  _listeners.append(listener)
  try:
    yield
  finally:
    _listeners.remove(listener)


class Logged:
  """A listener that logs: something new at once, its counts every few seconds."""

  def __init__(self):
    self._last, self._logged_s = '', 0.0

  def __call__(self, doing: str, done: int, total: int) -> None:
    now = time.monotonic()
    if doing != self._last or (total and now - self._logged_s >= _LOG_EVERY_S):
      self._last, self._logged_s = doing, now
      if doing:
        logging.info('%s', words(doing, done, total))
