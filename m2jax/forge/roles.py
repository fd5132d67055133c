"""The roles that make trajectories: engine, gateway and agents, here in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from m2jax.agents import episodes
from m2jax.config import ModelConfig
from m2jax.forge.config import RolloutConfig
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.observe.metrics import MetricsWriter
from m2jax.pool.data_pool import DataPool
from m2jax.records import Completion, Trajectory
from m2jax.rollout.engine import Engine
from m2jax.rollout.engine_config import EngineConfig
from m2jax.rollout.scheduler import Scheduler, SchedulerConfig
from m2jax.tasks import terminal
from m2jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Rollouts:
  """The running roles that produce trajectories."""

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
  """Starts engine and gateway, which gives completions to `record`; then stops them.

  `version` is that of the variables; an update needs a higher one.
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
  """Starts engine, gateway and agents around the pool; stops them in reverse."""
  with (
    serving(
      config.model,
      config.engine,
      config.scheduler,
      GatewayConfig(),
      variables,
      tok,
      pool.add_completion,
      version,
    ) as (scheduler, gateway),
    episodes.Runner(config.episodes, gateway.base_url, gateway.sessions) as runner,
  ):
    yield Rollouts(scheduler, gateway, runner)


def held_out(
  config: RolloutConfig,
  roles: Rollouts,
  pool: DataPool,
  temperature: float,
  on_progress: Callable[[float], None] = lambda f: None,
) -> dict[str, tuple[float, int]]:
  """family → (successes, judged tasks) of the engine's weights; 'all' comes first."""
  specs = [
    terminal.spec('held_out', i, seed=0, config=config.terminal)
    for i in range(config.eval_tasks)
  ]
  done = 0

  def on_end(trajectory: Trajectory):
    nonlocal done
    done += 1
    pool.add_trajectory(trajectory)
    on_progress(done / len(specs))

  out = episodes.evaluate(roles.runner, specs, temperature=temperature, on_end=on_end)
  families = episodes.by_family(out)
  successes = sum(float(good) for good, _ in families.values())
  return {'all': (successes, sum(n for _, n in families.values())), **families}


def evaluate(
  config: RolloutConfig,
  roles: Rollouts,
  pool: DataPool,
  metrics: MetricsWriter,
  stage: str,
  step: int,
  on_progress: Callable[[float], None] = lambda f: None,
) -> float:
  """Held-out success of the engine's weights, sampled and greedy, by family.

  Returns the share of tasks solved at temperature 1.
  """
  rates = {}
  for half, temperature in enumerate((1.0, 0.0)):
    found = held_out(
      config, roles, pool, temperature, lambda f, half=half: on_progress((half + f) / 2)
    )
    for family, (successes, n) in found.items():
      metrics.write(
        'eval',
        step,
        stage=stage,
        temperature=temperature,
        family=family,
        successes=float(successes),
        n=int(n),
      )
    successes, n = found['all']
    rates[temperature] = successes / max(n, 1)
  return rates[1.0]
