"""The learner's role: `forge.run`, with the other roles at their URLs.

Weights go to a directory of published versions, work items to the pool's database,
where agents claim them. Evaluations run their episodes here, against the gateway.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import logging

from m2jax.agents import episodes
from m2jax.checkpoint import published
from m2jax.forge import shared
from m2jax.forge.config import ForgeConfig
from m2jax.forge.processes.commands import Commands
from m2jax.forge.remote.gateway_client import GatewayClient, SessionClient
from m2jax.forge.roles import engine as engine_role
from m2jax.forge.roles import in_process
from m2jax.pool.data_pool import DataPool
from m2jax.records import policy_version
from m2jax.text.tokenizer import Tokenizer

_NO_STATS = {'tokens_per_s': 0.0, 'queue_length': 0, 'active_slots': 0}


class PublishedWeights:
  """The engine as the learner sees it: takes weights, gives statistics.

  Attributes:
    alive, stopped_reason: always alive, as an engine elsewhere may return at any time.
  """

  alive, stopped_reason = True, None

  def __init__(
    self,
    publisher: published.Publisher,
    latest: published.Version | None,
    gateway: GatewayClient,
    pool: DataPool,
    commands: Commands | None = None,
  ):
    self._publisher, self._gateway, self._pool = publisher, gateway, pool
    self._commands = commands or Commands()
    self._latest = None if latest is None else engine_role.number(latest)
    self._wrote: published.Published | None = None  # by the last `update_weights`
    self._served = False  # yet

  def update_weights(self, variables: Any, version: int) -> None:
    """Publishes the weights; those that a restart only passes through are not new."""
    lineage = self._pool.begun_lineage
    number, self._wrote = policy_version(lineage, version), None
    if self._latest is not None and number <= self._latest:
      logging.info('weights of lineage %d, step %d: not new', lineage, version)
      return
    self._commands.send('publish', step=version, lineage=lineage)
    self._wrote = self._publisher.publish(variables, version, lineage)
    self._latest = number

  def wait_until_served(self, outage_s: float = shared.WAIT_S) -> None:
    """Waits until the engine samples by the weights that were published last.

    Raises:
      RolloutsFailed: gateway or engine, which have served before, do not after
        `outage_s`; or they were not started for a day.
    """

    def served() -> bool:
      serves, stats = self._gateway.health()
      return serves and stats.get('policy_version', self._latest - 1) >= self._latest

    limit_s = outage_s if self._served else shared.WAIT_S
    shared.wait_for('gateway and engine to serve the new weights', served, limit_s)
    self._served = True

  def stats(self) -> dict[str, Any]:
    """See `Scheduler.stats`; zeros while the engine does not answer. And of the last
    weights, if they were published: published_bytes, of their arrays,
    published_whole_bytes and published_delta_bytes, of their files, and publish_s."""
    return _NO_STATS | self._gateway.health()[1] | self._publication()

  def _publication(self) -> dict[str, float]:
    wrote = self._wrote
    if wrote is None:
      return {}
    return dict(
      published_bytes=wrote.raw_bytes,
      published_whole_bytes=wrote.whole_bytes,
      published_delta_bytes=wrote.delta_bytes,
      publish_s=wrote.seconds,
    )


class EvaluationRunner(episodes.Runner):
  """Runs evaluations, which are of the weights that were published last."""

  def __init__(self, *args, weights: PublishedWeights):
    super().__init__(*args)
    self._weights, self._outage_s = weights, args[0].evaluation_deadline_s

  def group(self, spec: str, count: int, **options) -> concurrent.futures.Future:
    self._weights.wait_until_served(self._outage_s)
    return super().group(spec, count, **options)


def rollouts_in(workdir: Path, commands: Commands):
  """`in_process.rollouts` for a learner whose other roles are processes of their own.

  `commands`: to the learner's other processes, which publish their parts.
  """

  @contextlib.contextmanager
  def rollouts(
    config: ForgeConfig, variables: Any, tok: Tokenizer, pool: DataPool, version: int
  ) -> Iterator[in_process.Rollouts]:
    del tok  # the gateway's role reads it
    url = config.roles.gateway_url
    shared.make_keys(config, workdir)
    key = functools.partial(shared.read_key, config, workdir)
    gateway = GatewayClient(url, key(shared.VIEW))
    sessions = SessionClient(url, key(shared.SESSION))
    commands.send('open')
    with (
      contextlib.closing(gateway),
      shared.publisher(config, workdir) as publisher,
    ):
      latest = published.Reader(workdir / shared.WEIGHTS).latest()
      weights = PublishedWeights(publisher, latest, gateway, pool, commands)
      weights.update_weights(variables, version)
      del variables
      with EvaluationRunner(
        *(config.episodes, gateway.base_url, sessions), weights=weights
      ) as runner:
        yield in_process.Rollouts(config, pool, weights, gateway, runner, leased=True)

  return rollouts
