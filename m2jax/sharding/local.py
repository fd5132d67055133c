"""Copies of sharded arrays on one device of this process."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def local_copy(tree: Any) -> Any:
  """A copy of a tree's arrays, whole, on the first device of this process.

  The originals may be donated. Leaf by leaf: beside the copy each device needs memory
  for the largest leaf. With several processes all of them must call it.

  Args:
    tree: arrays, on any mesh of all processes or on devices of this one.
  """
  device = jax.local_devices()[0]

  def one(leaf: jax.Array) -> jax.Array:
    if not leaf.is_fully_addressable:
      leaf = _whole(leaf.sharding.mesh)(leaf).addressable_data(0)
    # A placement may share the buffer of the original.
    return jax.block_until_ready(jnp.copy(jax.device_put(leaf, device)))

  return jax.tree.map(one, tree)


@functools.cache
def _whole(mesh: Mesh):
  """An all-gather: compiled once for each shape and sharding."""
  return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
