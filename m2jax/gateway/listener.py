"""An ASGI application on a port: uvicorn in a thread, with `connections`' limits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from absl import logging

from m2jax.gateway import connections
from m2jax.gateway.counters import Counters

_START_TIMEOUT_S = 30.0
# Files besides connections: checkpoints, database, pipes.
_OTHER_FILES = 128
_TICK_S = 1.0  # between two dates in the headers of responses
_POLL_S = 0.005  # for the end of the requests in flight, while stopping


class _Server(uvicorn.Server):
  """uvicorn's server, but `stop` takes effect at once.

  uvicorn looks for `should_exit` every 0.1 s, and waits 0.1 s more before it looks
  whether all connections are closed.
  """

  def __init__(self, config: uvicorn.Config):
    super().__init__(config)
    self._wake: Callable[[], object] = lambda: None

  def stop(self) -> None:
    """Begins to shut down; from any thread."""
    self.should_exit = True
    with contextlib.suppress(RuntimeError):  # the loop is closed
      self._wake()

  async def main_loop(self) -> None:
    """Returns after `stop`."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    self._wake = lambda: loop.call_soon_threadsafe(stopped.set)
    while not await self.on_tick(0):
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopped.wait(), _TICK_S)

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    """Closes idle connections, and the others after their responses or the timeout."""
    for server in self.servers:
      server.close()
    for each in sockets or ():
      each.close()
    state = self.server_state
    for connection in list(state.connections):
      connection.shutdown()
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + self.config.timeout_graceful_shutdown
    await asyncio.sleep(0)  # closed transports leave `connections`
    while (state.connections or state.tasks) and loop.time() < ends_s:
      await asyncio.sleep(_POLL_S)
    for task in state.tasks:
      task.cancel()


class Listener:
  """Serves one application; `start` and `stop`, once each or again."""

  def __init__(self, name: str, app: Any, bounds: Any, counters: Counters):
    """Prepares the server.

    Args:
      name: name of the thread, also in messages.
      app: the ASGI application.
      bounds: a config with the fields of `GatewayConfig` that are about the socket and
        its connections.
      counters: get the closed connections.
    """
    self._name, self._app, self._bounds = name, app, bounds
    self._counters = counters
    self._server: _Server | None = None
    self._thread: threading.Thread | None = None
    self._socket: socket.socket | None = None

  def start(self) -> None:
    """Starts listening; returns when the server is ready.

    Raises:
      OSError: the port is in use, or the host is not an address of this machine.
    """
    bounds = self._bounds
    if self._thread is not None:
      raise RuntimeError(f'the {self._name} is running already')
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < bounds.max_connections + _OTHER_FILES:
      logging.warning(
        '%s: max_connections=%d is not enforced, because this process may open '
        'only %d files: raise `ulimit -n`, or lower max_connections',
        self._name,
        bounds.max_connections,
        files,
      )
    family = socket.AF_INET6 if ':' in bounds.host else socket.AF_INET
    listener = socket.create_server((bounds.host, bounds.port), family=family)
    self._socket = listener
    server = _Server(
      uvicorn.Config(
        self._app,
        loop='uvloop',
        http=functools.partial(connections.Connection, bounds, self._counters),
        ws='none',
        lifespan='off',
        access_log=False,
        log_config=None,
        log_level='error',  # a client must not fill the log
        server_header=False,
        timeout_keep_alive=bounds.keep_alive_s,
        timeout_graceful_shutdown=bounds.stop_timeout_s,
      )
    )
    thread = threading.Thread(
      target=server.run, args=([listener],), name=self._name, daemon=True
    )
    thread.start()
    self._server, self._thread = server, thread
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not server.started:
      if not thread.is_alive() or time.monotonic() > deadline:
        self.stop()
        raise RuntimeError(f'the {self._name} did not start; see the log')
      time.sleep(0.005)

  def stop(self) -> bool:
    """Waits up to `stop_timeout_s` for requests in flight, then closes connections.

    Returns False if it was not running.
    """
    if self._thread is None:
      return False
    self._server.stop()
    self._thread.join()
    self._socket.close()
    self._thread = self._server = self._socket = None
    return True

  @property
  def url(self) -> str:
    """http://HOST:PORT, after the start."""
    if self._socket is None:
      raise RuntimeError(f'the {self._name} is not running: start it first')
    host, port = self._socket.getsockname()[:2]
    return f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'
