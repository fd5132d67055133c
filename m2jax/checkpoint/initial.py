"""Weights to start a job from: a run's checkpoint, or a model in the released format.

Both are read straight onto the job's mesh: no device has more than its own part.
"""

from __future__ import annotations

import dataclasses
import os

import jax
from etils import epath

from m2jax import params
from m2jax.checkpoint import bounded, huggingface, policy
from m2jax.checkpoint.errors import CheckpointMismatch
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.config import ModelConfig
from m2jax.sharding import ONE_DEVICE, Sharding
from m2jax.text import tokenizer as tokenizer_lib
from m2jax.text.tokenizer import Tokenizer

# How a job computes is its own choice, whatever the weights were trained or stored as.
_PRECISION = ('dtype', 'param_dtype', 'matmuls', 'recovery')
_OF_THE_JOB = (*_PRECISION, 'remat', 'unroll_layers')


def load(
  directory: str | os.PathLike,
  job: ModelConfig | None = None,
  sharding: Sharding = ONE_DEVICE,
) -> policy.Policy:
  """The weights with which a job starts.

  Args:
    directory: a directory of checkpoints, a run's workdir, or a directory with
      config.json and safetensors in the released format, with its tokenizer.json.
    job: the model that is returned has its dtypes, precision, remat; None: as stored.
    sharding: the mesh to read onto; all its processes must call this.

  Raises:
    MissingCheckpoint, CheckpointMismatch, CorruptCheckpoint: as `policy.load` and
      `huggingface.load`.
  """
  if is_released(directory):
    found = load_released(directory, sharding, job and job.param_dtype)
  else:
    found = policy.load(directory, sharding=sharding)
  if job is None:
    return found
  chosen = {name: getattr(job, name) for name in _OF_THE_JOB}
  model = dataclasses.replace(found.model, **chosen)
  shapes = params.shapes(model)
  variables = {
    kind: jax.tree.map(_cast, found.variables[kind], dict(shapes[kind]))
    for kind in ('params', 'router')
  }
  return found._replace(model=model, variables=variables)


def tokenizer(directory: str | os.PathLike) -> Tokenizer:
  """The tokenizer of the weights, which are not read. Errors as `load`."""
  if is_released(directory):
    return tokenizer_lib.loads(_tokenizer(directory))
  manager = CheckpointManager(policy.find(directory), read_only=True)
  _, files, _ = manager.read_host()
  return tokenizer_lib.loads(files[policy.TOKENIZER_FILE])


def check(found: ModelConfig, wanted: ModelConfig, directory: str) -> None:
  """Raises CheckpointMismatch with the fields in which the models differ."""
  pairs = {
    f.name: (getattr(found, f.name), getattr(wanted, f.name))
    for f in dataclasses.fields(ModelConfig)
    if f.name not in _OF_THE_JOB
  }
  wrong = [f'{name}={a}, not {b}' for name, (a, b) in pairs.items() if a != b]
  if not wrong:
    return
  hint = ''
  if found.num_mtp_modules < wanted.num_mtp_modules:
    hint = '; experiments.expand_mtp adds MTP modules'
  raise CheckpointMismatch(
    f'the model of {directory} is not config.model: it has {", ".join(wrong)}{hint}'
  )


def is_released(directory: str | os.PathLike) -> bool:
  """Whether a directory has weights in the released format."""
  root = epath.Path(directory)
  return root.is_dir() and bool(list(root.glob('*.safetensors')))


def load_released(
  directory: str | os.PathLike, sharding: Sharding, dtype: str | None
) -> policy.Policy:
  """A policy of the released format, at step 0; `dtype` as in `huggingface.load`."""
  content = _tokenizer(directory)
  rules = None if sharding.mesh is None else sharding.rules
  model, variables = huggingface.load(
    directory, mesh=sharding.mesh, rules=rules, dtype=dtype
  )
  return policy.Policy(model, variables, content, 0, os.fspath(directory))


def _tokenizer(directory: str | os.PathLike) -> bytes:
  """The content of the tokenizer.json."""
  path = os.path.join(directory, huggingface.TOKENIZER)
  try:
    return bounded.read(path)
  except FileNotFoundError:
    raise CheckpointMismatch(
      f'{directory} has no {huggingface.TOKENIZER}, which the job needs'
    ) from None


def _cast(leaf, like):
  return leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype)
