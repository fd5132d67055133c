"""The roles that make trajectories: engine, gateway and agents, here in one process."""

from __future__ import annotations

import collections
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


class RolloutsFailed(RuntimeError):
  """Engine, gateway or sandbox do not work any more; the message says why."""


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
      config.gateway,
      variables,
      tok,
      pool.add_completion,
      version,
    ) as (scheduler, gateway),
    episodes.Runner(config.episodes, gateway.base_url, gateway.sessions) as runner,
  ):
    yield Rollouts(scheduler, gateway, runner)


@dataclasses.dataclass(frozen=True)
class Tally:
  """Successes and judged tasks of one part of an evaluation.

  Attributes:
    family: or 'all'.
    calls: tool calls that suffice for the tasks; None for 'all'.
  """

  family: str
  calls: int | None
  successes: float
  n: int


def success_on(
  config: RolloutConfig,
  roles: Rollouts,
  pool: DataPool,
  split: str,
  tasks: int,
  temperature: float,
  on_progress: Callable[[float], None] = lambda f: None,
) -> list[Tally]:
  """Success of the engine's weights on a split: all, then by family and chain length.

  The tasks are the split's first; one episode each.

  Raises:
    RolloutsFailed: infrastructure ended every episode, so that nothing was measured.
  """
  specs = [
    terminal.spec(split, i, seed=0, config=config.terminal) for i in range(tasks)
  ]
  done = 0

  def on_end(trajectory: Trajectory):
    nonlocal done
    done += 1
    pool.add_trajectory(trajectory)
    on_progress(done / len(specs))

  out = episodes.evaluate(
    roles.runner,
    specs,
    temperature=temperature,
    deadline_s=config.episodes.evaluation_deadline_s,
    on_end=on_end,
  )
  cells: dict[tuple[str, int | None], list[float]] = collections.defaultdict(list)
  for t in out:
    if t.ended != 'infrastructure':  # nobody's failure, so not judged
      calls = terminal.make(t.task).baseline_calls
      for cell in (('all', None), (t.family, calls)):
        cells[cell].append(t.success)
  if out and not cells:
    raise RolloutsFailed(
      f'none of {len(out)} episodes on the split {split!r} could be judged; the last '
      f'ended by {out[-1].reason}'
    )
  order = sorted(cells, key=lambda cell: (cell[0] != 'all', cell))
  return [
    Tally(*cell, successes=sum(cells[cell]), n=len(cells[cell])) for cell in order
  ]


def evaluate(
  config: RolloutConfig,
  roles: Rollouts,
  pool: DataPool,
  metrics: MetricsWriter,
  *,
  stage: str,
  step: int,
  split: str,
  tasks: int,
  temperature: float = 1.0,
  on_progress: Callable[[float], None] = lambda f: None,
) -> float:
  """Measures and records success of the engine's weights; returns the share solved."""
  tallies = success_on(config, roles, pool, split, tasks, temperature, on_progress)
  for tally in tallies:
    calls = {} if tally.calls is None else {'calls': tally.calls}
    metrics.write(
      'eval',
      step,
      stage=stage,
      split=split,
      temperature=temperature,
      family=tally.family,
      successes=float(tally.successes),
      n=tally.n,
      **calls,
    )
  return tallies[0].successes / max(tallies[0].n, 1) if tallies else 0.0
