"""A mesh with its rules: placement of arrays, and collectives between shards.

Axes: see `m2jax.sharding`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import linear_call
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from m2jax.config import ModelConfig
from m2jax.params import BY_NAME, Kind
from m2jax.sharding.mesh import MeshConfig, make_mesh
from m2jax.sharding.rules import (
  BATCH,
  COMPUTE,
  MESH_AXES,
  PRESETS,
  STORED,
  Rules,
)

_WIDE = (Kind.ROUTER, Kind.HEAD)  # used in at least fp32, and gathered so


@dataclasses.dataclass(frozen=True)
class Sharding:
  """A mesh and its rules; without a mesh, one device.

  The collectives work on shards, inside `shard_map`. Each takes a logical axis and
  returns its argument where that axis is not split.
  """

  mesh: Mesh | AbstractMesh | None = None
  rules: Rules = Rules()

  def axes(self, *logical: str) -> tuple[str, ...]:
    """Mesh axes of more than one device that split these logical axes."""
    if self.mesh is None:
      return ()
    names = [axis for name in logical for axis in self.rules.mesh_axes(name)]
    return tuple(axis for axis in names if self.mesh.shape[axis] > 1)

  def size(self, *logical: str) -> int:
    """Shards of these logical axes."""
    return math.prod(self.mesh.shape[axis] for axis in self.axes(*logical))

  def named(self, specs: Any) -> Any:
    """A tree of PartitionSpecs as NamedShardings on the mesh."""
    return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

  def shaped(self, tree: Any, specs: Any) -> Any:
    """Shapes of `tree` with their shardings; `specs` is a tree prefix of it."""
    if self.mesh is None:
      return tree

    def subtree(place, part):
      return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), part
      )

    return jax.tree.map(subtree, self.named(specs), tree)

  def place(self, tree: Any, specs: Any) -> Any:
    """Arrays onto the mesh; every process passes the same arrays and stores its shards.

    Args:
      tree: numpy or jax arrays.
      specs: PartitionSpecs, a tree prefix of `tree`.
    """
    if self.mesh is None:
      return tree

    def one(spec, leaf):
      sharding = NamedSharding(self.mesh, spec)
      on_mesh = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
      if on_mesh or (isinstance(leaf, jax.Array) and sharding.is_fully_addressable):
        return jax.device_put(leaf, sharding)
      leaf = np.asarray(leaf)
      return jax.make_array_from_callback(leaf.shape, sharding, leaf.__getitem__)

    def subtree(spec, part):
      return jax.tree.map(functools.partial(one, spec), part)

    return jax.tree.map(subtree, specs, tree)

  def shard_map(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`f` on each device's shards; without a mesh, `f`."""
    if self.mesh is None:
      return f
    # Without the varying-axes check, which would need casts of the constants that loops
    # in kernels carry. Without it a psum's transpose is a psum, and the gradient of a
    # replicated array is its sum over the devices.
    return jax.shard_map(
      f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )

  def index(self, logical: str) -> jax.Array | int:
    """Index of this device's shard of a logical axis."""
    axes = self.axes(logical)
    return lax.axis_index(axes) if axes else 0

  def psum(self, x: Any, *logical: str) -> Any:
    """Sum over the shards of logical axes."""
    axes = self.axes(*logical)
    return lax.psum(x, axes) if axes else x

  def pmean(self, x: Any, *logical: str) -> Any:
    """Mean over the shards of logical axes."""
    axes = self.axes(*logical)
    return lax.pmean(x, axes) if axes else x

  def pmax(self, x: jax.Array, *logical: str) -> jax.Array:
    """Maximum over the shards of logical axes; without a gradient."""
    axes = self.axes(*logical)
    return lax.pmax(x, axes) if axes else x

  def all_gather(self, x: jax.Array, logical: str, axis: int) -> jax.Array:
    """Shards of a logical axis, concatenated along `axis`."""
    axes = self.axes(logical)
    return lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x

  def all_to_all(self, x: jax.Array, logical: str, split: int, join: int) -> jax.Array:
    """Splits x along `split`, a part to each shard; concatenates along `join`."""
    axes = self.axes(logical)
    return lax.all_to_all(x, axes, split, join, tiled=True) if axes else x

  def residual_part(self, x: Any) -> jax.Array:
    """[T, …] → [T/n, …]: this device's tokens of the residual stream.

    Raises:
      ValueError: T does not divide.
    """
    shards = self.size('residual')
    if shards == 1:
      return x
    if len(x) % shards:
      raise ValueError(self._uneven_residual(len(x)))
    part = len(x) // shards
    return lax.dynamic_slice_in_dim(x, self.index('residual') * part, part)

  def gather_residual(self, x: Any) -> jax.Array:
    """The inverse of `residual_part`: [T/n, …] → [T, …]."""
    return self.all_gather(x, 'residual', axis=0)

  def sum_to_residual(self, x: jax.Array, logical: str, axis: int = 0) -> jax.Array:
    """Sum over the shards of `logical` → this device's part of its T tokens.

    One reduce-scatter where the axes are those that split the residual stream.
    `axis` is that of T.
    """
    axes = self.axes('residual')
    if axes and axes == self.axes(logical):
      return lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)
    x = jnp.moveaxis(self.psum(x, logical), axis, 0)
    return jnp.moveaxis(self.residual_part(x), 0, axis)

  def token_index(self, count: int) -> jax.Array:
    """[count] int32: indices in their row of this device's tokens, ascending.

    The zigzag layout: a row is divided into two runs per device, and each
    device has one from the front and its mirror image from the back. Later tokens see
    more keys; so divided, all devices have the same number of query-key pairs.
    """
    shards, run = self.size('tokens'), jnp.arange(count // 2, dtype=jnp.int32)
    front = self.index('tokens')
    return jnp.concatenate(
      [front * len(run) + run, (2 * shards - 1 - front) * len(run) + run]
    )

  def to_zigzag(self, x: Any) -> jax.Array:
    """[B, S/n, …] in the order of the row → the same in zigzag layout."""
    axes = self.axes('tokens')
    if not axes:
      return x
    whole = lax.all_gather(x, axes, axis=1, tiled=True)
    return jnp.take(whole, self.token_index(x.shape[1]), axis=1)

  def gather_tokens(self, x: jax.Array) -> jax.Array:
    """[B, S/n, …] in zigzag layout → [B, S, …] in the order of the row."""
    axes, shards = self.axes('tokens'), self.size('tokens')
    if not axes:
      return x
    zigzag = lax.all_gather(x, axes, axis=1, tiled=True)
    runs = zigzag.reshape(len(x), 2 * shards, x.shape[1] // 2, *x.shape[2:])
    order = [2 * i for i in range(shards)] + [2 * i + 1 for i in range(shards)][::-1]
    return runs[:, np.array(order)].reshape(zigzag.shape)

  def from_zigzag(self, x: Any, axis: int = 1) -> jax.Array:
    """The inverse of `to_zigzag`; `axis` is that of the tokens, rows are before it."""
    if not self.axes('tokens'):
      return x
    count = x.shape[axis]
    row = self.gather_tokens(x.reshape(math.prod(x.shape[:axis]), *x.shape[axis:]))
    start = self.index('tokens') * count
    return lax.dynamic_slice_in_dim(row, start, count, axis=1).reshape(x.shape)

  @property
  def gathers(self) -> bool:
    """Whether weights are sharded in storage and gathered where they are used."""
    return bool(self.axes(*STORED))

  def gather_params(self, params: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Parameters by name, gathered along their storage axes.

    They are cast to `dtype` before the all-gather, except router and head; gradients
    are summed in the parameters' own dtype, or `rules.gradient_dtype`.
    """
    if not self.gathers:
      return dict(params)

    def one(name, leaf):
      if isinstance(leaf, Mapping):
        return self.gather_params(leaf, dtype)
      for dim, logical in enumerate(BY_NAME[name].split):
        axes = self.axes(logical) if logical in STORED else ()
        if axes:
          # block FP8 is several arrays: values and scales, gathered as they are
          parts = not jax.tree_util.all_leaves([leaf])
          to = None if parts or BY_NAME[name].kind in _WIDE else np.dtype(dtype)
          gather = functools.partial(
            _gather, axes=axes, dim=dim, dtype=to, summed=self.rules.gradient_dtype
          )
          leaf = jax.tree.map(gather, leaf)
      return leaf

    return {name: one(name, leaf) for name, leaf in params.items()}

  def check(self, cfg: ModelConfig) -> None:
    """Raises ValueError, naming the array, unless the model divides evenly."""
    if self.mesh is None:
      return
    idle = [
      axis
      for axis in MESH_AXES
      if self.mesh.shape[axis] > 1
      and all(axis not in self.rules.mesh_axes(n) for n in (*BATCH, *COMPUTE))
    ]
    if idle:
      raise ValueError(
        f'sharding rules do not use mesh axes {idle} of {dict(self.mesh.shape)}: '
        'their devices would all do the same work'
      )
    if not set(self.axes('experts')) <= set(self.axes(*BATCH)):
      raise ValueError(
        f'sharding rules split experts over {self.axes("experts")}, some of which do '
        'not split the batch: tokens would be sent to experts more than once'
      )
    sizes = {
      'vocab': {'vocab_size': cfg.vocab_size},
      'heads': {'num_heads': cfg.num_heads, 'num_kv_heads': cfg.num_kv_heads},
      'experts': {'num_experts': cfg.num_experts},
      'expert_hidden': {'expert_dim': cfg.expert_dim},
      'model': {'embed_dim': cfg.embed_dim},
      'expert_model': {'embed_dim': cfg.embed_dim},
    }
    for logical, fields in sizes.items():
      for field, value in fields.items():
        if value % self.size(logical):
          arrays = [n for n, p in BY_NAME.items() if logical in p.split]
          raise ValueError(
            f'ModelConfig.{field}={value} does not divide into {self.size(logical)} '
            f'shards: mesh axes {self.axes(logical)} split axis {logical!r} of '
            f'{", ".join(arrays)}'
          )
    if 'block_fp8' in [path.kind for path in cfg.paths]:
      sizes = {
        'heads': cfg.num_kv_heads * cfg.head_dim,
        'expert_hidden': cfg.expert_dim,
      }
      for logical, channels in sizes.items():
        shards = self.size(logical)
        if shards > 1 and channels // shards % 128:
          raise ValueError(
            f'ModelConfig.matmuls: {shards} shards of {channels} channels '
            f'({logical!r}) would cut blocks of 128 channels; use fewer shards, or '
            "another kind than 'block_fp8'"
          )

  def check_batch(self, rows: int, row_tokens: int | None = None) -> None:
    """Raises ValueError unless `rows` rows (of `row_tokens` tokens) divide evenly."""
    for logical, value in (('rows', rows), ('tokens', row_tokens)):
      shards = self.size(logical)
      runs = 2 if logical == 'tokens' and shards > 1 else 1  # see `token_index`
      if value is not None and value % (runs * shards):
        raise ValueError(
          f'{value} {logical} of a batch do not divide into {runs * shards} equal '
          f'parts, {runs} for each of {shards} shards over mesh axes '
          f'{self.axes(logical)}'
        )
    if row_tokens is not None:
      tokens = rows // self.size('rows') * (row_tokens // self.size('tokens'))
      if tokens % self.size('residual'):
        raise ValueError(self._uneven_residual(tokens))

  def _uneven_residual(self, tokens: int) -> str:
    return (
      f'{tokens} tokens of a device do not divide into {self.size("residual")} equal '
      f'parts: mesh axes {self.axes("residual")} split the residual stream '
      '(Rules.residual); take more rows, or longer ones'
    )


ONE_DEVICE = Sharding()


def make(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Sharding:
  """The Sharding of a config; `ONE_DEVICE` where its mesh is one."""
  config = config.over(len(jax.devices() if devices is None else devices))
  if config.size == 1:
    return ONE_DEVICE
  return Sharding(make_mesh(config, devices), rules_of(config))


def rules_of(config: MeshConfig) -> Rules:
  """The preset of a config, with its `gradient_dtype`."""
  return dataclasses.replace(
    PRESETS[config.rules], gradient_dtype=config.gradient_dtype
  )


def save_all_but_gathered(primitive, *_, **params) -> bool:
  """A `jax.checkpoint` policy: the backward pass gathers weights again.

  Everything else is saved. Without the policy a loop over layers would save the
  gathered weights of all of them.

  It goes by the name of a primitive, because `checkpoint_name` cannot express it: the
  name is an operation after the gather, and where a policy excludes the name jax saves
  its operand, the gathered weight. Compiled for 8 CPU devices and 8 layers with 11.8 MB
  of experts each: 48 MiB of temporaries and 18 all-gathers with this policy; 132 MiB
  and 10 with the named weights excluded, with or without an inner checkpoint around the
  gather; 134 MiB and 10 with no policy.
  """
  del params
  return primitive.name != 'linear_call'  # made by `_gather` alone


def _gather(x, axes, dim, dtype, summed):
  """All-gather of a parameter along `dim`, as `dtype`; its gradient is summed as
  `summed`; None is its own dtype."""
  stored = x.dtype
  dtype = dtype or stored

  def gather(_, x):
    return lax.all_gather(x.astype(dtype), axes, axis=dim, tiled=True)

  def scatter(_, d_out):
    # A sum over many devices: in the parameter's precision, not the activations'.
    d_out = d_out.astype(summed or stored)
    total = lax.psum_scatter(d_out, axes, scatter_dimension=dim, tiled=True)
    return total.astype(stored)

  return linear_call(gather, scatter, (), x)
