"""Commands of process 0 to the other processes of a job.

They go through the job's coordination service, which process 0 hosts, and not through a
collective on the devices: a process may wait for hours while rollouts run, and must
notice meanwhile that the others have ended. Whatever process 0 commands, it does
itself at once, so that all processes run the same programs on the mesh in the same
order.

When a process dies, JAX ends the others within the heartbeat's timeout. When process 0
ends for any other reason, it commands `stop` with the reason. When another process
fails, it leaves the reason, which stops process 0 at its next command, or while it
waits for answers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax._src import distributed  # JAX has no public access to the key-value store

from m2jax import checks, frames
from m2jax.forge.errors import Stopped

_POLL_MS = 2000  # so that signals are handled
_ANSWER_POLL_S = 0.02
_FAILED = 'forge/failed'


class Commands:
  """Sent by process 0 and received by each of the others, in order.

  With one process `send` does nothing.
  """

  def __init__(self, name: str = 'forge'):
    """`name`: of the channel, in each of which one thread of a process takes part."""
    self._client, self._name = distributed.global_state.client, name
    self._next, self._oldest = 0, 0
    self.several = jax.process_count() > 1

  def send(
    self, do: str, arrays: Mapping[str, Any] | None = None, /, **fields: Any
  ) -> None:
    """Sends the other processes the next command.

    Args:
      do: a case of `follow`.
      arrays: name → array.
      **fields: JSON-able.

    Raises:
      Stopped: one of them has failed.
    """
    if not self.several:
      return
    self._check()
    self._put(frames.pack(do, arrays, **fields))

  def _check(self) -> None:
    for name, reason in self._client.key_value_dir_get(_FAILED):
      raise Stopped(f'process {name.rpartition("/")[2]} stopped: {reason}')

  def _put(self, command: bytes) -> None:
    self._client.key_value_set_bytes(self._key(self._next), command)
    self._next += 1

  def _key(self, number: int) -> str:
    return f'{self._name}/command/{number}'

  def answer(self, **fields: Any) -> None:
    """Answers the last command; the fields are JSON-able."""
    key = f'{self._name}/answer/{self._next - 1}/{jax.process_index()}'
    self._client.key_value_set_bytes(key, frames.pack('answer', **fields))

  def answers(self) -> list[frames.Frame]:
    """What the other processes answer to the last command, once all have.

    Deletes the commands so far, which they have received.

    Raises:
      Stopped: one of them has failed.
    """
    if not self.several:
      return []
    directory, others = f'{self._name}/answer/{self._next - 1}', jax.process_count() - 1
    while len(found := self._client.key_value_dir_get_bytes(directory)) < others:
      self._check()
      time.sleep(_ANSWER_POLL_S)
    self._client.key_value_delete(directory)
    self.forget()
    return [frames.decode(data) for _, data in sorted(found)]

  def receive(self) -> frames.Frame:
    """Waits for the next command.

    Raises:
      Stopped: process 0 has stopped before its end.
      KeyboardInterrupt: it was interrupted.
    """
    while True:
      try:
        key = self._key(self._next)
        data = self._client.blocking_key_value_get_bytes(key, _POLL_MS)
        break
      except jax.errors.JaxRuntimeError as error:
        if 'DEADLINE_EXCEEDED' not in str(error):
          raise Stopped(f'process 0 cannot be reached: {error}') from error
    self._next += 1
    command = frames.decode(data)
    if command.kind == 'stop' and command.fields['reason']:
      if command.fields['interrupted']:
        raise KeyboardInterrupt
      raise Stopped(command.fields['reason'], command.fields['repeatable'])
    return command

  def forget(self) -> None:
    """Deletes the commands that every process has received.

    To be called after a collective that all processes run because of the last one.
    """
    if self.several:
      for number in range(self._oldest, self._next):
        self._client.key_value_delete(self._key(number))
      self._oldest = self._next

  @contextlib.contextmanager
  def leading(self) -> Iterator[None]:
    """Commands `stop` at the end of the body, with the reason if it failed."""
    about = dict(reason='')
    try:
      yield
    except BaseException as error:
      about = dict(
        reason='process 0 stopped: see its message',
        interrupted=isinstance(error, KeyboardInterrupt),
        repeatable=checks.repeatable(error),
      )
      raise
    finally:
      if self.several:
        self._put(frames.pack('stop', **about))

  @contextlib.contextmanager
  def following(self) -> Iterator[None]:
    """Leaves the reason for process 0 if the body fails."""
    try:
      yield
    except Stopped:
      raise
    except BaseException as error:
      reason = str(error) or type(error).__name__
      self._client.key_value_set(f'{_FAILED}/{jax.process_index()}', reason)
      raise
