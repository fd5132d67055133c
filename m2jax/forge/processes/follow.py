"""What the other processes of the main job do: the commands of process 0.

Process 0 has the pool, the gateway, the agents, the rollout engine, the metrics and the
budget. The others train with it on the mesh: SFT, and then every update of RL, each
from its own rows of the step's files (`step_files`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import logging

from m2jax import sharding as sharding_lib
from m2jax.forge import prepare, shared
from m2jax.forge.config import ForgeConfig
from m2jax.forge.processes.commands import Commands
from m2jax.forge.processes.step_files import DIRECTORY, StepFiles
from m2jax.frames import Frame
from m2jax.observe import metrics as metrics_lib
from m2jax.rl.learner import Learner, Packed
from m2jax.sharding import Sharding
from m2jax.train import stopping
from m2jax.train.workdir import open_workdir


def run(
  config: ForgeConfig,
  workdir: Path,
  sharding: Sharding,
  served: Callable[[Any], Any] = sharding_lib.local_copy,
) -> None:
  """Follows process 0 until it stops.

  `served`: makes what engines get of the weights on the mesh (`forge.run`).

  Raises:
    Stopped: it stopped before its end; gives the reason.
    OtherRun: this process was started with other settings.
  """
  commands = Commands()
  with commands.following():
    commands.receive()  # process 0 has opened the workdir
    open_workdir(config.anywhere(), workdir, leads=False)
    records = workdir / f'process{jax.process_index()}'
    with metrics_lib.MetricsWriter(records) as metrics:
      _phases(config, workdir, sharding, served, commands, metrics)


def _phases(config, workdir, sharding, served, commands, metrics) -> None:
  variables = prepare.start(config, workdir, sharding)
  served(variables)
  publishes = Publishes(config, workdir)
  while True:
    command = commands.receive()
    logging.info('process 0: %s', command)
    match command.kind:
      case 'open' | 'publish':
        publishes.follow(command, served(variables))
      case 'sft':
        groups, _, files = prepare.material(config, workdir)
        variables = prepare.sft(
          *(config, groups, variables, workdir, metrics, files),
          phase=command.fields['phase'],
          sharding=sharding,
        ).variables
        served(variables)
      case 'rl':
        learner = prepare.learner(config, variables, sharding, served)
        del variables  # the learner has taken them over
        follow_rl(learner, config, workdir, commands, publishes)
        return
      case 'stop':
        return


class Publishes:
  """Publishes weights with process 0, if it does (`forge.roles.learner`)."""

  def __init__(self, config: ForgeConfig, workdir: Path):
    self._open = functools.partial(shared.publisher, config, workdir)
    self._publisher = None

  def follow(self, command: Frame, variables: Any) -> None:
    if command.kind == 'open':
      self._publisher = self._open()
    else:
      fields = command.fields
      self._publisher.publish(variables, fields['step'], fields['lineage'])


@stopping.deferred()
def follow_rl(
  learner: Learner,
  config: ForgeConfig,
  workdir: Path,
  commands: Commands,
  publishes: Publishes | None = None,
) -> None:
  """Trains, saves and publishes with process 0, until it stops.

  SIGTERM here stops process 0 at its next step boundary.
  """
  files, buckets = StepFiles(workdir / DIRECTORY), config.rl.learner.buckets
  with prepare.checkpoints(config, workdir) as manager:
    while True:
      command = commands.receive()
      fields = command.fields
      match command.kind:
        case 'restore':
          learner.state = manager.restore(fields['step'], learner.state).state
        case 'train':
          batch = files.read(fields['step'], learner.hosts.index, buckets)
          learner.train(Packed(batch), fields['passes'])
        case 'variables':
          variables = learner.variables()
        case 'publish':
          publishes.follow(command, variables)
          del variables  # an update donates them
        case 'save':
          manager.save(fields['step'], learner.state)
        case 'stop':
          return
