"""Settings of one run of the main job."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from m2jax.agents.episodes import EpisodeConfig
from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.forge.curriculum import CurriculumConfig
from m2jax.forge.remote.config import RolesConfig
from m2jax.gateway.config import GatewayConfig
from m2jax.optim import gnmr
from m2jax.optim.optimizer import OptimizerConfig
from m2jax.rl.learner import LearnerConfig
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.sharding import MeshConfig
from m2jax.tasks import TasksConfig, TeacherConfig
from m2jax.train import sft
from m2jax.train.loop import LoopConfig


@dataclasses.dataclass(frozen=True)
class SftConfig(sft.SftConfig):
  """Supervised fine-tuning on the teacher's verified successes, or on recorded chats.

  Attributes:
    demonstrations: number of tasks the teacher attempts; failures are left out. Of
      `recorded`, the maximum number of chats.
    families: families to demonstrate -> relative frequency. Empty: those of `tasks`.
    recorded: JSON lines of chats that take the teacher's place, as they are: those of
      experiments.sample, or any with `messages` and `tools`. '': the teacher's.
  """

  demonstrations: int
  families: Mapping[str, float] = dataclasses.field(default_factory=dict)
  recorded: str = ''


@dataclasses.dataclass(frozen=True)
class MoreSftConfig:
  """The control that continues SFT from its weights instead of starting RL.

  Attributes:
    loop: the budget.
    optimizer: optimizer of this phase; its state is initialised anew, as in RL.
  """

  loop: LoopConfig
  optimizer: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class RlConfig:
  """Reinforcement learning in the real environment.

  Attributes:
    steps: total number of updates.
    seconds: also stop after this much RL time, restarts included; 0 is no limit.
    groups_per_step: work items per update.
    group_size: G, trajectories per item.
    capacity, window: N and W of windowed FIFO, in items ('default' is ⌊0.3 N⌋).
    checkpoint_every: updates between checkpoints.
    keep_every_steps, max_skipped: see `train.loop.LoopConfig`.
    learner: how groups become an update.
    optimizer: optimizer of this phase.
    max_items: total number of work items: RL also stops once all are trained or failed;
      0 is no limit.
    curriculum: how task families are sampled.
    dev_every: updates between evaluations on the development split; 0 is never.
    dev_tasks: tasks per such evaluation.
    patience: stop after this many consecutive evaluations without a new best; 0 is
      never.
    refill_factor: DAPO's dynamic sampling: an update takes items until
      `groups_per_step` of them have a non-zero advantage, but at most this many times
      `groups_per_step`. 1 trains on the first `groups_per_step`.
    updates_per_batch: optimizer steps on the groups of one update, each over all of
      them, against the same recorded log-probabilities; they are one policy version,
      one ledger entry and one metrics record.
    partial_credit: maximum verdict on a partly correct end state
      (`TasksConfig.partial_credit`); evaluations give none.
    keep_items: finished work items that the data pool keeps from before the oldest
      checkpoint, with their trajectories, for reports; None: all. Their token ids are
      deleted in either case.
    item_deadline_s: seconds from an item's submission, or reissue, to the end of its
      last episode, including the wait for a free agent; after that the item fails.
    max_failed_groups: consecutive failed items that stop the run with the last reason;
      None is the capacity, which an outage fails at once, plus 32. After a failure
      items are submitted one at a time, at intervals that grow from 0.1 s to 5 s, until
      one completes.
    fail_on_mismatch: learner and engine that disagree about the same weights, in
      float32 (`rl.agreement`), end the run; else that is an error in its log.
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
  keep_items: int | None = None
  item_deadline_s: float = 600.0
  max_failed_groups: int | None = None
  keep_every_steps: int = 0
  max_skipped: int = 10
  fail_on_mismatch: bool = False

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.refill_factor >= 1, 'refill_factor', 'at least 1')
    check(self.updates_per_batch >= 1, 'updates_per_batch', 'at least 1')
    check(self.item_deadline_s > 0, 'item_deadline_s', 'positive')
    limit = self.max_failed_groups
    check(limit is None or limit >= 1, 'max_failed_groups', 'at least 1, or None')
    keep = self.keep_items
    check(keep is None or keep >= 0, 'keep_items', 'at least 0, or None')
    fits = 1 <= self.groups_per_step <= self.capacity
    check(fits, 'groups_per_step', f'between 1 and capacity={self.capacity}')


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """How a policy acts on tasks and is evaluated.

  Attributes:
    model: the policy; `vocab_size` is the tokenizer's.
    tasks: distribution of the tasks.
    engine, scheduler: the rollout engine.
    gateway: the HTTP server between agents and engine.
    episodes: agents and sandboxes.
    eval_tasks: held-out tasks per evaluation, one episode each; 0 does not touch the
      held-out split, for model selection.
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
        f'tasks.partial_credit={self.tasks.partial_credit}: must be 0, since '
        'evaluations give no partial credit; set rl.partial_credit for RL'
      )


@dataclasses.dataclass(frozen=True)
class ForgeConfig(RolloutConfig):
  """One run of the main job.

  Attributes:
    seed: seed of weights, tasks, teacher and sampling.
    teacher: who demonstrates; None with `sft.recorded` or `start`.
    sft: the first phase.
    rl: the second phase; None stops after SFT.
    more_sft: replaces `rl`, as a control.
    dev_tasks: tasks of the development split evaluated after each phase.
    mesh: devices that SFT and RL train on; a run may resume on another mesh. The engine
      uses one device.
    start: workdir of a run whose demonstrations, tokenizer and SFT weights are reused,
      so that a control starts from the weights where that run's RL did; '' makes new
      ones.
    init_from: weights that SFT starts from, with their tokenizer: a run's workdir or a
      directory in the released format, of the config's model; '' is random weights.
    roles: how the roles find each other, if they are processes of their own.
  """

  seed: int
  teacher: TeacherConfig | None
  sft: SftConfig
  rl: RlConfig | None
  more_sft: MoreSftConfig | None = None
  dev_tasks: int = 0
  mesh: MeshConfig = MeshConfig()
  start: str = ''
  init_from: str = ''
  roles: RolesConfig = RolesConfig()

  def __post_init__(self):
    super().__post_init__()
    if self.start and self.init_from:
      raise ValueError('ForgeConfig: start and init_from are both set; set one')
    if self.rl is not None and self.more_sft is not None:
      raise ValueError('ForgeConfig: rl and more_sft are both set; set one to None')
    if not (self.teacher or self.sft.recorded or self.start):
      raise ValueError(
        f'no teacher for tasks of the kind {self.tasks.kind!r}: set teacher, or '
        'sft.recorded to a file of chats (docs/pipelines_reasoning.md)'
      )
    for phase in (self.sft, self.rl, self.more_sft):
      if phase is not None:
        gnmr.check(phase.optimizer.gnmr, self.model)

  def anywhere(self) -> ForgeConfig:
    """The settings that belong to the run: not its devices and processes."""
    return dataclasses.replace(self, mesh=MeshConfig(), roles=RolesConfig())
