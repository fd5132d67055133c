"""The engine's role: serves the weights that were published last.

An engine of several processes is served by its process 0, whose calls the others make
(`processes.lead_engine`); all of them read the weights
(`processes.lead_weights`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import jax
from absl import logging

from m2jax.checkpoint import CheckpointError, published
from m2jax.forge import shared
from m2jax.forge.config import ForgeConfig, port
from m2jax.forge.errors import ProcessLost, RolloutsFailed
from m2jax.forge.processes import lead_engine
from m2jax.forge.processes.commands import Commands
from m2jax.forge.processes.lead_weights import FollowReader, LeadReader
from m2jax.forge.remote.engine_server import EngineServer
from m2jax.records import policy_version
from m2jax.rollout.api import Serving
from m2jax.rollout.disaggregation import handover
from m2jax.rollout.disaggregation.decode_engine import Disaggregated
from m2jax.rollout.disaggregation.remote_prefill import RemotePrefills
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.sharding import Sharding

_POLL_S = 1.0


class Follower:
  """Gives a scheduler the versions of a directory, in a thread.

  Attributes:
    version: the one that was loaded last.
    error: why it stopped; None while it runs.
  """

  def __init__(
    self,
    reader: published.Reader,
    version: published.Version,
    scheduler: Serving,
    like,
  ):
    self.version, self.error = version, None
    self._reader, self._scheduler, self._like = reader, scheduler, like
    self._stopping = threading.Event()
    self._thread = threading.Thread(target=self._run, name='follow', daemon=True)

  def __enter__(self) -> Follower:
    self._thread.start()
    return self

  def __exit__(self, *exc):
    self._stopping.set()
    self._thread.join()

  def wait(self, timeout_s: float) -> None:
    """Waits; less long if it stops."""
    self._thread.join(timeout_s)

  def _run(self) -> None:
    try:
      while not self._stopping.is_set():
        try:
          self._step()
        except OSError as error:  # the storage may be back soon
          logging.warning('the published weights were not read: %s', error)
          self._stopping.wait(_POLL_S)
    except Exception as error:
      logging.exception('the published weights cannot be followed')
      self.error = error

  def _step(self) -> None:
    found = self._reader.wait(self.version, timeout_s=_POLL_S)
    if found is not None:
      self._take(found)
    elif (latest := self._reader.latest()) and latest.serial < self.version.serial:
      raise RolloutsFailed(
        'the published weights are those of a run that was started anew: start '
        'this role again'
      )

  def _take(self, found: published.Version) -> None:
    try:
      variables = self._reader.load(found, self._like)
    except CheckpointError as error:  # damaged, or deleted meanwhile: a newer one comes
      logging.warning('version %s was not loaded: %s', found, error)
      self._stopping.wait(_POLL_S)
      return
    self._scheduler.update_weights(variables, number(found))
    self.version = found
    logging.info('weights of lineage %d, step %d', found.lineage, found.step)


def number(version: published.Version) -> int:
  """The policy version of tokens that these weights sample."""
  return policy_version(version.lineage, version.step)


def load_first(reader: published.Reader, like) -> tuple[published.Version, object]:
  """The newest version that can be loaded, once there is one."""
  failed = None

  def found() -> bool:
    return reader.latest() not in (None, failed)

  while True:
    try:
      shared.wait_for('the learner to publish weights', found)
      if (version := reader.latest()) is not None:
        return version, reader.load(version, like)
    except CheckpointError as error:
      logging.warning('version %s was not loaded: %s', version, error)
      failed = version
    except OSError as error:  # the storage may be back soon
      logging.warning('the published weights were not read: %s', error)
      time.sleep(_POLL_S)


def make_scheduler(
  config: ForgeConfig, engine: Any, variables, version: int, key: str
) -> Serving:
  """Serves on the engine, with the prefill engine of the run if there is one."""
  address, how = config.roles.prefill_address, config.roles.handover
  if address and not engine.moves_pages:
    logging.info('several processes: the engine computes all prompts itself')
  if not address or not engine.moves_pages:
    return Scheduler(engine, variables, version, config.scheduler)
  layout = handover.layout(engine.cfg, engine.config, how.part_pages)
  prefills = RemotePrefills(address, layout, version=version, key=key.encode())
  return Disaggregated(engine, variables, prefills, version, config.scheduler, how)


def run(config: ForgeConfig, workdir: Path, sharding: Sharding) -> None:
  """Serves until it is interrupted; every process of the engine calls it.

  Raises:
    RolloutsFailed: the engine has stopped, with the reason.
    Stopped: process 0 has, which is another one.
    OSError: the port is in use.
  """
  shared.join(config, workdir)
  key = shared.read_key(config, workdir, shared.ENGINE)
  engine = Engine(config.model, config.engine, sharding)
  reader = published.Reader(workdir / shared.WEIGHTS)
  like = published.like(config.model, engine.sharding)
  calls, reads = Commands('engine'), Commands('weights')
  if jax.process_index():
    weights = FollowReader(reader, reads, like).start()
    with calls.following():
      lead_engine.follow(engine, weights.take, calls)
    return
  if calls.several:
    reader = LeadReader(workdir / shared.WEIGHTS, reads)
    engine = lead_engine.LeadEngine(engine, calls, reader.numbers)
  with (
    reads.leading(),
    calls.leading(),
    contextlib.suppress(KeyboardInterrupt),  # the others end as this one does
  ):
    _serve(config, engine, reader, like, key)


def _serve(config: ForgeConfig, engine: Any, reader: Any, like: Any, key: str) -> None:
  """Serves in process 0."""
  roles = config.roles
  version, variables = load_first(reader, like)
  server = roles.engine_server
  if not server.port:
    url = roles.engine_urls[roles.engine]
    server = dataclasses.replace(server, port=port(url))
  scheduler = make_scheduler(config, engine, variables, number(version), key)
  del variables
  try:
    scheduler.start()
    with (
      EngineServer(server, scheduler, key) as running,
      Follower(reader, version, scheduler, like) as follower,
    ):
      logging.info('the engine serves at %s', running.url)
      print(f'engine: {running.url}', flush=True)
      while scheduler.alive and follower.error is None:
        follower.wait(_POLL_S)
      if follower.error is not None:
        raise RolloutsFailed(str(follower.error)) from follower.error
      failed = ProcessLost if getattr(engine, 'lost', False) else RolloutsFailed
      raise failed(f'the rollout engine has stopped: {scheduler.stopped_reason}')
  finally:
    scheduler.stop()
