"""The gateway as an object: uvicorn in a thread of the engine's process.

gateway = Gateway(GatewayConfig(), tokenizer, scheduler, pool.record)
gateway.start()
gateway.sessions.open('episode-1', 'training')
... # an agent talks to gateway.base_url with that key
gateway.sessions.close('episode-1')
gateway.stop()
"""

from __future__ import annotations

from collections.abc import Callable

import fastapi

from m2jax.gateway import app, episodes_api, session_api, sessions
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.exchange import Record
from m2jax.gateway.listener import Listener
from m2jax.gateway.service import ChatService
from m2jax.rollout.api import Serving
from m2jax.text.tokenizer import Tokenizer


class Gateway:
  """Serves an engine to any number of agents.

  Attributes:
    sessions: `open(key, mode)` and `close(key)`, from any thread.
    host, hosts: the address that it listens at, and its other names.
    base_url: 'http://host:port/v1', after the start.
  """

  def __init__(
    self,
    config: GatewayConfig,
    tokenizer: Tokenizer,
    engine: Serving,
    record: Record,
    remote: session_api.RemoteSessions | None = None,
  ):
    """Builds the server; `start` starts it.

    Args:
      record: called with every finished completion before its response is sent, on the
        gateway's thread: it must return fast. If it raises, or the future that it
        returns does, the client gets a 500.
      remote: how other processes may open sessions; None: they may not.
    """
    self.sessions = sessions.Sessions(
      accept_unknown=config.accept_unknown_keys,
      unknown_mode=config.unknown_key_mode,
      max_unknown=config.max_unknown_sessions,
      max_unknown_bytes=config.max_unknown_bytes,
      limits=sessions.Limits(config.max_session_completions, config.max_session_bytes),
    )
    self.host, self.hosts = config.host, config.hosts
    self._service = ChatService(config, tokenizer, engine, record, self.sessions)
    self._application = application = app.build(self._service)
    if remote is not None:
      session_api.add_routes(application, self.sessions, remote)
    self._listener = Listener('gateway', application, config, self._service.counters)

  def take_episodes(self, episodes: episodes_api.Episodes, secret: str) -> None:
    """Lets agents elsewhere begin and end episodes; call it before the start."""
    episodes_api.add_routes(self._application, episodes, secret)

  def show_to(self, key: str) -> None:
    """Lets holders of a key read the counters beyond loopback."""
    self._service.view_key = key

  def extend(self, add_routes: Callable[[fastapi.FastAPI], None]) -> None:
    """Adds routes of another package; call it before the start."""
    add_routes(self._application)

  def start(self) -> Gateway:
    """Starts listening; returns when the server is ready.

    Raises:
      OSError: the port is in use, or the host is not an address of this machine.
    """
    self._listener.start()
    return self

  def stop(self):
    """Waits up to `stop_timeout_s` for requests in flight, then closes connections."""
    if self._listener.stop():
      self._service.close()

  @property
  def base_url(self) -> str:
    """The base URL for OpenAI clients."""
    return self._listener.url + '/v1'

  def counters(self) -> dict[str, int]:
    """Counts since the start: `{'requests_total{status="200"}': 3, …}`.

    `counters.HELP` has the names. Each request that reached the engine is an extension
    or a fork.
    """
    return self._service.counters.as_dict()

  def __enter__(self) -> Gateway:
    return self.start()

  def __exit__(self, *exc):
    self.stop()
