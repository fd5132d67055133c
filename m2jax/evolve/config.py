"""Settings of the job `evolve`: a policy, its tasks by split, a proposer, the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from m2jax import tasks
from m2jax.agents.episodes import EpisodeConfig
from m2jax.agents.whitebox import WhiteboxConfig
from m2jax.checks import require
from m2jax.evolve.lineage import LoopConfig
from m2jax.evolve.loop import Splits
from m2jax.evolve.proposers import ProposerConfig
from m2jax.gateway.config import GatewayConfig
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.serving.config import SchedulerConfig


@dataclasses.dataclass(frozen=True)
class SplitConfig:
  """Tasks of one split: the first `count` of a stream; those that repeat count once.

  Attributes:
    split: 'train', 'dev' or 'held_out' of the tasks; they have no task in common.
    count: number of tasks.
    seed: seed of the stream.
  """

  split: str
  count: int
  seed: int = 0

  def __post_init__(self):
    require(self, self.count >= 1, 'count', 'at least 1')

  def specs(self, config: tasks.TasksConfig) -> list[str]:
    """Specs of the tasks, each once."""
    found = (
      tasks.spec(config, self.split, i, seed=self.seed) for i in range(self.count)
    )
    return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class EvolveConfig:
  """The job.

  Attributes:
    checkpoint: the policy: a workdir, or a directory of checkpoints or in the released
      format.
    step: step of the checkpoint; -1: the latest.
    scaffold: folder of the start; '': the agent of `episodes`.
    others: name → folder of a scaffold that the third split compares too.
    tasks: distribution of the tasks.
    development, second, sealed: the three splits.
    engine, scheduler, gateway: how the policy is served.
    episodes: agents and sandboxes; the agent is the base of every scaffold.
    proposer: what proposes.
    loop: what decides.
  """

  checkpoint: str
  tasks: tasks.TasksConfig
  development: SplitConfig
  second: SplitConfig
  sealed: SplitConfig
  engine: EngineConfig
  scheduler: SchedulerConfig
  gateway: GatewayConfig
  episodes: EpisodeConfig
  proposer: ProposerConfig
  step: int = -1
  scaffold: str = ''
  others: Mapping[str, str] = dataclasses.field(default_factory=dict)
  loop: LoopConfig = LoopConfig()

  def __post_init__(self):
    require(self, bool(self.checkpoint), 'checkpoint', 'a workdir or a directory')
    agent = self.episodes.agent
    if not isinstance(agent, WhiteboxConfig):
      raise ValueError(f'episodes.agent.kind={agent.kind!r}: must be whitebox')
    if self.tasks.partial_credit:
      raise ValueError('tasks.partial_credit: must be 0, as in evaluations')

  def splits(self) -> Splits:
    """The specs of each split. Raises ValueError if two have a task in common."""
    parts = self.development, self.second, self.sealed
    return Splits(*(part.specs(self.tasks) for part in parts))


def tools(specs: list[str]) -> list[dict[str, str]]:
  """Name and description of the tools of some tasks, for the proposer."""
  found = {}
  for spec in specs:
    for tool in tasks.make(spec).tools:
      function = tool['function']
      found.setdefault(function['name'], function.get('description') or '')
  return [{'name': name, 'description': text} for name, text in found.items()]
