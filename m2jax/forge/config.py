"""Settings of one run of the main job."""

from __future__ import annotations

import dataclasses

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


@dataclasses.dataclass(frozen=True)
class SftConfig(sft.SftConfig):
  """Supervised fine-tuning on demonstrations.

  Attributes:
    demonstrations: how many the teacher gives.
  """

  demonstrations: int


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


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
  """How a policy acts on tasks, and is evaluated.

  Attributes:
    model: the policy; `vocab_size` is the tokenizer's.
    terminal: the tasks.
    engine, scheduler: the rollout engine.
    episodes: agents and sandboxes.
    eval_tasks: held-out tasks per evaluation, one episode each.
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
    sft, rl: the two phases; rl=None stops after SFT.
  """

  seed: int
  teacher: TeacherConfig
  sft: SftConfig
  rl: RlConfig | None
