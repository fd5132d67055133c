"""A request to end a job, such as SIGTERM, handled at the next step boundary.

A scheduler sends SIGTERM before it takes a machine away. Inside `deferred` it is a
request: the body saves, and `deferred` raises KeyboardInterrupt when it is left.
Elsewhere, and the second time, it interrupts at once. Ctrl-C always does.

A job in several processes may get it in any of them. The loops over batches vote on
the devices (`train.loop`); process 0 of RL asks the coordination service.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax._src import distributed  # JAX has no public access to the key-value store

_KEY = 'stopping/requested'

_deferred = 0
_requested = False


def on_signal(number, frame) -> None:
  """Handles SIGTERM: requests an end; interrupts at once if repeated or undeferred."""
  del number, frame
  again = _requested
  request()
  if again or not _deferred:
    raise KeyboardInterrupt


def request() -> None:
  """Asks this process to end and, in a job of several, notifies process 0."""
  global _requested
  _requested = True
  client = distributed.global_state.client
  if client is not None and _deferred:
    client.key_value_set(_KEY, '', allow_overwrite=True)


def requested() -> bool:
  """Whether this process was asked to end, or, if it is process 0, any of the job."""
  client = distributed.global_state.client
  if _requested or client is None or distributed.global_state.process_id:
    return _requested
  return bool(client.key_value_dir_get(_KEY.partition('/')[0]))


def forget() -> None:
  """A new job in this process: earlier requests are over."""
  global _requested
  _requested = False


@contextlib.contextmanager
def deferred() -> Iterator[None]:
  """The body looks at `requested` at its step boundaries, and then saves and returns.

  Raises:
    KeyboardInterrupt: at the end of the body, if the job was asked to end.
  """
  global _deferred
  _deferred += 1
  try:
    yield
  finally:
    _deferred -= 1
  if _requested:
    raise KeyboardInterrupt
