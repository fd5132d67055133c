"""The roles that produce trajectories: engine, gateway and agents, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from m2jax.agents import episodes
from m2jax.forge.config import ForgeConfig, RolloutConfig
from m2jax.forge.roles import watch
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.pool.data_pool import DataPool
from m2jax.records import Completion
from m2jax.rollout.api import Serving
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Rollouts:
  """The running roles that produce trajectories.

  Attributes:
    config: the settings they were started with.
    pool: records trajectories and completions.
    leased: whether work items are run by agents in other processes, under leases.
  """

  config: RolloutConfig
  pool: DataPool
  scheduler: Serving
  gateway: Gateway
  runner: episodes.Runner
  leased: bool = False


@contextlib.contextmanager
def serving(
  engine: Any,
  scheduler: SchedulerConfig,
  gateway: GatewayConfig,
  variables,
  tok: Tokenizer,
  record: Callable[[Completion], None],
  version: int = 0,
  before_start: Callable[[Gateway], None] = lambda server: None,
) -> Iterator[tuple[Serving, Gateway]]:
  """Runs the engine and the gateway while the context is open.

  Args:
    engine: an Engine, or a LeadEngine.
    scheduler: settings.
    gateway: settings.
    variables: the weights.
    tok: the tokenizer.
    record: is passed each completion.
    version: policy version of the weights; an update needs a higher one.
    before_start: is passed the gateway before it listens.
  """
  with contextlib.ExitStack() as stack:
    engine_thread = Scheduler(engine, variables, version, scheduler)
    stack.callback(engine_thread.stop)
    engine_thread.start()
    server = Gateway(gateway, tok, engine_thread, record)
    before_start(server)
    stack.enter_context(server)
    yield engine_thread, server


@contextlib.contextmanager
def rollouts(
  config: RolloutConfig,
  variables,
  tok: Tokenizer,
  pool: DataPool,
  version: int = 0,
  engine: Any = None,
  before_start: Callable[[Gateway], None] = lambda server: None,
) -> Iterator[Rollouts]:
  """Runs engine, gateway and agents around the pool while the context is open.

  `engine` is one of the config's sizes; None is one on the first device.
  `before_start`: see `serving`.
  """
  with (
    serving(
      engine or Engine(config.model, config.engine),
      config.scheduler,
      config.gateway,
      variables,
      tok,
      pool.add_completion,
      version,
      before_start,
    ) as (scheduler, gateway),
    episodes.Runner(config.episodes, gateway.base_url, gateway.sessions) as runner,
  ):
    yield Rollouts(config, pool, scheduler, gateway, runner)


def rollouts_in(workdir: pathlib.Path) -> Callable[..., Any]:
  """`rollouts` whose gateway also serves the run's trajectory page."""

  @contextlib.contextmanager
  def rollouts_with_page(config: ForgeConfig, *arguments, **options):
    with watch.Page(workdir, config.roles.pool_url) as page:
      with rollouts(config, *arguments, before_start=page.attach, **options) as running:
        page.announce(running.gateway)
        yield running

  return rollouts_with_page
