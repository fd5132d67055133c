"""Shared by the jobs that run a checkpoint's policy: its weights and the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments import common
from m2jax.checkpoint import initial, policy
from m2jax.checkpoint.huggingface import config as released
from m2jax.forge.processes import lead_engine, lead_weights
from m2jax.forge.processes.commands import Commands
from m2jax.rollout.engine import placement
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.sharding import Sharding


def load(
  directory: str | os.PathLike,
  step: int | None,
  sharding: Sharding,
  weights_dtype: str | None = None,
) -> policy.Policy:
  """Reads a policy, each device only its part; every process calls it.

  Args:
    directory: a workdir or of checkpoints, or one in the released format.
    step: None is the latest; the released format has none.
    sharding: the mesh.
    weights_dtype: the engine's. 'block_fp8' reads a release's blocks as they are.

  Raises:
    ValueError: the model does not divide over the mesh; names the field.
    CheckpointError: see `policy.load`, `huggingface.load`.
  """
  if initial.is_released(directory):
    model = released.read(directory).cfg
    return initial.load_released(
      directory, placement.serving(model, sharding), weights_dtype
    )
  with common.leader_first():
    model, step = policy.describe(directory, step)
  if jax.process_count() > 1:  # a job may be writing: the step that process 0 has found
    step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
  return policy.load(directory, step, placement.serving(model, sharding))


@contextlib.contextmanager
def engine(
  found: policy.Policy, config: EngineConfig, sharding: Sharding
) -> Iterator[Any]:
  """The engine of process 0, for one scheduler, until the body ends.

  On a CPU its layers are unrolled, however the policy was trained or published: XLA
  copies the weights of a loop's layers in every call.

  In each of the other processes the body gets None, after process 0's has ended.

  Raises:
    Stopped: process 0 stopped before its end.
  """
  model = found.model
  if jax.default_backend() == 'cpu':
    model = dataclasses.replace(model, unroll_layers=True)
  made, commands = Engine(model, config, sharding), Commands()
  if not commands.several:
    yield made
    return
  if jax.process_index():
    with commands.following():
      lead_engine.follow(made, lambda number: found.variables, commands)
    yield None
    return
  numbers = lead_weights.Numbers()
  numbers.assign(numbers.new(), found.variables)
  leading = lead_engine.LeadEngine(made, commands, numbers)
  try:
    with commands.leading():
      yield leading
  except Exception as error:
    if leading.lost:
      common.fail(error, at_once=True)
    raise
