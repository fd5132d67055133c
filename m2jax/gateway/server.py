"""The gateway as an object: uvicorn in a thread of the engine's process.

gateway = Gateway(GatewayConfig(), tokenizer, scheduler, pool.record)
gateway.start()
gateway.sessions.open('episode-1', 'training')
... # an agent talks to gateway.base_url with that key
gateway.sessions.close('episode-1')
gateway.stop()
"""

from __future__ import annotations

import functools
import resource
import socket
import threading
import time
from collections.abc import Callable

import uvicorn
from absl import logging

from m2jax.gateway import app, connections, sessions
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.exchange import Engine
from m2jax.gateway.service import ChatService
from m2jax.records import Completion
from m2jax.text.tokenizer import Tokenizer

_START_TIMEOUT_S = 30.0
# Files besides connections: checkpoints, database, pipes.
_OTHER_FILES = 128


class Gateway:
  """Serves an engine to any number of agents.

  Attributes:
    sessions: `open(key, mode)` and `close(key)`, from any thread.
    base_url: 'http://host:port/v1', after the start.
  """

  def __init__(
    self,
    config: GatewayConfig,
    tokenizer: Tokenizer,
    engine: Engine,
    record: Callable[[Completion], None],
  ):
    """Builds the server; `start` starts it.

    Args:
      record: called with every finished completion before its response is sent, on the
        gateway's thread: it must return fast. If it raises, the client gets a 500.
    """
    self._config = config
    self.sessions = sessions.Sessions(
      accept_unknown=config.accept_unknown_keys,
      unknown_mode=config.unknown_key_mode,
      max_unknown=config.max_unknown_sessions,
      max_unknown_bytes=config.max_unknown_bytes,
      limits=sessions.Limits(config.max_session_completions, config.max_session_bytes),
    )
    self._service = ChatService(config, tokenizer, engine, record, self.sessions)
    self._server: uvicorn.Server | None = None
    self._thread: threading.Thread | None = None
    self._socket: socket.socket | None = None

  def start(self) -> Gateway:
    """Starts listening; returns when the server is ready.

    Raises:
      OSError: the port is in use, or the host is not an address of this machine.
    """
    config = self._config
    if self._thread is not None:
      raise RuntimeError('the gateway is running already')
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < config.max_connections + _OTHER_FILES:
      logging.warning(
        'gateway: max_connections=%d is not enforced, because this process may open '
        'only %d files: raise `ulimit -n`, or lower max_connections',
        config.max_connections,
        files,
      )
    family = socket.AF_INET6 if ':' in config.host else socket.AF_INET
    listener = socket.create_server((config.host, config.port), family=family)
    self._socket = listener
    server = uvicorn.Server(
      uvicorn.Config(
        app.build(self._service),
        loop='uvloop',
        http=functools.partial(connections.Connection, config, self._service.counters),
        ws='none',
        lifespan='off',
        access_log=False,
        log_config=None,
        log_level='error',  # a client must not fill the log
        server_header=False,
        timeout_keep_alive=config.keep_alive_s,
        timeout_graceful_shutdown=config.stop_timeout_s,
      )
    )
    thread = threading.Thread(
      target=server.run, args=([listener],), name='gateway', daemon=True
    )
    thread.start()
    self._server, self._thread = server, thread
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not server.started:
      if not thread.is_alive() or time.monotonic() > deadline:
        self.stop()
        raise RuntimeError('the gateway did not start; see the log')
      time.sleep(0.005)
    return self

  def stop(self):
    """Waits up to `stop_timeout_s` for requests in flight, then closes connections."""
    if self._thread is None:
      return
    self._server.should_exit = True
    self._thread.join()
    self._socket.close()
    self._service.close()
    self._thread = self._server = self._socket = None

  @property
  def base_url(self) -> str:
    """The base URL for OpenAI clients."""
    if self._socket is None:
      raise RuntimeError('the gateway is not running: start it first')
    host, port = self._socket.getsockname()[:2]
    return f'http://[{host}]:{port}/v1' if ':' in host else f'http://{host}:{port}/v1'

  def counters(self) -> dict[str, int]:
    """Counts since the start: `{'requests_total{status="200"}': 3, …}`.

    Names: requests_total{status}, completions_total{finish_reason},
    parsed_total{status}, extensions_total, forks_total{reason},
    closed_by_gateway_total, overrides_total{field}, ignored_total{field},
    prompt_tokens_total, response_tokens_total, closed_connections_total{reason}.
    Each request that reached the engine is an extension or a fork.
    """
    return self._service.counters.as_dict()

  def __enter__(self) -> Gateway:
    return self.start()

  def __exit__(self, *exc):
    self.stop()
