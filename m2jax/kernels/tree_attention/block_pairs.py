"""Block pairs: which blocks of queries see which blocks of keys. Others are skipped.

Axes: B rows; m, n query and key blocks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.kernels import pallas
from m2jax.kernels.tree_attention.visibility import Visibility

ID_BITS = 14  # of a block's id in a table
PARTIAL, FULL = 1, 2  # kinds of pairs, with a mask and without; kind 0: nothing is seen


class BlockPairs(NamedTuple):
  """Pairs in the order of a kernel's grid steps.

  Attributes:
    table: [B·m·n] int32, block · 2^16 + partner · 2^2 + kind, sorted; ids count the
      blocks of all rows. Entries past the last part are unspecified.
    parts: [2] or [3] int32, bounds of the parts of one or two cores.
  """

  table: jax.Array
  parts: jax.Array

  @property
  def steps(self) -> jax.Array:
    """Pairs of the longest part."""
    return jnp.max(jnp.diff(self.parts))


def block_kinds(static, index: Visibility) -> jax.Array:
  """[rows, query blocks, key blocks] int32: 0 where nothing is seen, else the kind.

  Extremes decide, so a PARTIAL pair may in fact show nothing or everything. `static`
  has rows, block_q, block_k and key_blocks (of a row); `index` is padded to full
  blocks.
  """
  q = index.q_index.reshape(static.rows, -1, 1, static.block_q)
  end = index.subtree_end.reshape(static.rows, 1, -1, static.block_k)
  first_key = jnp.arange(static.key_blocks, dtype=jnp.int32) * static.block_k
  last_key = first_key + static.block_k - 1
  top = jnp.iinfo(jnp.int32).max
  first_q, last_q = jnp.min(jnp.where(q < 0, top, q), axis=-1), jnp.max(q, axis=-1)
  seen = (first_key <= last_q) & (first_q < jnp.max(end, axis=-1))
  # padding counts here: its -1 and 0 make a block PARTIAL
  full = (last_key <= jnp.min(q, axis=-1)) & (last_q < jnp.min(end, axis=-1))
  if index.window is not None:
    q_at = index.q_position.reshape(q.shape)
    k_at = index.k_position.reshape(end.shape)
    first_k, last_k = jnp.min(k_at, axis=-1), jnp.max(k_at, axis=-1)
    first_at = jnp.min(jnp.where(q < 0, top, q_at), axis=-1)
    seen &= (first_at - last_k < index.window) | (first_k < index.sinks)
    near = jnp.max(q_at, axis=-1) - first_k < index.window
    full &= near | (last_k < index.sinks)
  return jnp.where(seen, jnp.where(full, FULL, PARTIAL), 0).astype(jnp.int32)


def block_pairs(kinds: jax.Array, split: bool = False) -> BlockPairs:
  """kinds [B, m, n] → the pairs of which something is seen.

  A block that sees nothing has one pair of kind 0, since its result must be written.
  With `split`, and two blocks, there are two parts of whole blocks and nearly equal
  length.
  """
  rows, m, n = kinds.shape
  nothing = jnp.all(kinds == 0, axis=2, keepdims=True)
  listed = (kinds > 0) | (nothing & (jnp.arange(n) == 0))
  at = jnp.nonzero(listed.reshape(-1), size=kinds.size, fill_value=0)[0]
  at = at.astype(jnp.int32)
  block, partner = at // n, at // (m * n) * n + at % n
  table = (block << (ID_BITS + 2)) | (partner << 2) | kinds.reshape(-1)[at]
  count = jnp.sum(listed, dtype=jnp.int32)
  if split and rows * m > 1:
    return BlockPairs(table, pallas.halves(block, count))
  return BlockPairs(table, jnp.stack([jnp.zeros_like(count), count]))


def block_of(entry):
  return entry >> (ID_BITS + 2)


def partner_of(entry):
  return (entry >> 2) & (2**ID_BITS - 1)


def kind_of(entry):
  return entry & 3
