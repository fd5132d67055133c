"""The roles that make trajectories: engine, gateway and agents, here in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from m2jax.agents import episodes
from m2jax.forge.config import ForgeConfig
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.observe.metrics import MetricsWriter
from m2jax.rl.data_pool import DataPool
from m2jax.rl.records import Trajectory
from m2jax.rollout.engine import Engine
from m2jax.rollout.scheduler import Scheduler
from m2jax.tasks import terminal
from m2jax.text.tokenizer import Tokenizer



@dataclasses.dataclass(frozen=True)
class Rollouts:
  """The running roles that produce trajectories."""

  scheduler: Scheduler
  gateway: Gateway
  runner: episodes.Runner


@contextlib.contextmanager
def rollouts(
  config: ForgeConfig,
  variables,
  tok: Tokenizer,
  pool: DataPool,
) -> Iterator[Rollouts]:
  """Starts engine, gateway and agents around the pool; stops them in reverse."""
  engine = Engine(config.model, config.engine)
  with contextlib.ExitStack() as stack:
    scheduler = Scheduler(engine, variables, config=config.scheduler)
    stack.callback(scheduler.stop)
    scheduler.start()
    gateway = Gateway(GatewayConfig(), tok, scheduler, pool.add_completion)
    stack.enter_context(gateway)
    runner = episodes.Runner(config.episodes, gateway.base_url, gateway.sessions)
    stack.enter_context(runner)
    yield Rollouts(scheduler, gateway, runner)


def evaluate(
  config: ForgeConfig,
  roles: Rollouts,
  pool: DataPool,
  metrics: MetricsWriter,
  stage: str,
  step: int,
  on_progress: Callable[[float], None] = lambda f: None,
) -> float:
  """Held-out success of the engine's weights, sampled and greedy, by family.

  Returns the share of tasks solved at temperature 1. Skipped when the records are there.
  """
  specs = [
    terminal.spec('held_out', i, seed=0, config=config.terminal)
    for i in range(config.eval_tasks)
  ]
  done = 0

  def on_end(trajectory: Trajectory):
    nonlocal done
    done += 1
    pool.add_trajectory(trajectory)
    on_progress(done / (2 * len(specs)))

  success = 0.0
  for temperature in (1.0, 0.0):
    out = episodes.evaluate(roles.runner, specs, temperature=temperature, on_end=on_end)
    families = episodes.by_family(out)
    total = tuple(np.sum(list(families.values()), axis=0)) if families else (0.0, 0)
    for family, (successes, n) in {'all': total, **families}.items():
      metrics.write(
        'eval',
        step,
        stage=stage,
        temperature=temperature,
        family=family,
        successes=float(successes),
        n=int(n),
      )
    if temperature:
      success = float(total[0]) / max(float(total[1]), 1.0)
  return success
