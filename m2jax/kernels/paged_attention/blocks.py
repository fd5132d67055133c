"""Queries in blocks for the kernels: tokens of a row, each with a group's heads.

Axes: P rows, C new tokens of a row, N query heads, K key/value heads, G = N/K, H head
dim; m blocks of a row's queries, q rows of a block: token by token, G heads each, then
padding.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.kernels.paged_attention.cache import Cache, ancestors

MOST_TREE = 32  # tokens of a chunk that is a tree: one bit each


class Blocks(NamedTuple):
  """Sizes.

  Attributes:
    tokens: C.
    queries: tokens of a block.
    rows: q.
  """

  kv_heads: int
  group: int
  tokens: int
  queries: int
  rows: int

  @property
  def number(self) -> int:
    """m."""
    return -(-self.tokens // self.queries)

  def split(self, x, fill):
    """[P, C] → [P, m, tokens of a block]."""
    pad = self.number * self.queries - self.tokens
    x = jnp.pad(x, ((0, 0), (0, pad)), constant_values=fill)
    return x.reshape(len(x), self.number, self.queries)

  def per_head(self, x, fill):
    """[P, C] → [P, m, q], each value once per head of the group."""
    x = jnp.repeat(self.split(x, fill), self.group, axis=2)
    pad = ((0, 0), (0, 0), (0, self.rows - x.shape[2]))
    return jnp.pad(x, pad, constant_values=fill)

  def of(self, q):
    """[P, C, N, H] → [P, K, m, q, H]; with one head or one token without a copy."""
    P, C, _, H = q.shape
    pad = ((0, 0), (0, self.number * self.queries - C), (0, 0), (0, 0))
    shape = P, self.number, self.queries, self.kv_heads, self.group, H
    q = jnp.pad(q, pad).reshape(shape).transpose(0, 3, 1, 2, 4, 5)
    q = q.reshape(P, self.kv_heads, self.number, -1, H)
    pad = ((0, 0),) * 3 + ((0, self.rows - q.shape[3]), (0, 0))
    return jnp.pad(q, pad)

  def undo(self, x):
    """The inverse of `of`; also [P, K, m, q] → [P, C, N]."""
    P, rest = len(x), x.shape[4:]
    x = x[:, :, :, : self.queries * self.group]
    x = x.reshape(P, self.kv_heads, -1, self.group, *rest)[:, :, : self.tokens]
    return x.swapaxes(1, 2).reshape(P, self.tokens, -1, *rest)


class Seen(NamedTuple):
  """What the queries see, for the kernels; int32.

  Attributes:
    position: [P, m, q], -1 for padding.
    tree: [P, m, q] bits of the tokens of the chunk that a query sees; None: a chain.
    length: [P, m] positions that some query of a block sees.
    unmasked: [P, m] positions that all queries of a block see, but for padding.
    start: [P] of the chunk.
  """

  position: jax.Array
  tree: jax.Array | None
  length: jax.Array
  unmasked: jax.Array
  start: jax.Array


def seen(blocks: Blocks, cache: Cache, position, subtree_end) -> Seen:
  S = cache.positions
  position = jnp.minimum(jnp.asarray(position, jnp.int32), S - 1)
  split = blocks.split(position, -1)
  length = jnp.max(split, 2) + 1
  unmasked = jnp.min(jnp.where(split < 0, S, split + 1), 2)
  start, tree = position[:, 0], None
  if subtree_end is not None:
    tree = blocks.per_head(ancestors(subtree_end), 0)
    unmasked = jnp.minimum(unmasked, jnp.maximum(start, 0)[:, None])
  unmasked = jnp.minimum(unmasked, length)
  return Seen(blocks.per_head(position, -1), tree, length, unmasked, start)


def in_parts(call, static, q, cache: Cache, position, subtree_end):
  """`attend` by a kernel that divides each row's keys into parts.

  Args:
    call: (static, q [P, K, m, q, H], cache, Seen) → per part out like q and its
      logsumexp [parts, P, K, m, q], fp32.
    static: the kernel's own; its `blocks` divide the queries. Unused if q is empty.
  """
  if not q.size:
    return jnp.zeros_like(q), jnp.zeros(q.shape[:3], jnp.float32)
  blocks = static.blocks
  of_parts = call(
    static, blocks.of(q), cache, seen(blocks, cache, position, subtree_end)
  )
  out, lse = _total(*of_parts)
  return blocks.undo(out).astype(q.dtype), blocks.undo(lse)


def _total(out, lse):
  """The softmax over all parts, by each part's own [parts, …] and its logsumexp."""
  top = jnp.max(lse, axis=0)
  safe = jnp.where(top == -jnp.inf, 0, top)
  weights = jnp.exp(lse - safe)
  total = jnp.sum(weights, axis=0)
  nonempty = total > 0
  divisor = jnp.where(nonempty, total, 1)
  out = jnp.sum(out * (weights / divisor)[..., None], axis=0)
  return out, jnp.where(nonempty, safe + jnp.log(divisor), jnp.inf)
