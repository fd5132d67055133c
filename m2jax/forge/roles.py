"""The roles that produce trajectories: engine, gateway and agents, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from m2jax.agents import episodes
from m2jax.config import ModelConfig
from m2jax.forge.config import RolloutConfig
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.pool.data_pool import DataPool
from m2jax.records import Completion
from m2jax.rollout.engine import Engine
from m2jax.rollout.engine_config import EngineConfig
from m2jax.rollout.scheduler import Scheduler, SchedulerConfig
from m2jax.text.tokenizer import Tokenizer


class RolloutsFailed(RuntimeError):
  """The engine, gateway or sandbox has failed permanently; the message gives why."""


@dataclasses.dataclass(frozen=True)
class Rollouts:
  """The running roles that produce trajectories.

  Attributes:
    config: the settings they were started with.
    pool: records trajectories and completions.
  """

  config: RolloutConfig
  pool: DataPool
  scheduler: Scheduler
  gateway: Gateway
  runner: episodes.Runner


@contextlib.contextmanager
def serving(
  model: ModelConfig,
  engine: EngineConfig,
  scheduler: SchedulerConfig,
  gateway: GatewayConfig,
  variables,
  tok: Tokenizer,
  record: Callable[[Completion], None],
  version: int = 0,
) -> Iterator[tuple[Scheduler, Gateway]]:
  """Runs the engine and the gateway while the context is open.

  The gateway passes each completion to `record`. `version` is the policy version of the
  variables; an update needs a higher one.
  """
  with contextlib.ExitStack() as stack:
    engine_thread = Scheduler(Engine(model, engine), variables, version, scheduler)
    stack.callback(engine_thread.stop)
    engine_thread.start()
    server = Gateway(gateway, tok, engine_thread, record)
    stack.enter_context(server)
    yield engine_thread, server


@contextlib.contextmanager
def rollouts(
  config: RolloutConfig,
  variables,
  tok: Tokenizer,
  pool: DataPool,
  version: int = 0,
) -> Iterator[Rollouts]:
  """Runs engine, gateway and agents around the pool while the context is open."""
  with (
    serving(
      config.model,
      config.engine,
      config.scheduler,
      config.gateway,
      variables,
      tok,
      pool.add_completion,
      version,
    ) as (scheduler, gateway),
    episodes.Runner(config.episodes, gateway.base_url, gateway.sessions) as runner,
  ):
    yield Rollouts(config, pool, scheduler, gateway, runner)
