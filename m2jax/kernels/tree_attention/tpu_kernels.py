"""Kernel bodies of forest attention on TPU; tpu.py has the algorithm and the calls.

Scores are transposed, [keys, queries]: statistics of a query are then rows, which
broadcast over sublanes and are stored in HBM without padding. A grid step is one block
pair and one key/value head; grid axis 0 is heads times parts of the table.

Axes: K key/value heads, G query heads of each, H head dim; k, q tokens of a key and of
a query block; rows of B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from m2jax.kernels import pallas
from m2jax.kernels.tree_attention.block_pairs import (
  FULL,
  PARTIAL,
  block_of,
  kind_of,
  partner_of,
)
from m2jax.kernels.tree_attention.visibility import Visibility

LANES = 128


class Static(NamedTuple):
  scale: float
  rows: int  # of a table of block pairs
  kv_heads: int
  group: int
  dim: int
  block_q: int
  block_k: int
  key_blocks: int  # of a row


def _run_pair(refs, init: Callable, mask: Callable, add: Callable, finish: Callable):
  """One grid step: `init` before a block's first pair, `finish` after its last.

  In between `add(mask(entry))` for what the pair adds to the block's result; a FULL
  pair has no mask. Steps past a core's part of the table do nothing.
  """
  e = pallas.entry(refs.parts, pl.program_id(0), pl.program_id(1))
  entry = refs.table[e.at]
  before = refs.table[jnp.maximum(e.at - 1, e.begin)]
  after = refs.table[jnp.minimum(e.at + 1, e.end - 1)]
  first = (e.at == e.begin) | (block_of(before) != block_of(entry))
  last = (e.at == e.end - 1) | (block_of(after) != block_of(entry))
  pl.when(e.live & first)(init)
  pl.when(e.live & (kind_of(entry) == FULL))(lambda: add(None))
  pl.when(e.live & (kind_of(entry) == PARTIAL))(lambda: add(mask(entry)))
  pl.when(e.live & last)(finish)


def _column(row):
  """[1, k] int32 → [k, 1]."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _seen(static: Static, k_id, index: Visibility):
  """[k, q] bool: which keys the queries see. `index` has refs of one block each."""
  key = lax.rem(k_id, np.int32(static.key_blocks)) * static.block_k
  key += lax.broadcasted_iota(jnp.int32, (static.block_k, static.block_q), 0)
  q = index.q_index[...]
  seen = (key <= q) & (q < _column(index.subtree_end[...]))
  if index.window is not None:
    k_at = _column(index.k_position[...])
    near = index.q_position[...] - k_at < index.window
    seen &= near | (k_at < index.sinks)
  return seen


def _scores(static: Static, q, k, seen):
  """[k, q] fp32, -inf where not seen."""
  scores = pallas.dot(k, q, 1, 1) * static.scale
  return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


def _head(static: Static, g: int):
  """Row of a group's query head in statistics, and its columns in queries."""
  return pl.ds(g, 1), pl.ds(g * static.dim, static.dim)


class _ForwardRefs(NamedTuple):
  """Refs in the order in which Pallas passes them."""

  table: Any  # in scalar memory, as are its parts
  parts: Any
  index: Visibility
  q: Any  # [q, G·H]
  k: Any  # [k, H]
  v: Any
  out: Any  # like q
  lse: Any  # [G, q]
  # scratch, kept from one pair of a query block to the next
  top: Any  # [G, q]
  total: Any
  acc: Any  # [G, H, q]


def forward_kernel(static: Static, *refs):
  """Pairs by query block: an online softmax."""
  refs = _ForwardRefs(*refs)
  index, q, k, v, out, lse, top, total, acc = refs[2:]

  def init():
    top[...] = jnp.full_like(top, -jnp.inf)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

  def add(seen):
    for g in range(static.group):
      row, columns = _head(static, g)
      scores = _scores(static, q[:, columns], k[...], seen)
      old_top = top[row]
      new_top = jnp.maximum(old_top, jnp.max(scores, axis=0, keepdims=True))
      safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
      weights = jnp.exp(scores - safe)
      keep = jnp.exp(old_top - safe)
      total[row] = total[row] * keep + jnp.sum(weights, axis=0, keepdims=True)
      acc[g] = acc[g] * keep + pallas.dot(v[...], weights.astype(v.dtype), 0, 0)
      top[row] = new_top

  def finish():
    # +inf where a query saw nothing: its weights recompute to exactly 0
    nonempty = total[...] > 0
    divisor = jnp.where(nonempty, total[...], 1.0)
    lse[...] = jnp.where(nonempty, top[...] + jnp.log(divisor), jnp.inf)
    for g in range(static.group):
      _, columns = _head(static, g)
      out[:, columns] = (acc[g] / divisor[g : g + 1]).T.astype(out.dtype)

  _run_pair(refs, init, lambda e: _seen(static, partner_of(e), index), add, finish)


def _d_scores(static: Static, heads, lse, delta, seen):
  """Weights and cotangents of the scores before scaling, [k, q] fp32.

  `heads` are q, k, v and d_out of one query head.
  """
  q, k, v, d_out = heads
  weights = jnp.exp(_scores(static, q, k, seen) - lse)
  return weights, weights * (pallas.dot(v, d_out, 1, 1) - delta)


class _DqRefs(NamedTuple):
  """Refs in the order in which Pallas passes them; shapes as in `_ForwardRefs`."""

  table: Any
  parts: Any
  index: Visibility
  q: Any
  k: Any
  v: Any
  out: Any
  d_out: Any
  lse: Any
  d_q: Any
  delta: Any  # [G, q], Σ_h out · d_out: an output, which d_k needs too
  acc: Any  # scratch, [G, H, q]


def d_q_kernel(static: Static, *refs):
  """Pairs by query block."""
  refs = _DqRefs(*refs)
  index, q, k, v, out, d_out, lse, d_q, delta, acc = refs[2:]

  def init():
    for g in range(static.group):
      row, columns = _head(static, g)
      o, d_o = (x[:, columns].astype(jnp.float32) for x in (out, d_out))
      delta[row] = jnp.sum((o * d_o).T, axis=0, keepdims=True)
    acc[...] = jnp.zeros_like(acc)

  def add(seen):
    for g in range(static.group):
      row, columns = _head(static, g)
      heads = q[:, columns], k[...], v[...], d_out[:, columns]
      _, d_scores = _d_scores(static, heads, lse[row], delta[row], seen)
      acc[g] += pallas.dot(k[...], d_scores.astype(k.dtype), 0, 0)

  def finish():
    for g in range(static.group):
      _, columns = _head(static, g)
      d_q[:, columns] = (acc[g] * static.scale).T.astype(d_q.dtype)

  _run_pair(refs, init, lambda e: _seen(static, partner_of(e), index), add, finish)


class _DkvRefs(NamedTuple):
  """Refs in the order in which Pallas passes them; shapes as in `_ForwardRefs`."""

  table: Any
  parts: Any
  index: Visibility
  q: Any
  k: Any
  v: Any
  d_out: Any
  lse: Any
  delta: Any
  d_k: Any
  d_v: Any
  d_k_acc: Any  # scratch, [k, H]
  d_v_acc: Any


def d_kv_kernel(static: Static, *refs):
  """Pairs by key block."""
  refs = _DkvRefs(*refs)
  q, k, v, d_out = refs.q, refs.k, refs.v, refs.d_out
  accs = refs.d_k_acc, refs.d_v_acc

  def init():
    for acc in accs:
      acc[...] = jnp.zeros_like(acc)

  def add(seen):
    d_k_acc, d_v_acc = accs
    for g in range(static.group):
      row, columns = _head(static, g)
      heads = q[:, columns], k[...], v[...], d_out[:, columns]
      statistics = refs.lse[row], refs.delta[row]
      weights, d_scores = _d_scores(static, heads, *statistics, seen)
      d_v_acc[...] += pallas.dot(weights.astype(q.dtype), d_out[:, columns], 1, 0)
      d_k_acc[...] += pallas.dot(d_scores.astype(q.dtype), q[:, columns], 1, 0)

  def finish():
    d_k, d_v = refs.d_k, refs.d_v
    d_k[...] = (refs.d_k_acc[...] * static.scale).astype(d_k.dtype)
    d_v[...] = refs.d_v_acc[...].astype(d_v.dtype)

  _run_pair(refs, init, lambda e: _seen(static, block_of(e), refs.index), add, finish)
