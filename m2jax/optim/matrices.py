"""A function of single matrices, applied to all matrices of a stacked parameter.

Parameters are [*stack, in, out] (y = x W), where layers, modules and experts are the
stack. q, k and v have the matrices of their heads side by side along `out`, and are
split into those. So a rule is written for one matrix, and its results have the
parameter's layout: an array with one number per column of the matrix is [*stack, 1,
out], and is sharded like the parameter (`sharding.like_params`).

On a mesh a matrix may be split over devices. Then they exchange parts: of n matrices,
each of n devices sends its part of each and receives one whole, by all-to-all; the
results go back the same way. A device has only a few whole matrices at a time
(`WHOLE_ELEMENTS`, one of M2's large ones). Mesh axes that do not split the parameter
divide its matrices, and results are gathered over them. So no device repeats another's
work, except for a single matrix.

Axes: in, out of a matrix; `groups` of the matrices that are exchanged together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from m2jax import platforms
from m2jax.params import BY_NAME
from m2jax.sharding import ONE_DEVICE, Sharding

# A device works on matrices of at most these elements together, or on one.
WHOLE_ELEMENTS = 2**22
SMALL_ELEMENTS = 2**20  # leaves of at most these may be copied into one stack

# matrices [in or 1, out or 1] → a pytree of such matrices
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Matrices:
  """How parameters hold matrices.

  Attributes:
    heads: parameter's name → number of matrices side by side along its last axis; one
      for names that are not in it.
    sharding: where the parameters are.
  """

  heads: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
  sharding: Sharding = ONE_DEVICE

  def map_tree(self, function: Function, tree: Any, *rest: Any) -> Any:
    """`map` for each leaf of a tree of parameters, by the last key of its path.

    On one device small leaves of alike matrices are one stack, since each call takes
    about a second to compile.

    Args:
      function: takes the leaf's matrices, and those of the same leaf of `rest`.
      tree: leaves [*stack, in, out].
      rest: trees of the same structure.

    Returns:
      For each leaf what `map` returns.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [name_of(path) for path, _ in pairs]
    columns = [[leaf for _, leaf in pairs], *map(structure.flatten_up_to, rest)]
    leaves = list(zip(*columns, strict=True))
    together: dict[Any, list[int]] = {}
    for number, (name, arrays) in enumerate(zip(names, leaves, strict=True)):
      together.setdefault(self._alike(number, name, arrays), []).append(number)
    out = [None] * len(leaves)
    for numbers in together.values():
      found = self._map_alike(function, [(names[n], leaves[n]) for n in numbers])
      for number, result in zip(numbers, found, strict=True):
        out[number] = result
    return structure.unflatten(out)

  def _alike(self, number: int, name: str, arrays: tuple[jax.Array, ...]) -> Any:
    """A key that leaves share whose matrices can be one stack."""
    if self.sharding.mesh is not None or arrays[0].size > SMALL_ELEMENTS:
      return number
    heads = self.heads.get(name, 1)
    shapes = [(*x.shape[-2:-1], x.shape[-1] // heads, str(x.dtype)) for x in arrays]
    return tuple(shapes)

  def _map_alike(self, function: Function, leaves) -> list[Any]:
    """`map` of leaves (name, arrays) as one stack; of a single one as it is."""
    if len(leaves) == 1:
      ((name, arrays),) = leaves
      return [self.map(name, function, *arrays)]
    heads = [self.heads.get(name, 1) for name, _ in leaves]
    apart = [
      [split(x, n) for x in arrays]
      for n, (_, arrays) in zip(heads, leaves, strict=True)
    ]
    stacks = [arrays[0].shape[:-2] for arrays in apart]
    flat = [[x.reshape(-1, *x.shape[-2:]) for x in arrays] for arrays in apart]
    joined = [jnp.concatenate(parts) for parts in zip(*flat, strict=True)]
    found = self.map('', function, *joined)
    ends = np.cumsum([0, *(math.prod(stack) for stack in stacks)])

    def part(n):
      def cut(x):
        x = x[ends[n] : ends[n + 1]]
        return merge(x.reshape(*stacks[n], *x.shape[-2:]), heads[n])

      return jax.tree.map(cut, found)

    return [part(n) for n in range(len(leaves))]

  def each(self, tree: Any, value: jax.Array | float) -> Any:
    """A number for every matrix of a tree of parameters: [*stack, 1, heads].

    A function sees no other arrays than those that it is given.
    """

    def one(path, leaf):
      shape = (*leaf.shape[:-2], 1, self.heads.get(name_of(path), 1))
      return jnp.full(shape, value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, tree)

  def map(self, name: str, function: Function, *arrays: jax.Array) -> Any:
    """The function of each matrix, in the layout of the parameter.

    Args:
      name: the parameter's name.
      function: takes a matrix of each array; returns a pytree of matrices. Each axis is
        the first array's, or 1.
      arrays: [*stack, in or 1, out or 1]; with heads out is heads · out.
    """
    heads = self.heads.get(name, 1)
    arrays = tuple(split(x, heads) for x in arrays)
    matrix = arrays[0].shape[-2:]
    axes = self._axes(name, arrays[0].ndim, heads)
    out = jax.eval_shape(
      function, *(jax.ShapeDtypeStruct(x.shape[-2:], x.dtype) for x in arrays)
    )

    def whole(x):  # for both ends, whether they are the matrix's own
      return tuple(a == b > 1 for a, b in zip(x.shape[-2:], matrix, strict=True))

    def spec(x):
      pairs = zip(axes[-2:], whole(x), strict=True)
      ends = [names if its_own else () for names, its_own in pairs]
      return P(*(names or None for names in (*axes[:-2], *ends)))

    plan = _Plan(
      function,
      self.sharding,
      tuple(axes[-2:]),
      self._replicas(axes),
      matrix,
      tuple(map(whole, arrays)),
      jax.tree.map(whole, out),
    )
    run = self.sharding.shard_map(
      plan.run, tuple(map(spec, arrays)), jax.tree.map(spec, out)
    )
    return jax.tree.map(lambda x: merge(x, heads), run(*arrays))

  def _axes(self, name: str, ndim: int, heads: int) -> list[tuple[str, ...]]:
    """Mesh axes that split each axis of a parameter whose heads are a stack."""
    logical = BY_NAME[name].split if name in BY_NAME else ()
    axes = [self.sharding.axes(x) if x else () for x in logical]
    if heads > 1:
      axes = [*axes[:-2], axes[-1], axes[-2], ()]
    return [()] * (ndim - len(axes)) + axes

  def _replicas(self, axes: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Mesh axes of several devices that are not among those of a parameter's axes."""
    if self.sharding.mesh is None:
      return ()
    used = {name for names in axes for name in names}
    sizes = self.sharding.mesh.shape.items()
    return tuple(name for name, size in sizes if size > 1 and name not in used)


PLAIN = Matrices()  # no heads, on one device


def name_of(path: tuple[Any, ...]) -> str:
  """The last key of a leaf's path."""
  return jax.tree_util.keystr(path[-1:], simple=True)


def split(x: jax.Array, heads: int) -> jax.Array:
  """[*stack, in, heads · out] → [*stack, heads, in, out]."""
  if heads == 1:
    return x
  x = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
  return jnp.moveaxis(x, -2, -3)


def transpose(like: Any, tree: Any, number: int) -> tuple[Any, ...]:
  """A tree of tuples as a tuple of trees, each with the structure of `like`."""
  structure = jax.tree.structure(like)
  leaves = structure.flatten_up_to(tree)
  return tuple(structure.unflatten([x[i] for x in leaves]) for i in range(number))


def merge(x: jax.Array, heads: int) -> jax.Array:
  """The inverse of `split`."""
  if heads == 1:
    return x
  x = jnp.moveaxis(x, -3, -2)
  return x.reshape(*x.shape[:-2], -1)


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What a device does with its part of a stack.

  Attributes:
    function: works on whole matrices.
    sharding: the parameter's sharding.
    axes: mesh axes that split `in` and `out`.
    replicas: mesh axes that split nothing of the parameter.
    matrix: sizes of both.
    inputs, outputs: for each array, and in the tree of the results, whether its ends
      are those of the matrix (else 1).
  """

  function: Function
  sharding: Sharding
  axes: tuple[tuple[str, ...], tuple[str, ...]]
  replicas: tuple[str, ...]
  matrix: tuple[int, int]
  inputs: tuple[tuple[bool, bool], ...]
  outputs: Any

  def run(self, *arrays: jax.Array) -> Any:
    """[*stack, in part, out part] of each array → the results' parts."""
    stack = arrays[0].shape[:-2]
    number, replicas = math.prod(stack), self._size(self.replicas)
    stacks = tuple(x.reshape(number, *x.shape[-2:]) for x in arrays)
    if replicas == 1 or number == 1:
      out = self._stack(*stacks)
    else:
      each = -(-number // replicas)
      start = lax.axis_index(self.replicas) * each

      def mine(x):
        x = jnp.pad(x, ((0, each * replicas - number), (0, 0), (0, 0)))
        return lax.dynamic_slice_in_dim(x, start, each)

      def everywhere(x):
        return lax.all_gather(x, self.replicas, axis=0, tiled=True)[:number]

      out = jax.tree.map(everywhere, self._stack(*map(mine, stacks)))
    return jax.tree.map(lambda x: x.reshape(*stack, *x.shape[-2:]), out)

  def _stack(self, *arrays: jax.Array) -> Any:
    """`run` of parts [number, in part, out part]."""
    number, devices = len(arrays[0]), math.prod(map(self._size, self.axes))
    each = -(-number // devices)
    size = devices * min(each, max(1, WHOLE_ELEMENTS // math.prod(self.matrix)))
    groups = -(-number // size)

    def grouped(x):
      x = jnp.pad(x, ((0, groups * size - number), (0, 0), (0, 0)))
      return x.reshape(groups, size, *x.shape[-2:])

    parts = tuple(map(grouped, arrays))
    if groups == 1:
      out = jax.tree.map(lambda x: x[None], self._group(*(x[0] for x in parts)))
    else:
      out = lax.map(lambda xs: self._group(*xs), parts)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[-2:])[:number], out)

  def _size(self, axes: tuple[str, ...]) -> int:
    return math.prod(self.sharding.mesh.shape[axis] for axis in axes)

  def _group(self, *arrays: jax.Array) -> Any:
    """Parts [n, in part, out part] of n matrices; whole ones in between."""
    own = [self._assemble(x, w) for x, w in zip(arrays, self.inputs, strict=True)]

    def one_by_one(*xs):  # on CPU one matrix stays in cache, and stops when it is done
      return lax.map(lambda x: self.function(*x), xs)

    batched = jax.vmap(self.function)
    out = platforms.dependent(*own, cpu=one_by_one, default=batched)
    outputs = jax.tree.structure(out).flatten_up_to(self.outputs)
    leaves, structure = jax.tree.flatten(out)
    pairs = zip(leaves, outputs, strict=True)
    return structure.unflatten([self._return(x, whole) for x, whole in pairs])

  def _assemble(self, x: jax.Array, whole: tuple[bool, bool]) -> jax.Array:
    """Each device's part of n matrices → its own matrices of the n, whole."""
    for axes, end, split_there in zip(self.axes, (1, 2), whole, strict=True):
      if not axes:
        continue
      if split_there:
        x = lax.all_to_all(x, axes, 0, end, tiled=True)
      else:
        size = len(x) // self._size(axes)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size)
    return x

  def _return(self, x: jax.Array, whole: tuple[bool, bool]) -> jax.Array:
    """The inverse of `_assemble`."""
    for axes, end, split_there in zip(
      self.axes[::-1], (2, 1), whole[::-1], strict=True
    ):
      if not axes:
        continue
      if split_there:
        x = lax.all_to_all(x, axes, end, 0, tiled=True)
      else:
        x = lax.all_gather(x, axes, axis=0, tiled=True)
    return x
