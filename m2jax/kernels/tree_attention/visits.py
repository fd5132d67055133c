"""Which blocks of queries visit which blocks of keys: what the Pallas kernels skip.

Axes: B rows; m, n query and key blocks of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from m2jax.kernels.tree_attention.visibility import Visibility

ID_BITS = 14  # of a block's id in a table
MASKED, WHOLE = 1, 2  # kinds of visits; one of kind 0 only sets a result to 0


def block_kinds(static, index: Visibility) -> jax.Array:
  """[rows, query blocks, key blocks] int32: 0 where nothing is seen, else the kind.

  Extremes decide, so a block called MASKED may yet show nothing or everything.
  `static` has rows, block_q, block_k and key_blocks (of a row); `index` is padded to
  whole blocks.
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
  if index.window is not None:
    q_at = index.q_position.reshape(q.shape)
    k_at = index.k_position.reshape(end.shape)
    first_k, last_k = jnp.min(k_at, axis=-1), jnp.max(k_at, axis=-1)
    first_at = jnp.min(jnp.where(q < 0, top, q_at), axis=-1)
    seen &= (first_at - last_k < index.window) | (first_k < index.sinks)
    near = jnp.max(q_at, axis=-1) - first_k < index.window
    whole &= near | (last_k < index.sinks)
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
