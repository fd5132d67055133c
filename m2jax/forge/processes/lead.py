"""The learner and the checkpoints of process 0, where several processes train.

Each call that needs all processes is commanded to the others (`follow`) before process
0 makes it. `forge.rl_loop` uses these as it uses the plain ones.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from m2jax.checkpoint.manager import CheckpointManager, Restored
from m2jax.forge.processes.commands import Commands
from m2jax.forge.processes.step_files import DIRECTORY, StepFiles
from m2jax.rl import rewards
from m2jax.rl.learner import Learner


def kinds(
  commands: Commands, workdir: pathlib.Path
) -> tuple[Callable[..., Learner], Callable[..., CheckpointManager]]:
  """What makes process 0's learner and manager: the plain ones, with one process."""
  if not commands.several:
    return Learner, CheckpointManager
  files = StepFiles(workdir / DIRECTORY)
  files.prune(None)  # what a process that was killed has left
  return (
    functools.partial(LeadLearner, commands, files),
    functools.partial(LeadManager, commands, files),
  )


class LeadLearner(Learner):
  """A learner whose weights the other processes read, and train, with it."""

  def __init__(self, commands: Commands, files: StepFiles, *args: Any):
    """`args`: of Learner."""
    super().__init__(*args)
    self._commands, self._files = commands, files

  def variables(self) -> Any:
    """The weights, which the other processes put together with this one."""
    self._commands.send('variables')
    return super().variables()

  def update(
    self, credits_: Sequence[rewards.GroupCredit], passes: int = 1
  ) -> dict[str, float]:
    """Packs, writes the step's files, and trains it with the other processes."""
    packed, step = self.pack(credits_), self.version + 1
    parts = self.parts(packed)
    items = [credit.credits[0].trajectory.item for credit in credits_]
    self._files.write(step, items, [part.batch for part in parts])
    self._commands.send('train', step=step, passes=passes)
    scalars = self.train(parts[self.hosts.index], passes)
    if not packed.batch.empty:
      self._commands.forget()  # the update needed all processes
    return scalars


class LeadManager(CheckpointManager):
  """Checkpoints that all processes write and read; deletes the files of old steps."""

  def __init__(self, commands: Commands, files: StepFiles, *args: Any, **options: Any):
    """`args`, `options`: of CheckpointManager."""
    super().__init__(*args, **options)
    self._commands, self._files = commands, files

  def wait(self) -> None:
    """Waits until the last checkpoint is committed; its steps' files are not needed."""
    super().wait()
    self._files.prune(self.latest_step() or 0)

  def restore(self, step: int | None = None, like: Any = None) -> Restored:
    """Reads a checkpoint with the other processes, each its part."""
    step = self.latest_step() if step is None else step
    self._commands.send('restore', step=step)
    return super().restore(step, like)

  def save(
    self, step: int, state: Any, host: Mapping[str, Any], files: Mapping[str, bytes]
  ) -> None:
    """Saves with the other processes; the host's part and the files are this one's."""
    self._files.prune(self.latest_step() or 0)
    self._commands.send('save', step=step)
    super().save(step, state, host, files)
