"""Published weights for an engine of several processes, which all read each version.

Process 0 finds the versions. For each, it has all processes read their parts while they
decode, and waits until every process has: a version that one process cannot read is
served by none. The engine's thread then exchanges the weights in all processes by the
number of that reading (`lead_engine`).
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import jax
from absl import logging

from m2jax.checkpoint import CheckpointError, published
from m2jax.forge.errors import Stopped
from m2jax.forge.processes.commands import Commands
from m2jax.frames import Frame


class Numbers:
  """Names sets of weights by numbers that all processes of a job know.

  Any thread may use it. It keeps no weights alive.
  """

  def __init__(self):
    self._next = 0
    self._first: dict[int, weakref.ref] = {}  # leaf, by number

  def new(self) -> int:
    """A number for the weights that are read next."""
    self._next += 1
    return self._next - 1

  def assign(self, number: int, variables: Any) -> None:
    """Every process has these weights by this number."""
    alive = {n: leaf for n, leaf in self._first.items() if leaf() is not None}
    self._first = alive | {number: weakref.ref(jax.tree.leaves(variables)[0])}

  def of(self, variables: Any) -> int:
    """Raises LookupError if the other processes have not read these weights."""
    first = jax.tree.leaves(variables)[0]
    for number, leaf in self._first.items():
      if leaf() is first:
        return number
    raise LookupError('the other processes of the engine have not read these weights')


class LeadReader(published.Reader):
  """Process 0's reader, which has the other processes read what it reads.

  Attributes:
    numbers: numbers of the weights that all processes have read.
  """

  def __init__(self, directory: str | os.PathLike, commands: Commands):
    super().__init__(directory)
    self._commands, self.numbers = commands, Numbers()

  def load(self, version: published.Version, like: Any) -> Any:
    """Reads a version with the other processes.

    Raises:
      CheckpointError: a process could not read it.
      OSError: the storage is away, for one of them.
      Stopped: one of them has stopped.
    """
    number = self.numbers.new()
    self._commands.send('read', number=number, version=list(version))
    variables = failed = None
    try:
      variables = super().load(version, like)
    except (CheckpointError, OSError) as error:
      failed = error
    answers = self._commands.answers()
    failed = failed or next((e for e in map(_failure, answers) if e is not None), None)
    if failed is not None:
      self._commands.send('drop', number=number)
      raise failed
    self.numbers.assign(number, variables)
    return variables


def _failure(answer: Frame) -> Exception | None:
  text = f'process {answer.fields["process"]}: {answer.fields["error"]}'
  match answer.fields['read']:
    case 'ok':
      return None
    case 'checkpoint':
      return CheckpointError(text)
    case 'storage':
      return OSError(text)
  return Stopped(text)


class FollowReader:
  """Reads with process 0 in a thread, in each of the other processes."""

  def __init__(self, reader: published.Reader, commands: Commands, like: Any):
    """Reads nothing yet.

    Args:
      reader: this process's reader.
      commands: the channel of process 0's `LeadReader`.
      like: see `published.Reader.load`.
    """
    self._reader, self._commands, self._like = reader, commands, like
    self._lock = threading.Lock()
    self._read: dict[int, Any] = {}  # by number
    self._thread = threading.Thread(target=self._run, name='read-weights', daemon=True)

  def start(self) -> FollowReader:
    self._thread.start()
    return self

  def take(self, number: int) -> Any:
    """The weights of a number, once; those before it are dropped.

    Raises:
      LookupError: they were not read.
    """
    with self._lock:
      found = self._read.pop(number, None)
      for older in [n for n in self._read if n < number]:
        del self._read[older]
    if found is None:
      raise LookupError(f'process 0 has not had the weights {number} read here')
    return found

  def _run(self) -> None:
    try:
      while (command := self._commands.receive()).kind != 'stop':
        self._do(command)
    except Stopped as error:  # the calls end this process, with the reason
      logging.info('weights are not read any more: %s', error)

  def _do(self, command: Frame) -> None:
    number, process = command.fields['number'], jax.process_index()
    if command.kind == 'drop':
      with self._lock:
        self._read.pop(number, None)
      return
    read, text = 'ok', ''
    try:
      variables = self._reader.load(
        published.Version(*command.fields['version']), self._like
      )
      with self._lock:
        self._read[number] = variables
    except CheckpointError as error:
      read, text = 'checkpoint', str(error)
    except OSError as error:
      read, text = 'storage', str(error)
    except Exception as error:
      logging.exception('the published weights cannot be read')
      read, text = 'other', repr(error)
    self._commands.answer(read=read, error=text[:10_000], process=process)
