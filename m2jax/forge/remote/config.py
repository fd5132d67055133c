"""Settings of a run whose roles are processes of their own."""

from __future__ import annotations

import dataclasses
import functools
import urllib.parse

from m2jax.checks import require
from m2jax.forge.remote.engine_client import RemoteConfig
from m2jax.forge.remote.engine_server import EngineServerConfig
from m2jax.rollout.disaggregation.handover import HandoverConfig
from m2jax.rollout.disaggregation.wire import Address
from m2jax.rollout.routing.config import RouterConfig
from m2jax.sharding import MeshConfig


@dataclasses.dataclass(frozen=True)
class RolesConfig:
  """How the roles find each other; without effect on a run in one process.

  Attributes:
    engine_urls, gateway_url: by which the other roles reach them. A port of 0 in
      `engine_server` or the gateway's config is the port of the URL.
    engine: which of the `engine_urls` the engine of this process has, from 0.
    pool_url: SQLAlchemy URL of the pool's database; '' is WORKDIR/pool.db. SQLite is
      for processes of one machine. A password may be in libpq's password file instead.
    pool_outage_s: how long a role waits for a PostgreSQL server that is away.
    keys_dir: directory of the files `view`, `session`, `reward` and `engine`, the keys
      by which roles and people ask the servers (docs/roles.md); '' is WORKDIR/keys,
      which the learner makes.
    engine_server: the engine's HTTP server.
    engine_client: how the gateway uses an engine.
    router: how the gateway uses several (`rollout.routing`).
    prefill_address: of a prefill engine that the engines use, `tcp:HOST:PORT` or
      `unix:PATH`; '': they compute their prompts themselves.
    handover: how they use it.
    engine_mesh, prefill_mesh: devices of an engine's process, and of the prefill
      engine's.
    lease_s: a group whose agents' process gives no sign of life for this long goes to
      another one.
    poll_s: between two looks into the database, of agents and learner.
    full_every: every n-th published version is also written as a whole.
  """

  engine_urls: tuple[str, ...] = ('http://127.0.0.1:8101',)
  engine: int = 0
  gateway_url: str = 'http://127.0.0.1:8102'
  pool_url: str = ''
  pool_outage_s: float = 60.0
  keys_dir: str = ''
  engine_server: EngineServerConfig = EngineServerConfig()
  engine_client: RemoteConfig = RemoteConfig()
  router: RouterConfig = RouterConfig()
  prefill_address: str = ''
  handover: HandoverConfig = HandoverConfig()
  engine_mesh: MeshConfig = MeshConfig()
  prefill_mesh: MeshConfig = MeshConfig()
  lease_s: float = 60.0
  poll_s: float = 0.2
  full_every: int = 16

  def __post_init__(self):
    check = functools.partial(require, self)
    url = 'a URL such as http://HOST:PORT'
    check(_has_port(self.gateway_url), 'gateway_url', url)
    urls = self.engine_urls
    different = 0 < len(urls) == len(set(urls))
    check(different and all(map(_has_port, urls)), 'engine_urls', f'each {url}')
    check(0 <= self.engine < len(urls), 'engine', 'the number of one of engine_urls')
    if self.prefill_address:
      try:
        Address.parse(self.prefill_address)
      except ValueError as error:
        raise ValueError(f'RolesConfig.prefill_{error}') from error
    check(self.poll_s > 0, 'poll_s', 'positive')
    check(self.pool_outage_s >= 0, 'pool_outage_s', 'at least 0')
    least = 4 * self.poll_s  # a holder gives four signs of life in a lease
    check(self.lease_s >= least, 'lease_s', f'at least 4 × poll_s = {least:g}')
    check(self.full_every >= 1, 'full_every', 'at least 1')


def port(url: str) -> int:
  """The port of a URL of `RolesConfig`."""
  return urllib.parse.urlsplit(url).port


def _has_port(url: str) -> bool:
  try:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ('http', 'https') and bool(parts.hostname and parts.port)
  except ValueError:
    return False
