"""A training state as a table of named leaves, to save, compare and restore it.

A leaf's name is its path in the pytree, such as `params/layers/q` or
`optimizer/1/mu/embed`. It is the same for a dict, a dataclass and a named tuple, so
that a checkpoint does not depend on the Python classes of the state.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

_MAX_LISTED = 12  # leaves named in one error


@dataclasses.dataclass(frozen=True)
class LeafSpec:
  """Shape, dtype name ('float32', 'key<fry>', …) and optional CRC-32 of a leaf."""

  shape: tuple[int, ...]
  dtype: str
  crc32: int | None = None

  def __str__(self):
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


def table(tree: Any) -> dict[str, Any]:
  """Leaves of `tree` by name, in the tree's order.

  Raises:
    ValueError: two leaves have the same name, or the tree is a single leaf.
  """
  leaves = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if not name:
      raise ValueError('a state is a dict (or other tree) of arrays, not one array')
    if name in leaves:
      raise ValueError(f'two leaves of the state are both named {name!r}')
    leaves[name] = leaf
  return leaves


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """The nested dict whose `table` is `leaves`."""
  tree: dict[str, Any] = {}
  for name, leaf in leaves.items():
    *folders, last = name.split('/')
    node = tree
    for folder in folders:
      node = node.setdefault(folder, {})
      if not isinstance(node, dict):
        raise ValueError(f'{name!r} is below another leaf of the state')
    if last in node:
      raise ValueError(f'two leaves of the state are both named {name!r}')
    node[last] = leaf
  return tree


def is_key(leaf: Any) -> bool:
  """Whether `leaf` is a typed PRNG key array (`jax.random.key`)."""
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_array(name: str, leaf: Any) -> jax.Array | np.ndarray:
  """`leaf` as an array that cannot change during an asynchronous save.

  Raises:
    TypeError: it is not an array or a number.
  """
  if isinstance(leaf, jax.Array):
    return leaf  # immutable; the save has its own copy if it is donated later
  if isinstance(leaf, (np.ndarray, np.generic, bool, int, float)):
    return np.array(leaf)
  raise TypeError(
    f'state leaf {name!r} is a {type(leaf).__name__}: only arrays and numbers are '
    'allowed; put other values into `host` or `files`'
  )


def storable(leaf: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
  """The array written for `leaf`: a PRNG key's uint32 data, or itself."""
  return jax.random.key_data(leaf) if is_key(leaf) else leaf


def as_asked(stored: jax.Array, like: Any) -> jax.Array:
  """Undoes `storable`: converts PRNG key data to keys of `like`'s type."""
  if not is_key(like):
    return stored
  for impl in ('threefry2x32', 'rbg', 'unsafe_rbg'):
    if jax.random.key(0, impl=impl).dtype == like.dtype:
      return jax.random.wrap_key_data(stored, impl=impl)
  raise ValueError(f'PRNG keys of type {like.dtype} cannot be restored')


def crc32(leaf: jax.Array | np.ndarray) -> int | None:
  """CRC-32 of the leaf's bytes; None if this host does not have all of it."""
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    return None
  return zlib.crc32(
    np.ascontiguousarray(jax.device_get(leaf)).reshape(-1).view(np.uint8)
  )


def spec(leaf: Any, checksum: int | None = None) -> LeafSpec:
  """LeafSpec of an array or `jax.ShapeDtypeStruct`."""
  return LeafSpec(tuple(leaf.shape), str(leaf.dtype), checksum)


def differences(
  saved: Mapping[str, LeafSpec], asked: Mapping[str, LeafSpec], partial: bool
) -> str | None:
  """One line per leaf that does not match; None if all match.

  Args:
    saved, asked: the two tables.
    partial: accept saved leaves that are not requested.
  """
  lines = []
  for name, want in asked.items():
    have = saved.get(name)
    if have is None:
      lines.append(f'{name}: not in the checkpoint, requested {want}')
    elif (have.shape, have.dtype) != (want.shape, want.dtype):
      lines.append(f'{name}: saved {have}, requested {want}')
  if not partial:
    lines += [
      f'{name}: saved {have}, not requested'
      for name, have in saved.items()
      if name not in asked
    ]
  return listing(lines) if lines else None


def listing(lines: Sequence[str]) -> str:
  """The first lines, indented, and the number of further ones, for an error message."""
  more = len(lines) - _MAX_LISTED
  shown = [*lines[:_MAX_LISTED], *([f'… and {more} more'] if more > 0 else [])]
  return '\n'.join(f'  {line}' for line in shown)
