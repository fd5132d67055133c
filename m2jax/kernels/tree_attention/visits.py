"""Which blocks of queries visit which blocks of keys: what the Pallas kernels skip.

Axes: B rows; m, n query and key blocks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

ID_BITS = 14  # of a block's id in a table
MASKED, WHOLE = 1, 2  # kinds of visits; one of kind 0 only sets a result to 0


class Index(NamedTuple):
  """Integers of each token, [..., padded length] int32."""

  q_index: jax.Array  # -1 on padding
  subtree_end: jax.Array  # 0 on padding
  q_position: jax.Array | None
  k_position: jax.Array | None


def block_kinds(static, index: Index) -> jax.Array:
  """[rows, query blocks, key blocks] int32: 0 where nothing is seen, else the kind.

  Extremes decide, so a block called MASKED may yet show nothing or everything.
  `static` has rows, block_q, block_k, key_blocks (of a row), window and sinks.
  """
  q = index.q_index.reshape(static.rows, -1, 1, static.block_q)
  end = index.subtree_end.reshape(static.rows, 1, -1, static.block_k)
  first_key = jnp.arange(static.key_blocks, dtype=jnp.int32) * static.block_k
  last_key = first_key + static.block_k - 1
  top = jnp.iinfo(jnp.int32).max
  first_q, last_q = jnp.min(jnp.where(q < 0, top, q), axis=-1), jnp.max(q, axis=-1)
  seen = (first_key <= last_q) & (first_q < jnp.max(end, axis=-1))
  # here padding counts: its -1 and 0 leave the block to the mask
  whole = (last_key <= jnp.min(q, axis=-1)) & (last_q < jnp.min(end, axis=-1))
  if static.window is not None:
    q_at = index.q_position.reshape(q.shape)
    k_at = index.k_position.reshape(end.shape)
    first_k, last_k = jnp.min(k_at, axis=-1), jnp.max(k_at, axis=-1)
    first_at = jnp.min(jnp.where(q < 0, top, q_at), axis=-1)
    seen &= (first_at - last_k < static.window) | (first_k < static.sinks)
    near = jnp.max(q_at, axis=-1) - first_k < static.window
    whole &= near | (last_k < static.sinks)
  return jnp.where(seen, jnp.where(whole, WHOLE, MASKED), 0).astype(jnp.int32)


def visits(kinds: jax.Array) -> tuple[jax.Array, jax.Array]:
  """kinds [rows, m, n] → table [rows·m·n] int32 of the visits, and how many there are.

  An entry is block · 2^16 + partner · 2^2 + kind, sorted; ids count through all rows.
  A block that sees nothing is listed once, with kind 0: its result has to be written.
  """
  rows, m, n = kinds.shape
  nothing = jnp.all(kinds == 0, axis=2, keepdims=True)
  listed = (kinds > 0) | (nothing & (jnp.arange(n) == 0))
  at = jnp.nonzero(listed.reshape(-1), size=kinds.size, fill_value=0)[0]
  at = at.astype(jnp.int32)
  block, partner = at // n, at // (m * n) * n + at % n
  table = (block << (ID_BITS + 2)) | (partner << 2) | kinds.reshape(-1)[at]
  return table, jnp.sum(listed, dtype=jnp.int32)


def block_of(entry):
  return entry >> (ID_BITS + 2)


def partner_of(entry):
  return (entry >> 2) & (2**ID_BITS - 1)
