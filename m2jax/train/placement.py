"""Where the stages of a pre-training run are trained: meshes, hosts, resharding.

A stage is trained on the job's mesh, or on one of its own over the same devices: where
it begins, the state is resharded. If a stage's mesh has another number of devices, the
job ends before that stage and resumes on those devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from absl import logging

from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.sharding import Sharding
from m2jax.train import hosts as hosts_lib
from m2jax.train import step as train_step
from m2jax.train.loop import Run
from m2jax.train.stages import PretrainConfig, Stage


class Place(NamedTuple):
  """Where a stage is trained: the mesh, and this host's part of the rows."""

  sharding: Sharding
  hosts: hosts_lib.Hosts


Places = Mapping[Stage, Place | None]


def places(config: PretrainConfig, model: ModelConfig, job: Sharding) -> Places:
  """Where each stage is trained; None for a mesh of another size than the job's.

  Args:
    config: the stages.
    model: the model to train.
    job: the mesh of the stages that have none of their own.

  Raises:
    ValueError: model or rows of a stage do not divide over its mesh (names the stage).
  """

  def place(stage: Stage) -> Place | None:
    where = job
    if stage.mesh is not None:
      mesh = stage.mesh.over(_devices(job))
      if mesh.size != _devices(job):
        return None
      where = sharding_lib.make(mesh)
    where.check(model)
    where.check_batch(config.micro_rows(stage), stage.context)
    return Place(where, hosts_lib.find(where, config.num_streams))

  found: dict[Stage, Place | None] = {}
  for number, stage in enumerate(config.stages):
    try:
      found[stage] = place(stage)
    except ValueError as error:
      raise ValueError(
        f'PretrainConfig.stages[{number}], passes of {config.micro_rows(stage)} rows: '
        f'{error}'
      ) from error
  return found


def _devices(job: Sharding) -> int:
  return 1 if job.mesh is None else job.mesh.size


def move(
  where: Sharding,
  state: train_step.TrainState,
  model: ModelConfig,
  optimizer: optax.GradientTransformation,
) -> train_step.TrainState:
  """The state on this mesh: itself, or resharded from one of the same devices."""
  if where.mesh is None or where.mesh == state.step.sharding.mesh:
    return state
  sizes = {name: size for name, size in where.mesh.shape.items() if size > 1}
  logging.info('step %d: on the mesh %s', int(state.step), sizes)
  return reshard(where, state, train_step.state_specs(model, optimizer, where.rules))


def reshard(where: Sharding, tree: Any, specs: Any) -> Any:
  """Arrays as `specs` on a mesh, from any placement on the same devices."""

  # One after the other: on CPUs the collectives of programs that run at the same time
  # wait for each other.
  def one(spec, leaf):
    return jax.block_until_ready(where.place(leaf, spec))

  return jax.tree.map(one, specs, tree)


def first(config: PretrainConfig, where: Places, run: Run, job: Sharding) -> Sharding:
  """The mesh of a run's next batch; if it has other devices, that of the last batch."""
  done = run.manager.latest_step() or 0
  numbers = config.stage_at(done), config.stage_at(max(done - 1, 0))
  found = [place for n in numbers if (place := where[config.stages[n]])]
  if not found:
    raise ValueError(misfit(config, numbers[0], job))
  return found[0].sharding


def misfit(config: PretrainConfig, number: int, job: Sharding) -> str:
  """Why the job does not train a stage, and what to do."""
  size = config.stages[number].mesh.size
  return (
    f'PretrainConfig.stages[{number}].mesh has {size} devices, the job has '
    f'{_devices(job)}: resume on {size} devices, or give the stage another mesh'
  )
