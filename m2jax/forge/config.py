"""Settings of one run of the main job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from m2jax.agents.episodes import EpisodeConfig
from m2jax.config import ModelConfig
from m2jax.forge.curriculum import CurriculumConfig
from m2jax.optim.optimizer import OptimizerConfig
from m2jax.rl.learner import LearnerConfig
from m2jax.rollout.engine_config import EngineConfig
from m2jax.rollout.scheduler import SchedulerConfig
from m2jax.tasks.terminal import TerminalConfig
from m2jax.tasks.terminal.teacher import TeacherConfig
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
    items: work items in all: RL also stops once they are trained or failed; 0 is no
      limit.
    curriculum: which families the tasks are of.
    dev_every: updates between evaluations on the development split; 0 is never.
    dev_tasks: tasks of such an evaluation.
    patience: stop once so many of these evaluations in a row were no better than the
      best before; 0 is never.
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
  items: int = 0
  curriculum: CurriculumConfig = CurriculumConfig()
  dev_every: int = 0
  dev_tasks: int = 96
  patience: int = 0


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """How a policy acts on tasks, and is evaluated.

  Attributes:
    model: the policy; `vocab_size` is the tokenizer's.
    terminal: the tasks.
    engine, scheduler: the rollout engine.
    episodes: agents and sandboxes.
    eval_tasks: held-out tasks per evaluation, one episode each; 0 leaves the held-out
      split unread, as while something is chosen.
  """

  model: ModelConfig
  terminal: TerminalConfig
  engine: EngineConfig
  scheduler: SchedulerConfig
  episodes: EpisodeConfig
  eval_tasks: int


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
    start: workdir of a run whose demonstrations, tokenizer and SFT weights are taken
      over, so that a control starts where that run's RL did; '' makes them.
  """

  seed: int
  teacher: TeacherConfig
  sft: SftConfig
  rl: RlConfig | None
  more_sft: MoreSftConfig | None = None
  dev_tasks: int = 0
  start: str = ''

  def __post_init__(self):
    if self.rl is not None and self.more_sft is not None:
      raise ValueError('ForgeConfig: rl and more_sft are both set: choose one')
