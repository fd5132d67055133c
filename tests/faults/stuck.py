"""An agent that does nothing, and whose verdict or end does not come."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

from m2jax.agents.agent import Agent, AgentConfig, Outcome

BEGAN = threading.Event()  # an agent runs


@dataclasses.dataclass(frozen=True)
class Config(AgentConfig):
  """`stuck_s`: how long `where`, which is 'verdict', 'loop' or 'cancellation'."""

  kind: str = 'tests.faults.stuck'
  where: str = ''
  stuck_s: float = 3.0


class Stuck(Agent):
  def __init__(self, config: Config):
    self._config = config

  async def prepare(self, task, environment, endpoint):
    return task

  async def run(self, episode):
    BEGAN.set()
    if self._config.where == 'loop':
      time.sleep(self._config.stuck_s)
    if self._config.where == 'cancellation':
      ends_s = time.monotonic() + self._config.stuck_s
      while (left_s := ends_s - time.monotonic()) > 0:
        try:
          await asyncio.sleep(left_s)
        except asyncio.CancelledError:
          continue

  async def finish(self, episode):
    return Outcome(end_reason='answer', answer='7')

  async def reward(self, task, environment, outcome):
    if self._config.where == 'verdict' and task.spec.endswith('/0'):
      await asyncio.sleep(self._config.stuck_s)
    return 1.0


make = Stuck
