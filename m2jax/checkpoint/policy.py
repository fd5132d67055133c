"""Loads a policy from a checkpoint: model config, weights and tokenizer.

Every training job saves `host(model)` in the host part of its checkpoints, and its
tokenizer with it, so that a checkpoint is sufficient to run the model.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath

from m2jax import model as model_lib
from m2jax import sharding as sharding_lib
from m2jax.checkpoint.errors import CheckpointMismatch, MissingCheckpoint
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.config import ModelConfig
from m2jax.sharding import ONE_DEVICE, Sharding
from m2jax.text import tokenizer as tokenizer_lib
from m2jax.text.tokenizer import Tokenizer

TOKENIZER_FILE = 'tokenizer.json'
# Directories of checkpoints in a workdir; the first one that exists is loaded.
PHASES = ('rl', 'more_sft', 'sft', 'pretrain')


class Policy(NamedTuple):
  """A model that is ready to generate.

  Attributes:
    model: the model's shape.
    variables: {'params', 'router'} of `model.M2`.
    tokenizer: content of its `tokenizer.json`.
    step: the checkpoint's step.
    directory: the directory of the checkpoints.
  """

  model: ModelConfig
  variables: dict[str, Any]
  tokenizer: bytes
  step: int
  directory: str

  def load_tokenizer(self) -> Tokenizer:
    """Builds the tokenizer."""
    return tokenizer_lib.loads(self.tokenizer)


def host(model: ModelConfig) -> dict[str, Any]:
  """The entries of a checkpoint's host part that `load` needs."""
  return {'model': dataclasses.asdict(model)}


def find(directory: str | os.PathLike) -> str:
  """The directory of checkpoints: `directory` itself, or that of its latest phase.

  Raises:
    MissingCheckpoint: there is none; names the path.
  """
  root = epath.Path(directory)
  for path in (root, *(root / phase for phase in PHASES)):
    if CheckpointManager(path, read_only=True).latest_step() is not None:
      return os.fspath(path)
  if not root.is_dir():
    raise MissingCheckpoint(f'no checkpoint: {root} is not a directory')
  entries = sorted(path.name for path in root.iterdir())[:10]
  raise MissingCheckpoint(
    f'no checkpoint in {root} or its {", ".join(PHASES)}: it '
    f'contains {entries or "nothing"}'
  )


def describe(
  directory: str | os.PathLike, step: int | None = None
) -> tuple[ModelConfig, int]:
  """The model of a policy and the step, None being the latest; raises as `load`."""
  path = find(directory)
  host, files, step = CheckpointManager(path, read_only=True).read_host(step)
  return _model(host, files, f'{path}/{step}'), step


def load(
  directory: str | os.PathLike,
  step: int | None = None,
  sharding: Sharding = ONE_DEVICE,
) -> Policy:
  """Reads a policy; safe while a job writes to the directory.

  Args:
    directory: a directory of checkpoints, or a workdir.
    step: None is the latest.
    sharding: the mesh to read onto; all its processes must call this.

  Raises:
    MissingCheckpoint: no such directory or step.
    CheckpointMismatch: the checkpoint contains no policy, or is of another version.
    CorruptCheckpoint: it cannot be read, or differs from what was written.
  """
  path = find(directory)
  manager = CheckpointManager(path, read_only=True)
  host, files, step = manager.read_host(step)
  model = _model(host, files, f'{path}/{step}')
  init = functools.partial(model_lib.M2(model).init, jax.random.key(0))
  shapes = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 2), jnp.int32))
  like = {name: dict(shapes[name]) for name in ('params', 'router')}
  like = sharding.shaped(like, sharding_lib.param_specs(model, sharding.rules))
  found = manager.restore(step, like={'variables': like}, partial=True)
  variables = found.state['variables']
  return Policy(model, variables, files[TOKENIZER_FILE], step, path)


def _model(host: Mapping[str, Any], files: Mapping[str, bytes], path: str):
  if 'model' not in host or TOKENIZER_FILE not in files:
    raise CheckpointMismatch(
      f'checkpoint {path} contains no policy: its host part needs "model" and '
      f'{TOKENIZER_FILE}'
    )
  try:
    return ModelConfig(**host['model'])
  except (TypeError, ValueError) as error:
    raise CheckpointMismatch(
      f'checkpoint {path}: this version cannot build the model: {error}'
    ) from error
