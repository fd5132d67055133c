"""Cuts the connections to a database server that is there but answers nothing.

A frozen server's kernel, for example, still acknowledges what it receives: neither
libpq's timeouts nor the server's end such a wait. So if a transaction takes longer than
`_SILENCE_S`, a new connection is tested; if it gets no answer, the transaction's
connection is cut, which counts as a lost server (`database.retrying`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import sqlalchemy as sa
from absl import logging

_SILENCE_S = 20.0


@contextlib.contextmanager
def watched(connection: sa.Connection, url: str) -> Iterator[None]:
  """Watches the connection in the block, unless it is SQLite; `url` is for messages."""
  if connection.dialect.name == 'sqlite':
    yield
    return
  raw = connection.connection.dbapi_connection
  ended, lock = threading.Event(), threading.Lock()

  def watch():
    while not ended.wait(_SILENCE_S):
      if _answers(connection.engine):
        logging.warning('data pool %s: a transaction takes long', url)
        continue
      with lock:
        if not ended.is_set() and not raw.closed:
          with socket.socket(fileno=os.dup(raw.fileno())) as shared:
            shared.shutdown(socket.SHUT_RDWR)
      return

  threading.Thread(target=watch, name='pool-watch', daemon=True).start()
  try:
    yield
  finally:
    with lock:  # the file may be another's afterwards
      ended.set()


def _answers(engine: sa.Engine) -> bool:
  """Whether the server answers a new connection within libpq's `connect_timeout`."""
  new = engine.pool.recreate()
  try:
    new.connect().close()
  except Exception as error:
    return 'FATAL: ' in str(error)  # such as: too many clients
  finally:
    new.dispose()
  return True
