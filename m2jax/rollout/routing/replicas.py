"""A router over engines of this process, each with a scheduler of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.routing.config import RouterConfig
from m2jax.rollout.routing.router import Router
from m2jax.rollout.serving.scheduler import Scheduler, SchedulerConfig


def start(
  engines: Sequence[Engine],
  variables: Any,
  version: int = 0,
  scheduler: SchedulerConfig | None = None,
  config: RouterConfig | None = None,
  *,
  warmup: bool = True,
) -> Router:
  """Serves on all engines; a scheduler that gives up is replaced by a new one.

  Args:
    engines: of the same model and sizes, each on devices of its own, or several times
      the same: then they share its compiled programs, and its device's time.
    variables: the weights of `version`, which the router keeps for new schedulers. The
      caller must not donate them.
    warmup: compiles all shapes before anything is served.
  """

  def make(number: int, variables: Any, version: int) -> Scheduler:
    serving = Scheduler(engines[number], variables, version, scheduler)
    return serving.start(warmup=warmup)

  replicas = [make(number, variables, version) for number in range(len(engines))]
  router = Router(replicas, version, config, make=make, variables=variables)
  return router.start()
