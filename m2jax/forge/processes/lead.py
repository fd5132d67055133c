"""The learner and the checkpoints of process 0, where several processes train.

Each call that needs all processes is commanded to the others (`follow`) before process
0 makes it. `forge.rl_loop` uses these as it uses the plain ones.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax.checkpoint.manager import CheckpointManager, Restored
from m2jax.forge.processes.commands import Commands
from m2jax.forge.processes.step_files import DIRECTORY, StepFiles
from m2jax.records import Lineages
from m2jax.rl import learner as learner_lib
from m2jax.rl import rewards


def lead(
  learner: learner_lib.Learner,
  manager: CheckpointManager,
  commands: Commands,
  workdir: pathlib.Path,
) -> tuple[Any, Any]:
  """The learner and the manager for `forge.rl_loop`: those given, with one process."""
  if not commands.several:
    return learner, manager
  files = StepFiles(workdir / DIRECTORY)
  files.prune(None)  # what a process that was killed has left
  return LeadLearner(learner, commands, files), LeadManager(manager, commands, files)


class LeadLearner:
  """`rl.learner.Learner` for process 0; see there."""

  def __init__(
    self, learner: learner_lib.Learner, commands: Commands, files: StepFiles
  ):
    self._learner, self._commands, self._files = learner, commands, files

  @property
  def state(self) -> Any:
    return self._learner.state

  @state.setter
  def state(self, state: Any) -> None:
    self._learner.state = state

  @property
  def lineages(self) -> Lineages:
    return self._learner.lineages

  @lineages.setter
  def lineages(self, lineages: Lineages) -> None:
    self._learner.lineages = lineages

  @property
  def version(self) -> int:
    return self._learner.version

  def credit(self, group: rewards.Group) -> rewards.GroupCredit:
    return self._learner.credit(group)

  def variables(self) -> Any:
    self._commands.send('variables')
    return self._learner.variables()

  def update(
    self, credits_: Sequence[rewards.GroupCredit], passes: int = 1
  ) -> dict[str, float]:
    """Packs, writes the step's files, and trains it with the other processes."""
    packed, step = self._learner.pack(credits_), self.version + 1
    parts = self._learner.parts(packed)
    items = [credit.credits[0].trajectory.item for credit in credits_]
    self._files.write(step, items, [part.batch for part in parts])
    self._commands.send('train', step=step, passes=passes)
    scalars = self._learner.train(parts[self._learner.hosts.index], passes)
    if not packed.batch.empty:
      self._commands.forget()  # the update needed all processes
    return scalars


class LeadManager:
  """`checkpoint.manager.CheckpointManager` for process 0; see there."""

  def __init__(self, manager: CheckpointManager, commands: Commands, files: StepFiles):
    self._manager, self._commands, self._files = manager, commands, files

  def steps(self) -> list[int]:
    return self._manager.steps()

  def latest_step(self) -> int | None:
    return self._manager.latest_step()

  def read_host(self, step: int | None = None):
    return self._manager.read_host(step)

  def wait(self) -> None:
    self._manager.wait()
    self._files.prune(self.latest_step() or 0)

  def restore(self, step: int | None = None, like: Any = None) -> Restored:
    step = self.latest_step() if step is None else step
    self._commands.send('restore', step=step)
    return self._manager.restore(step, like)

  def save(
    self, step: int, state: Any, host: Mapping[str, Any], files: Mapping[str, bytes]
  ) -> None:
    """Saves with the other processes; the host's part and the files are this one's."""
    self._files.prune(self.latest_step() or 0)
    self._commands.send('save', step=step)
    self._manager.save(step, state, host, files)
