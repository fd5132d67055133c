"""The prefill engine's role: computes prompts for the engines of the run.

It never draws a token. An engine that takes new weights names their version, and this
process reads it from the published ones (`rollout.disaggregation.prefill_server`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import logging

from m2jax import sharding as sharding_lib
from m2jax.checkpoint import published
from m2jax.forge import shared
from m2jax.forge.config import ForgeConfig
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.roles.engine import load_first, number
from m2jax.rollout.disaggregation.prefill_engine import PrefillScheduler
from m2jax.rollout.disaggregation.prefill_server import PrefillServer
from m2jax.rollout.engine.engine import Engine

_POLL_S = 1.0


def load_number(reader: published.Reader, like: Any) -> Callable[[int], Any]:
  """A function that reads the weights of a policy version."""

  def load(wanted: int) -> Any:
    for version in reader.versions():
      if number(version) == wanted:
        return reader.load(version, like)
    raise LookupError(f'policy version {wanted} is not among the published ones')

  return load


def serve(
  config: ForgeConfig, engine: Engine, reader: published.Reader, key: str
) -> PrefillServer:
  """A started server with the newest weights.

  Raises:
    OSError: the address is in use.
    ValueError: other machines could connect, and the key is short; or the address
      cannot be read.
  """
  roles = config.roles
  like = published.like(config.model, engine.sharding)
  version, variables = load_first(reader, like)
  settings = dataclasses.replace(
    config.scheduler, decode_steps=1, gather_s=0.0, reuse_stale_prefix=False
  )
  part_pages = roles.handover.part_pages
  scheduler = PrefillScheduler(engine, variables, number(version), settings, part_pages)
  server = PrefillServer(
    scheduler, roles.prefill_address, load=load_number(reader, like), key=key.encode()
  )
  return server.start()


def newest_serial(reader: published.Reader, known: int) -> int:
  """Serial of the newest version; the known one while the storage is away.

  Raises:
    RolloutsFailed: it is below the known one, so the run was started anew.
  """
  try:
    latest = reader.latest()
  except OSError as error:  # the storage may be back soon
    logging.warning('the published weights were not read: %s', error)
    return known
  if latest is None:
    return known
  if latest.serial < known:
    raise RolloutsFailed(
      'the published weights are those of a run that was started anew: start this role '
      'again'
    )
  return latest.serial


def run(config: ForgeConfig, workdir: Path) -> None:
  """Serves until it is interrupted.

  Raises:
    RolloutsFailed: the engine has stopped, or the run was started anew.
    OSError: the address is in use.
  """
  shared.join(config, workdir)
  key = shared.read_key(config, workdir, shared.ENGINE)
  engine = Engine(
    config.model, config.engine, sharding_lib.make(config.roles.prefill_mesh)
  )
  weights = workdir / shared.WEIGHTS
  server = serve(config, engine, published.Reader(weights), key)
  newest = 0
  try:
    logging.info('the prefill engine serves at %s', server.address)
    print(f'prefill: {server.address}', flush=True)
    versions = published.Reader(weights)  # the other one is the server's
    while server.alive:
      newest = newest_serial(versions, newest)
      time.sleep(_POLL_S)
    raise RolloutsFailed(f'the prefill engine has stopped: {server.stopped_reason}')
  finally:
    server.stop()
