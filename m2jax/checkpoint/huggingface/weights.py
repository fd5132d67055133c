"""Weights between a directory in the released format and the model's variables."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from m2jax import params as params_lib
from m2jax import sharding as sharding_lib
from m2jax.checkpoint import leaves as leaves_lib
from m2jax.checkpoint.errors import CheckpointExists, CheckpointMismatch
from m2jax.checkpoint.huggingface import config as config_lib
from m2jax.checkpoint.huggingface import files as files_lib
from m2jax.checkpoint.huggingface import names as names_lib
from m2jax.checkpoint.huggingface import safetensors_io, streaming, texts
from m2jax.checkpoint.huggingface.names import Tensor
from m2jax.config import ModelConfig

MAX_SHARD_BYTES = 5 * 10**9


def load(
  directory: str | os.PathLike,
  *,
  mesh: jax.sharding.Mesh | None = None,
  rules: sharding_lib.Rules | None = None,
  dtype: Any = None,
) -> tuple[ModelConfig, dict[str, Any]]:
  """Reads a model straight onto its devices.

  Args:
    directory: local, with config.json and *.safetensors.
    mesh: None is one device.
    rules: how they are split over the mesh; None puts all on each device.
    dtype: of the parameters ('float32', 'bfloat16'); None is what config.json declares.
      Router biases are at least fp32 whatever it is.

  Returns:
    The model's config, with `param_dtype` as loaded, and {'params', 'router'} of
    `model.M2`. MTP modules that the config promises and the files lack are left out.

  Raises:
    MissingCheckpoint: no such directory or file; names it.
    CheckpointMismatch: config.json describes another kind of model, or tensors are
      missing, superfluous or of the wrong shape; names them.
    CorruptCheckpoint: a file is truncated or is no safetensors file; names file and
      tensor.
    ValueError: the mesh cannot split an array by these rules; names it.
  """
  cfg, block = config_lib.read(directory)
  if dtype is not None:
    cfg = dataclasses.replace(cfg, param_dtype=jnp.dtype(dtype).name)
  with contextlib.ExitStack() as stack:
    shards = files_lib.Shards(directory, stack)
    if cfg.num_mtp_modules and not shards.any_mtp():
      logging.info(
        '%s: its config promises %d MTP modules, its files have none: loaded without',
        directory,
        cfg.num_mtp_modules,
      )
      cfg = dataclasses.replace(cfg, num_mtp_modules=0)
    wanted = names_lib.tensors(cfg)
    shards.check(wanted, block)
    shardings = _shardings(cfg, names_lib.shapes(cfg), mesh, rules)
    fillers = {
      leaf: streaming.Filler(like.shape, like.dtype, shardings[leaf])
      for leaf, like in leaves_lib.table(params_lib.shapes(cfg)).items()
    }
    for tensor in sorted(wanted, key=lambda t: shards.position(t.name)):
      _fill(fillers[tensor.leaf], tensor, shards, block)
    variables = leaves_lib.nest({leaf: f.array() for leaf, f in fillers.items()})
  return cfg, variables


def save(
  directory: str | os.PathLike,
  cfg: ModelConfig,
  variables: Mapping[str, Any],
  *,
  tokenizer: bytes | None = None,
  dtype: Any = None,
  max_shard_bytes: int = MAX_SHARD_BYTES,
):
  """Writes a directory that `load` and transformers' MiniMaxM2ForCausalLM read.

  It appears as a whole or not at all. With several processes all must call this, on
  one shared file system.

  Args:
    directory: local; must not exist, or be empty.
    cfg: the model.
    variables: {'params', 'router'}; jax arrays on any mesh, or numpy arrays.
    tokenizer: content of the tokenizer.json that goes with the weights.
    dtype: of the written parameters; None is the arrays' own. Router biases always
      keep theirs.
    max_shard_bytes: most data in a file, unless one tensor has more.

  Raises:
    CheckpointExists: there is something in `directory`.
    CheckpointMismatch: the arrays are not those of a model of this config.
    ValueError: the config has sliding windows or softmax routers.
  """
  directory = os.path.abspath(directory)
  if os.path.isdir(directory) and os.listdir(directory) or os.path.isfile(directory):
    raise CheckpointExists(f'{directory} exists: give a new directory')
  table = _checked(cfg, variables)

  def stored(tensor: Tensor) -> np.dtype:
    kept = dtype is None or tensor.leaf.startswith('router/')
    return jnp.dtype(table[tensor.leaf].dtype if kept else dtype)

  tensors = {tensor.name: tensor for tensor in names_lib.tensors(cfg)}
  specs = {
    name: (safetensors_io.code_of(stored(tensor)), tensor.shape)
    for name, tensor in tensors.items()
  }
  beside = texts.files(cfg, str(stored(tensors['lm_head.weight'])), tokenizer)

  def pieces(name: str) -> Iterator[np.ndarray]:
    tensor, kind = tensors[name], stored(tensors[name])
    row_bytes = int(np.prod(tensor.shape[1:], dtype=np.int64)) * kind.itemsize
    for start, stop in streaming.row_ranges(0, tensor.shape[0], row_bytes):
      yield streaming.rows(
        table[tensor.leaf],
        tensor.index,
        start,
        stop,
        transposed=tensor.transposed,
        dtype=kind,
      )

  files = _plan(specs, max_shard_bytes)
  with _appearing(directory) as folder:
    for number, (file, part) in enumerate(files.items()):
      if number % jax.process_count() == jax.process_index():
        safetensors_io.write(os.path.join(folder, file), part, pieces)
      else:
        for name in part:  # reading is collective
          for _ in pieces(name):
            pass
    if len(files) > 1:
      beside[files_lib.INDEX] = texts.as_json(
        {
          'metadata': {
            'total_size': sum(safetensors_io.nbytes(*spec) for spec in specs.values())
          },
          'weight_map': {name: file for file, part in files.items() for name in part},
        }
      )
    if jax.process_index() == 0:
      for name, text in beside.items():
        _write(os.path.join(folder, name), text)


def _fill(
  filler: streaming.Filler,
  tensor: Tensor,
  shards: files_lib.Shards,
  block: tuple[int, int],
):
  """Reads what this process's devices hold of a tensor into its place."""
  row_bytes = shards.row_bytes(tensor.name)
  wanted = filler.wanted(tensor.index, tensor.transposed)
  for (first, last), parts in wanted.items():
    for start, stop in streaming.row_ranges(first, last, row_bytes):
      piece = shards.rows(tensor.name, start, stop, block)
      filler.put(piece, tensor.index, start, tensor.transposed, parts)


def _shardings(
  cfg: ModelConfig,
  shapes: Mapping[str, tuple[int, ...]],
  mesh: jax.sharding.Mesh | None,
  rules: sharding_lib.Rules | None,
) -> dict[str, jax.sharding.Sharding]:
  """Where every leaf goes."""
  if mesh is None:
    if rules is not None:
      raise ValueError('rules without a mesh: give both, or neither for one device')
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return dict.fromkeys(shapes, device)
  specs = leaves_lib.table(sharding_lib.param_specs(cfg, rules or sharding_lib.Rules()))
  found = {}
  for leaf, shape in shapes.items():
    found[leaf] = jax.sharding.NamedSharding(mesh, specs[leaf])
    try:
      found[leaf].shard_shape(shape)
    except ValueError as error:
      raise ValueError(f'{leaf} cannot be split by these rules: {error}') from error
  return found


def _checked(cfg: ModelConfig, variables: Mapping[str, Any]) -> dict[str, Any]:
  """The variables by path; raises CheckpointMismatch unless they are the model's."""
  given = {name: variables.get(name, {}) for name in ('params', 'router')}
  table = leaves_lib.table(given)
  want = names_lib.shapes(cfg)
  lines = [
    f'{name}: {leaves_lib.spec(leaf)} is no part of the model'
    for name, leaf in table.items()
    if name not in want
  ]
  for name, shape in want.items():
    if name not in table:
      lines.append(f'{name}: missing, should be {list(shape)}')
    elif tuple(table[name].shape) != shape:
      lines.append(f'{name}: {leaves_lib.spec(table[name])}, should be {list(shape)}')
  if lines:
    raise CheckpointMismatch(
      f'the variables do not fit the config:\n{leaves_lib.listing(lines)}'
    )
  return table


def _plan(
  specs: Mapping[str, tuple[str, tuple[int, ...]]], max_shard_bytes: int
) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
  """Tensors of each file, in order, by the files' names."""
  parts, room = [{}], max_shard_bytes
  for name, spec in specs.items():
    size = safetensors_io.nbytes(*spec)
    if size > room and parts[-1]:
      parts.append({})
      room = max_shard_bytes
    parts[-1][name] = spec
    room -= size
  if len(parts) == 1:
    return {files_lib.SINGLE: parts[0]}
  count = len(parts)
  return {f'model-{i:05}-of-{count:05}.safetensors': p for i, p in enumerate(parts, 1)}


@contextlib.contextmanager
def _appearing(directory: str) -> Iterator[str]:
  """A new directory that takes its name when the block has ended without an error.

  What a killed process left of one is deleted by the next.
  """
  parent, name = os.path.split(directory)
  folder = os.path.join(parent, f'.{name}.incomplete')
  first = jax.process_index() == 0
  if first:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
  _meet('huggingface: begun')
  try:
    yield folder
    _meet('huggingface: written')
    if first:
      _sync(folder)
      os.rename(folder, directory)
      _sync(parent)
  except BaseException:
    shutil.rmtree(folder, ignore_errors=True)
    raise
  _meet('huggingface: done')


def _meet(what: str):
  """Waits until all processes are here."""
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(what)


def _write(path: str, data: bytes):
  with open(path, 'xb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _sync(directory: str):
  """Makes the names in a directory durable."""
  fd = os.open(directory, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)
