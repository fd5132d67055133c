"""Loads and saves the model's variables in the released format."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
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
from m2jax.checkpoint.huggingface import fp8, safetensors_io, streaming, texts
from m2jax.checkpoint.huggingface import names as names_lib
from m2jax.checkpoint.huggingface.names import Tensor
from m2jax.config import ModelConfig

MAX_SHARD_BYTES = 5 * 10**9

Spec = tuple[str, tuple[int, ...]]  # dtype code and shape of a tensor


def load(
  directory: str | os.PathLike,
  *,
  mesh: jax.sharding.Mesh | None = None,
  rules: sharding_lib.Rules | None = None,
  dtype: Any = None,
) -> tuple[ModelConfig, dict[str, Any]]:
  """Reads a model directly onto its devices.

  Args:
    directory: local, with config.json and *.safetensors.
    mesh: None is one device.
    rules: how parameters are sharded over the mesh; None replicates them.
    dtype: dtype of the parameters ('float32', 'bfloat16'); None is that of config.json.
      Routers and their biases are always at least fp32. 'block_fp8': the linear layers,
      stored in FP8, become `block_fp8.Blocks`, and nothing is dequantised; the rest has
      the dtype of config.json.

  Returns:
    The model's config, with `param_dtype` as loaded, and {'params', 'router'} of
    `model.M2`. MTP modules that are in the config but not in the files are omitted.

  Raises:
    MissingCheckpoint: no such directory or file; names it.
    CheckpointMismatch: config.json describes an unsupported model, or tensors are
      missing, unexpected, of the wrong shape or not in FP8; names them.
    CorruptCheckpoint: a file is truncated or not a safetensors file; names file and
      tensor.
    ValueError: the mesh cannot shard an array by these rules; names it.
  """
  cfg, block = config_lib.read(directory)
  in_blocks = dtype == fp8.DTYPE
  if dtype is not None and not in_blocks:
    cfg = dataclasses.replace(cfg, param_dtype=jnp.dtype(dtype).name)
  with contextlib.ExitStack() as stack:
    shards = files_lib.Shards(directory, stack)
    if cfg.num_mtp_modules and not shards.any_mtp():
      logging.info(
        '%s: config.json has %d MTP modules, the files have none: loaded without them',
        directory,
        cfg.num_mtp_modules,
      )
      cfg = dataclasses.replace(cfg, num_mtp_modules=0)
    wanted = names_lib.tensors(cfg)
    shards.check(wanted, block)
    shapes = leaves_lib.table(params_lib.shapes(cfg))
    if dtype is None:
      _warn_of_rounding(directory, cfg, wanted, shards, shapes)
    if in_blocks:
      _check_fp8(directory, wanted, shards, block)
      wanted = [part for tensor in wanted for part in fp8.parts(tensor)]
      shapes = fp8.part_shapes(shapes)
    shardings = _shardings(cfg, shapes, mesh, rules)
    fillers = {}
    for leaf, layer in _layers(wanted, shards):
      if leaf not in fillers:
        like, one = shapes[leaf], layer[0]
        fillers[leaf] = streaming.filler(
          like.shape, like.dtype, shardings[leaf], len(one.index), one.transposed
        )
      read = functools.partial(shards.rows, block=block)
      for tensor in layer:
        _fill(fillers[leaf], tensor, shards, shards.stored_rows if in_blocks else read)
      fillers[leaf].flush(layer[0].index)
    found = {leaf: fillers[leaf].array() for leaf in shapes}
  variables = leaves_lib.nest(found)
  return cfg, fp8.joined(variables) if in_blocks else variables


def _warn_of_rounding(directory, cfg, wanted: list[Tensor], shards, shapes):
  """Names tensors whose stored dtype is wider than that of config.json."""
  wider = [
    tensor.name
    for tensor in wanted
    if shards.item_bytes(tensor.name) > shapes[tensor.leaf].dtype.itemsize
  ]
  if wider:
    logging.warning(
      '%s: %d tensors, such as %s, are rounded to %s, the dtype of config.json; '
      "dtype='float32' keeps them",
      *(directory, len(wider), wider[0], cfg.param_dtype),
    )


def _check_fp8(directory, wanted: list[Tensor], shards: files_lib.Shards, block):
  """Raises CheckpointMismatch unless linear layers are in FP8 of the usual blocks."""
  quantized = [tensor.name for tensor in wanted if fp8.is_quantized(tensor.leaf)]
  lines = [f'{name}: not FP8' for name in quantized if not shards.is_fp8(name)]
  if block != fp8.BLOCK:
    lines.append(f'weight_block_size={block}: only {fp8.BLOCK} is computed with')
  if lines:
    raise CheckpointMismatch(
      f'checkpoint {directory}: dtype={fp8.DTYPE!r} reads weights stored so (`save` '
      f'with that dtype writes them); these are not:\n{leaves_lib.listing(lines)}'
    )


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

  The directory appears complete or not at all. With several processes all must call
  this, on a shared file system.

  Args:
    directory: local; must not exist or be empty.
    cfg: the model.
    variables: {'params', 'router'}; jax arrays on any mesh, or numpy arrays. Linear
      layers that are `block_fp8.Blocks` are written as they are.
    tokenizer: content of the tokenizer.json that goes with the weights.
    dtype: dtype of the written parameters; None is that of the arrays. Routers and
      their biases always keep theirs. 'block_fp8': linear layers in FP8 as released,
      the rest as it is.
    max_shard_bytes: maximum data per file, unless a single tensor has more.

  Raises:
    CheckpointExists: `directory` is not empty.
    CheckpointMismatch: the arrays are not those of a model of this config.
    ValueError: the config has sliding windows or softmax routers, or `dtype` is that of
      arrays and the linear layers are blocks.
  """
  directory = os.path.abspath(directory)
  if os.path.isdir(directory) and os.listdir(directory) or os.path.isfile(directory):
    raise CheckpointExists(f'{directory} exists: choose a new directory')
  source = _Source(cfg, _checked(cfg, variables), dtype)
  stored = source.stored('lm_head.weight').name
  side_files = texts.files(cfg, stored, tokenizer, source.in_blocks)
  files = _plan(source.specs(), max_shard_bytes)
  if len(files) > 1:
    side_files[files_lib.INDEX] = texts.as_json(_index(files))
  with _appearing(directory) as folder:
    for number, (file, part) in enumerate(files.items()):
      if number % jax.process_count() == jax.process_index():
        safetensors_io.write(os.path.join(folder, file), part, source.pieces)
      else:
        for name in part:  # reading is collective
          for _ in source.pieces(name):
            pass
    if jax.process_index() == 0:
      for name, text in side_files.items():
        _write(os.path.join(folder, name), text)


class _Source:
  """The tensors of a checkpoint, as they are written, from arrays on any mesh."""

  def __init__(self, cfg: ModelConfig, table: Mapping[str, Any], dtype: Any):
    """Takes the variables by path, and the dtype to write (None: the arrays')."""
    self._table = table
    self._have_blocks = _have_blocks(table)
    self.in_blocks = self._have_blocks or dtype == fp8.DTYPE
    self._dtype = None if dtype == fp8.DTYPE else dtype
    if self._have_blocks and self._dtype is not None:
      raise ValueError(
        f'dtype={dtype!r}: the linear layers are block FP8; load them with that dtype'
      )
    tensors = names_lib.tensors(cfg)
    if self.in_blocks:
      tensors = [part for tensor in tensors for part in fp8.parts(tensor)]
    self._tensors = {tensor.name: tensor for tensor in tensors}

  def stored(self, name: str) -> np.dtype:
    """The dtype that a tensor is written with."""
    leaf = self._tensors[name].leaf
    if self._to_quantize(leaf):
      return jnp.dtype(np.float32 if leaf.endswith('/scale') else jnp.float8_e4m3fn)
    router = leaf.startswith('router/') or leaf.endswith('/router')
    same = self._dtype is None or router
    return jnp.dtype(self._table[leaf].dtype if same else self._dtype)

  def _to_quantize(self, leaf: str) -> bool:
    return leaf not in self._table

  def specs(self) -> dict[str, Spec]:
    """All tensors by name, in the order of writing."""
    return {
      name: (safetensors_io.code_of(self.stored(name)), tensor.shape)
      for name, tensor in self._tensors.items()
    }

  def pieces(self, name: str) -> Iterator[np.ndarray]:
    """A tensor's rows, in order, a piece at a time. Collective over processes."""
    tensor, dtype = self._tensors[name], self.stored(name)
    if self._to_quantize(tensor.leaf):
      yield from self._quantized(tensor)
      return
    row_bytes = int(np.prod(tensor.shape[1:], dtype=np.int64)) * dtype.itemsize
    for start, stop in streaming.row_ranges(0, tensor.shape[0], row_bytes):
      yield self._rows(tensor, tensor.leaf, start, stop, dtype)

  def _rows(self, tensor: Tensor, leaf: str, start: int, stop: int, dtype):
    return streaming.rows(
      self._table[leaf],
      tensor.index,
      start,
      stop,
      transposed=tensor.transposed,
      dtype=dtype,
    )

  def _quantized(self, part: Tensor) -> Iterator[np.ndarray]:
    """Values or scales of an array: the matrix is read once for each."""
    leaf = fp8.base(part.leaf)
    matrix = self._table[leaf].shape[len(part.index) :]
    rows, columns = matrix[::-1] if part.transposed else matrix
    of_blocks = fp8.BLOCK[0] * columns * np.dtype(np.float32).itemsize
    for first, last in streaming.row_ranges(0, -(-rows // fp8.BLOCK[0]), of_blocks):
      start, stop = first * fp8.BLOCK[0], min(last * fp8.BLOCK[0], rows)
      values, scale = fp8.quantize(self._rows(part, leaf, start, stop, np.float32))
      yield scale if part.leaf.endswith('/scale') else values


def _index(files: Mapping[str, Mapping[str, Spec]]) -> dict[str, Any]:
  """Content of the index of several files."""
  specs = [spec for part in files.values() for spec in part.values()]
  return {
    'metadata': {'total_size': sum(safetensors_io.nbytes(*spec) for spec in specs)},
    'weight_map': {name: file for file, part in files.items() for name in part},
  }


def _layers(
  wanted: list[Tensor], shards: files_lib.Shards
) -> list[tuple[str, list[Tensor]]]:
  """Leaf and its tensors of a layer, in the order of the files."""
  found: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}
  for tensor in sorted(wanted, key=lambda t: shards.position(t.name)):
    found.setdefault((tensor.leaf, tensor.index[:1]), []).append(tensor)
  return [(leaf, layer) for (leaf, _), layer in found.items()]


def _fill(
  filler: streaming.Filler | streaming.RowFiller,
  tensor: Tensor,
  shards: files_lib.Shards,
  read: Callable[[str, int, int], np.ndarray],
):
  """Puts the rows that this process's devices need, as `read` gives them."""
  row_bytes = shards.row_bytes(tensor.name)
  wanted = filler.wanted(tensor.index, tensor.transposed)
  for (first, last), parts in wanted.items():
    for start, stop in streaming.row_ranges(first, last, row_bytes):
      piece = read(tensor.name, start, stop)
      filler.put(piece, tensor.index, start, tensor.transposed, parts)


def _shardings(
  cfg: ModelConfig,
  shapes: Mapping[str, jax.ShapeDtypeStruct],
  mesh: jax.sharding.Mesh | None,
  rules: sharding_lib.Rules | None,
) -> dict[str, jax.sharding.Sharding]:
  """The sharding of every leaf."""
  if mesh is None:
    if rules is not None:
      raise ValueError('rules without a mesh: pass both, or neither for one device')
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return dict.fromkeys(shapes, device)
  specs = leaves_lib.table(sharding_lib.param_specs(cfg, rules or sharding_lib.Rules()))
  found: dict[str, jax.sharding.Sharding] = {}
  for leaf, like in shapes.items():
    found[leaf] = jax.sharding.NamedSharding(mesh, specs[fp8.base(leaf)])
    try:
      found[leaf].shard_shape(like.shape)
    except ValueError as error:
      raise ValueError(f'{leaf} cannot be sharded by these rules: {error}') from error
  return found


def _checked(cfg: ModelConfig, variables: Mapping[str, Any]) -> dict[str, Any]:
  """The variables by path; CheckpointMismatch if they do not match the config."""
  given = {name: variables.get(name, {}) for name in ('params', 'router')}
  table = leaves_lib.table(given)
  want = leaves_lib.table(params_lib.shapes(cfg))
  if _have_blocks(table):
    want = fp8.part_shapes(want)
  want = {name: like.shape for name, like in want.items()}
  lines = [
    f'{name}: {leaves_lib.spec(leaf)} is not part of the model'
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
      f'the variables do not match the config:\n{leaves_lib.listing(lines)}'
    )
  return table


def _have_blocks(table: Mapping[str, Any]) -> bool:
  """Whether the linear layers are `Blocks`, in a table of leaves."""
  return 'params/layers/q/values' in table


def _plan(
  specs: Mapping[str, Spec], max_shard_bytes: int
) -> dict[str, dict[str, Spec]]:
  """File name → the tensors of the file, in order."""
  parts: list[dict[str, Spec]] = [{}]
  left = max_shard_bytes
  for name, spec in specs.items():
    size = safetensors_io.nbytes(*spec)
    if size > left and parts[-1]:
      parts.append({})
      left = max_shard_bytes
    parts[-1][name] = spec
    left -= size
  if len(parts) == 1:
    return {files_lib.SINGLE: parts[0]}
  count = len(parts)
  return {f'model-{i:05}-of-{count:05}.safetensors': p for i, p in enumerate(parts, 1)}


@contextlib.contextmanager
def _appearing(directory: str) -> Iterator[str]:
  """A new directory that is renamed to `directory` if the block raises no error.

  The next call deletes an incomplete one that a killed process has left.
  """
  parent, name = os.path.split(directory)
  folder = os.path.join(parent, f'.{name}.incomplete')
  first = jax.process_index() == 0
  if first:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
  _meet('huggingface: started')
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
  """Waits until all processes have called this."""
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
