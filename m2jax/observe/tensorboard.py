"""TensorBoard event files from metric records: one run (directory) per phase.

Each phase is a run because it counts its own steps, and because TensorBoard handles a
restart per run: a session start at step s voids all earlier events of the run with step
>= s. All scalars of a record go into one event, which costs a tenth of tensorboardX's
`add_scalar` per scalar; framing and protocol buffers are tensorboardX's. The first
value of a tag has its unit and meaning (`names`), which `tensorboard --load_fast=false`
shows; the default loader drops them.
"""

from __future__ import annotations

import os
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2, summary_pb2

from m2jax.observe import names


class EventFiles:
  """Event files of all phases, opened when a phase first appears. Not thread-safe."""

  def __init__(self, directory: str | os.PathLike, suffix: str = ''):
    """Sets the directory; `suffix` distinguishes files opened within one second."""
    self._directory = pathlib.Path(directory)
    self._suffix = suffix
    self._writers: dict[str, event_file_writer.EventsWriter] = {}
    self._described: set[tuple[str, str]] = set()  # (phase, tag)

  def add(
    self, phase: str, step: int, time_s: float, scalars: Mapping[str, Any]
  ) -> None:
    """Writes the numbers among `scalars` as one event; skips strings."""
    values = [
      summary_pb2.Summary.Value(
        tag=key, simple_value=float(value), metadata=self._description(phase, key)
      )
      for key, value in scalars.items()
      if isinstance(value, (float, int))
    ]
    if values:
      summary = summary_pb2.Summary(value=values)
      self._writer(phase).write_event(
        event_pb2.Event(wall_time=time_s, step=step, summary=summary)
      )

  def purge(self, phase: str, purge_step: int) -> None:
    """Marks a restart: readers drop earlier events of the phase from purge_step on."""
    session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._writer(phase).write_event(
      event_pb2.Event(wall_time=time.time(), step=purge_step, session_log=session)
    )

  def flush(self) -> None:
    """Pushes buffered events to the files."""
    for writer in self._writers.values():
      writer.flush()

  def close(self) -> None:
    """Flushes and closes every file."""
    for writer in self._writers.values():
      writer.close()
    self._writers.clear()

  def _description(self, phase: str, tag: str) -> summary_pb2.SummaryMetadata | None:
    if (phase, tag) in self._described:
      return None
    self._described.add((phase, tag))
    metric = names.find(phase, tag)
    return metric and summary_pb2.SummaryMetadata(
      summary_description=f'{metric.meaning} [{metric.unit}]'
    )

  def _writer(self, phase: str) -> event_file_writer.EventsWriter:
    if phase not in self._writers:
      run = self._directory / (re.sub(r'[^\w.-]', '_', phase).lstrip('.') or '_')
      run.mkdir(parents=True, exist_ok=True)
      self._writers[phase] = event_file_writer.EventsWriter(
        str(run / 'events'), self._suffix
      )
    return self._writers[phase]
