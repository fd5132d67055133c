"""Grouped matmul in plain jnp: every row times every matrix, then a selection.

Axes: T rows sorted by group, E groups, D in, F out.
"""

from __future__ import annotations

import jax.numpy as jnp

from m2jax.axes import Array, Float, Int


def group_ids(group_sizes: Int[Array, 'E'], num_rows: int) -> Int[Array, 'T']:
  """The group of each of T = `num_rows` rows; E for rows past the sum of the sizes."""
  ends = jnp.cumsum(group_sizes)
  return jnp.sum(jnp.arange(num_rows)[:, None] >= ends[None], axis=1)


def matmul(
  lhs: Float[Array, 'T D'], rhs: Float[Array, 'E D F'], group_sizes: Int[Array, 'E']
) -> Float[Array, 'T F']:
  """Each row times its group's matrix; rows past the sum of the sizes give 0."""
  dtype = jnp.promote_types(lhs.dtype, jnp.float32)
  ids = group_ids(group_sizes, lhs.shape[0])
  # where, not a product: rows past the sum may hold NaN
  lhs = jnp.where((ids < rhs.shape[0])[:, None], lhs, 0)
  every = jnp.einsum('td,edf->tef', lhs, rhs, preferred_element_type=dtype)
  chosen = ids[:, None] == jnp.arange(rhs.shape[0])
  return jnp.sum(jnp.where(chosen[..., None], every, 0), axis=1).astype(lhs.dtype)
