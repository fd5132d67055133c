"""Settings of one run of the main job."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from m2jax.agents.episodes import EpisodeConfig
from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.forge.curriculum import CurriculumConfig
from m2jax.gateway.config import GatewayConfig
from m2jax.optim.optimizer import OptimizerConfig
from m2jax.rl.learner import LearnerConfig
from m2jax.rollout.engine_config import EngineConfig
from m2jax.rollout.scheduler import SchedulerConfig
from m2jax.sharding import MeshConfig
from m2jax.tasks import TasksConfig, TeacherConfig
from m2jax.train import sft
from m2jax.train.loop import LoopConfig


@dataclasses.dataclass(frozen=True)
class SftConfig(sft.SftConfig):
  """Supervised fine-tuning on the teacher's verified successes.

  Attributes:
    demonstrations: how many the teacher tries; those that fail are left out.
    families: what is demonstrated: family -> relative frequency. Empty: the families
      of the tasks.
  """

  demonstrations: int
  families: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class MoreSftConfig:
  """The control that goes on with SFT, from its weights, where RL would begin.

  Attributes:
    loop: the budget.
    optimizer: of this phase; its state starts anew, as RL's does.
  """

  loop: LoopConfig
  optimizer: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class RlConfig:
  """Reinforcement learning in the real environment.

  Attributes:
    steps: updates in all.
    seconds: also stop after this much RL time, restarts included; 0 is no limit.
    groups_per_step: work items an update takes.
    group_size: G, trajectories of an item.
    capacity, window: N and W of windowed FIFO, in items ('default' is ⌊0.3 N⌋).
    checkpoint_every: updates between checkpoints.
    learner: how groups become an update.
    optimizer: of this phase.
    max_items: work items in all: RL also stops once they are trained or failed; 0 is no
      limit.
    curriculum: which families the tasks are of.
    dev_every: updates between evaluations on the development split; 0 is never.
    dev_tasks: tasks of such an evaluation.
    patience: stop once this many of these evaluations in a row were no better than the
      best before; 0 is never.
    refill_factor: an update takes items until `groups_per_step` of them have a non-zero
      advantage, or until it has taken this many times `groups_per_step`; 1 trains on
      what the first `groups_per_step` have (DAPO's dynamic sampling).
    updates_per_batch: optimizer steps on the groups of one update, each over all of
      them, against the same recorded log-probabilities; they are one policy version,
      one ledger entry and one metrics record.
    partial_credit: what a rollout earns at most for an end state that is right in part
      (`TasksConfig.partial_credit`); evaluations give none.
    item_deadline_s: seconds from an item's submission, or reissue, to the end of its
      last episode, the wait for a free agent included; past it the item fails.
    max_failed_groups: failed items in a row that stop the run with their reason; None
      is the capacity, which an outage fails at once, and 32 more. After a failure items
      are submitted one at a time, after 0.1 s and up to 5 s, until one completes.
  """

  steps: int
  seconds: float
  groups_per_step: int
  group_size: int
  capacity: int
  window: int | None | str
  checkpoint_every: int
  learner: LearnerConfig
  optimizer: OptimizerConfig
  max_items: int = 0
  curriculum: CurriculumConfig = CurriculumConfig()
  dev_every: int = 0
  dev_tasks: int = 96
  patience: int = 0
  refill_factor: float = 3.0
  updates_per_batch: int = 1
  partial_credit: float = 0.0
  item_deadline_s: float = 600.0
  max_failed_groups: int | None = None

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.refill_factor >= 1, 'refill_factor', 'at least 1')
    check(self.updates_per_batch >= 1, 'updates_per_batch', 'at least 1')
    check(self.item_deadline_s > 0, 'item_deadline_s', 'positive')
    limit = self.max_failed_groups
    check(limit is None or limit >= 1, 'max_failed_groups', 'at least 1, or None')
    fits = 1 <= self.groups_per_step <= self.capacity
    check(fits, 'groups_per_step', f'between 1 and capacity={self.capacity}')


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """How a policy acts on tasks, and is evaluated.

  Attributes:
    model: the policy; `vocab_size` is the tokenizer's.
    tasks: what is asked.
    engine, scheduler: the rollout engine.
    gateway: what stands between agents and engine.
    episodes: agents and sandboxes.
    eval_tasks: held-out tasks per evaluation, one episode each; 0 leaves the held-out
      split unread, as while something is chosen.
  """

  model: ModelConfig
  tasks: TasksConfig
  engine: EngineConfig
  scheduler: SchedulerConfig
  gateway: GatewayConfig
  episodes: EpisodeConfig
  eval_tasks: int

  def __post_init__(self):
    if self.tasks.partial_credit:
      raise ValueError(
        f'tasks.partial_credit={self.tasks.partial_credit}: evaluations give '
        'none; set rl.partial_credit, which RL alone uses'
      )


@dataclasses.dataclass(frozen=True)
class ForgeConfig(RolloutConfig):
  """One run of the main job.

  Attributes:
    seed: of everything drawn: weights, tasks, teacher, sampling.
    teacher: who demonstrates.
    sft: the first phase.
    rl: the second phase; None stops after SFT.
    more_sft: in its place, as a control.
    dev_tasks: tasks of the development split after each phase.
    mesh: devices that SFT trains on; a run may go on on another mesh. Engine and RL
      use one device.
    start: workdir of a run whose demonstrations, tokenizer and SFT weights are taken
      over, so that a control starts where that run's RL did; '' makes them.
  """

  seed: int
  teacher: TeacherConfig
  sft: SftConfig
  rl: RlConfig | None
  more_sft: MoreSftConfig | None = None
  dev_tasks: int = 0
  mesh: MeshConfig = MeshConfig()
  start: str = ''

  def __post_init__(self):
    super().__post_init__()
    if self.rl is not None and self.more_sft is not None:
      raise ValueError('ForgeConfig: rl and more_sft are both set: choose one')
