"""The gateway's role: completions by engines elsewhere, recorded in the pool."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from m2jax import records
from m2jax.forge import shared
from m2jax.forge.config import ForgeConfig, port
from m2jax.forge.remote.engine_client import RemoteScheduler
from m2jax.forge.roles import watch
from m2jax.forge.roles.outside import Leased
from m2jax.gateway.server import Gateway
from m2jax.gateway.session_api import RemoteSessions
from m2jax.pool.data_pool import DataPool
from m2jax.rollout.api import Serving
from m2jax.rollout.routing.router import Router


def recorder(pool: DataPool):
  """Records completions with the lineage and the steps of their weights."""

  def record(completion: records.Completion) -> concurrent.futures.Future:
    # Of two lineages, since the learner restarted meanwhile: an error, and the agent
    # asks again.
    lineage, steps = records.split_versions(completion.versions)
    return pool.record_completion(
      dataclasses.replace(completion, lineage=lineage, versions=steps)
    )

  return record


@contextlib.contextmanager
def engines(config: ForgeConfig, key: str) -> Iterator[Serving]:
  """The engines at `config.roles.engine_urls` as one; none has to serve yet."""
  roles = config.roles
  with contextlib.ExitStack() as stack:
    clients = [
      RemoteScheduler(
        url, config.model.vocab_size, config.engine, key, roles.engine_client
      )
      for url in roles.engine_urls
    ]
    for client in clients:
      stack.enter_context(client)
    if len(clients) == 1:
      yield clients[0]
      return
    stale = config.scheduler.reuse_stale_prefix
    settings = dataclasses.replace(roles.router, reuse_stale_prefix=stale)
    router = Router(
      clients, config=settings, follows=True, page_tokens=config.engine.page_tokens
    )
    stack.callback(router.stop)
    yield router.start()


def run(config: ForgeConfig, workdir: Path) -> None:
  """Serves until it is interrupted.

  Raises:
    OSError: the port is in use.
    PoolBroken: the database cannot be written.
  """
  roles, settings = config.roles, config.gateway
  shared.join(config, workdir)
  view, session, reward, engine_key = (
    shared.read_key(config, workdir, name) for name in shared.KEYS
  )
  tok = shared.wait_for_tokenizer(workdir)
  if not settings.port:
    settings = dataclasses.replace(settings, port=port(roles.gateway_url))
  # Longer than an episode can last.
  age_s = 2 * config.episodes.evaluation_deadline_s
  if config.rl is not None:
    age_s += 2 * config.rl.item_deadline_s
  with contextlib.ExitStack() as stack:
    pool = stack.enter_context(shared.open_pool(config, workdir))
    engine = stack.enter_context(engines(config, engine_key))
    remote = RemoteSessions(session, max_age_s=age_s)
    gateway = Gateway(settings, tok, engine, recorder(pool), remote)
    outside = Leased(pool, gateway.sessions, lease_s=roles.lease_s, max_age_s=age_s)
    gateway.take_episodes(stack.enter_context(outside), reward)
    names = [urllib.parse.urlsplit(roles.gateway_url).hostname]
    page = stack.enter_context(watch.Page(workdir, roles.pool_url, view, names))
    page.attach(gateway)
    stack.enter_context(gateway)
    page.announce(gateway)
    logging.info('the gateway serves at %s', gateway.base_url)
    print(f'gateway: {gateway.base_url}', flush=True)
    was_alive = True
    while True:
      time.sleep(roles.engine_client.poll_s)
      pool.flush()  # raises if it cannot be written any more
      if engine.alive != was_alive:
        was_alive = engine.alive
        message = 'answers' if was_alive else f'is down: {engine.stopped_reason}'
        logging.warning('the rollout engine %s', message)
