"""The live terminal view of a run: phases, learning, pool, window, latest trajectory.

It shows the records of `metrics.MetricsWriter` (DESIGN §6, Observability):
`metrics.add_listener(view.on_record)`. On a terminal it redraws twice a second through
`rich.live`; log lines appear above it. Elsewhere (pipes, CI) it prints a plain line
every few seconds while something changes. `frame.py` draws; this module controls the
screen. What is reported by `progress` is shown, too.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.live
import rich.text
from absl import logging as absl_logging

from m2jax.observe import findings as findings_lib
from m2jax.observe import frame, progress
from m2jax.observe.console import Console
from m2jax.observe.printable import printable

_MAX_HZ = 4.0


class RunView:
  """Shows a run in progress; a context manager, thread-safe.

  Example:
    with RunView({'setup': 20, 'SFT': 150, 'RL': 400}) as view:
      metrics.add_listener(view.on_record)
      view.begin('SFT')
  """

  def __init__(
    self,
    phases: Mapping[str, float],
    *,
    console: rich.console.Console | None = None,
    title: str = 'm2jax forge',
    refresh_hz: float = 2.0,
    plain_every_s: float = 10.0,
  ):
    """Prepares the view, which `start` or `with` then shows.

    Args:
      phases: phase name → expected seconds, in order: their shares of the whole. Names
        are unique.
      console: where to draw; standard output by default.
      title: shown first.
      refresh_hz: redraws per second, at most 4, to leave the processor to the run.
      plain_every_s: seconds between lines if the console is not a terminal.

    Raises:
      ValueError: no phases, or refresh_hz outside (0, 4].
    """
    if not phases:
      raise ValueError('RunView: phases is empty; name at least one phase')
    if not 0 < refresh_hz <= _MAX_HZ:
      raise ValueError(f'RunView: refresh_hz={refresh_hz} is not in (0, {_MAX_HZ}]')
    self._console = console or Console()
    self._plain_every_s = plain_every_s
    self._refresh_hz = refresh_hz
    self._lock = threading.Lock()
    self._state = frame.State(
      title=title,
      phases=[frame.Phase(name, expected_s) for name, expected_s in phases.items()],
      started_s=time.monotonic(),
    )
    self._live: rich.live.Live | None = None
    self._plain_thread: threading.Thread | None = None
    self._printed: tuple = ()
    self._listening = contextlib.ExitStack()
    self._stopping = threading.Event()
    self._streams: list[tuple[logging.StreamHandler, Any]] = []

  @property
  def interactive(self) -> bool:
    """Whether the console is a terminal that can be drawn on."""
    console = self._console
    return (
      console.is_terminal
      and not console.is_dumb_terminal
      and console.encoding.lower().startswith('utf')
    )

  def start(self) -> RunView:
    """Starts drawing or printing. `stop` also runs at exit, to restore the cursor."""
    self._stopping.clear()
    atexit.register(self.stop)
    self._listening.enter_context(progress.listening(self.on_progress))
    if self.interactive:
      self._live = rich.live.Live(
        console=self._console,
        get_renderable=self._draw,
        refresh_per_second=self._refresh_hz,
        vertical_overflow='crop',
      )
      self._live.start()
      self._redirect_logging()
    else:
      self._plain_thread = threading.Thread(
        target=self._print_lines, name='forge-view', daemon=True
      )
      self._plain_thread.start()
    return self

  def stop(self) -> None:
    """Draws the last state and restores the terminal. Idempotent."""
    atexit.unregister(self.stop)
    self._listening.close()
    self._stopping.set()
    live, self._live = self._live, None
    if live is not None:
      live.stop()
      for handler, stream in self._streams:
        handler.setStream(stream)
      self._streams.clear()
    thread, self._plain_thread = self._plain_thread, None
    if thread is not None:
      thread.join()
      self._print_line()

  def __enter__(self) -> RunView:
    return self.start()

  def __exit__(self, *unused) -> None:
    self.stop()

  def begin(self, phase: str) -> None:
    """Starts a phase; the previous one is done.

    Raises:
      ValueError: the phase was not named in the constructor.
    """
    self._state.find(phase)
    self.done()
    with self._lock:
      self._state.begin(phase)
    self._announce(f'{phase}: started')

  def done(self, note: str = '') -> None:
    """Ends the current phase; `note` (a few words) is shown next to its name."""
    with self._lock:
      ended = self._state.end_current(note)
    if ended is not None:
      words = f' ({note})' if note else ''
      self._announce(f'{ended.name}: done in {frame.clock(ended.elapsed_s())}{words}')

  def set_progress(self, fraction: float) -> None:
    """Sets the completed fraction of the current phase, which never falls."""
    if math.isfinite(fraction):
      with self._lock:
        self._state.set_progress(fraction)

  def on_progress(self, doing: str, done: int, total: int) -> None:
    """Shows what the current phase is doing: a listener of `progress`."""
    with self._lock:
      self._state.doing = progress.words(doing, done, total)

  def on_record(self, record: Mapping[str, Any]) -> None:
    """Shows a metric record; missing fields stay blank."""
    with self._lock:
      self._state.add(record)

  def set_window(
    self, states: Sequence[str], *, head: int = 0, window: int | None = None
  ) -> None:
    """Shows the FIFO window.

    Args:
      states: state of items head, head + 1, …: 'pending', 'completed', 'taken' or
        'failed'.
      head: index of the first one, the oldest item neither taken nor failed.
      window: W; completed items at head + W or later may not be taken. None is
        greedy.
    """
    with self._lock:
      self._state.window = (tuple(states), head, window)

  def set_snippet(self, messages: Sequence[Mapping[str, Any]]) -> None:
    """Shows a trajectory, OpenAI chat dicts: thinking, command, observation, answer."""
    with self._lock:
      self._state.snippet = messages

  def set_findings(self, found: Sequence[findings_lib.Shown]) -> None:
    """Shows what the run doctor found, all of it; lines in a log name what is new."""
    with self._lock:
      before = {(x.kind, x.phase) for x in self._state.findings}
      self._state.findings = tuple(found)
    for x in found:
      if (x.kind, x.phase) not in before:
        self._announce(f'{x.severity}: {x.kind}: {x.where}: {x.summary}')

  def _draw(self) -> rich.console.RenderableType:
    # A view never stops a job. Do not log here: a log line waits for the lock of the
    # screen, which the redrawing thread holds.
    try:
      with self._lock:
        return frame.draw(self._state, self._console.width)
    except Exception as error:
      return rich.text.Text(f'(cannot draw the view: {error!r})', style='red')

  def _print_lines(self) -> None:
    while not self._stopping.wait(self._plain_every_s):
      self._print_line()

  def _print_line(self) -> None:
    with self._lock:
      line, news = frame.plain_line(self._state), frame.news(self._state)
    if news != self._printed:
      self._printed = news
      self._say(line)

  def _announce(self, text: str) -> None:
    if self._plain_thread is not None:
      self._say(f'{self._state.title} | {text}')

  def _say(self, line: str) -> None:
    try:
      encoding = getattr(self._console.file, 'encoding', None) or 'utf-8'
      line = line.encode(encoding, 'replace').decode(encoding)
      self._console.file.write(printable(line) + '\n')
      self._console.file.flush()
    except (OSError, ValueError):  # the pipe's reader has exited; the run continues
      self._stopping.set()

  def _redirect_logging(self) -> None:
    """Points handlers with the original standard streams to the redirected ones.

    rich replaces sys.stdout and sys.stderr, but a handler created earlier, such as
    absl's, still has the original stream and would write into the drawing.
    """
    for handler in _stream_handlers():
      stream = handler.stream
      if stream in (sys.__stderr__, sys.__stdout__):
        self._streams.append((handler, stream))
        handler.setStream(sys.stdout if stream is sys.__stdout__ else sys.stderr)


def _stream_handlers() -> Iterator[logging.StreamHandler]:
  absl_handler = absl_logging.get_absl_handler()
  seen = dict.fromkeys(logging.getLogger().handlers)
  for logger in list(logging.Logger.manager.loggerDict.values()):
    if isinstance(logger, logging.Logger):
      seen.update(dict.fromkeys(logger.handlers))
  for handler in [*seen, absl_handler]:
    handler = getattr(handler, 'python_handler', handler)
    if isinstance(handler, logging.StreamHandler):
      yield handler
