"""Forest attention on GPU: Pallas Triton kernels that skip blocks that are not seen.

A program computes a block of queries of one head or, for d_k and d_v, a block of keys
with all the query heads that share it, and loops over its block pairs: memory has a
list of its partners, first those that need no mask, and both counts. As on TPU,
extremes of `q_index` and `subtree_end` decide which pairs of blocks are seen. The rest
is FlashAttention (arXiv:2205.14135, 2307.08691) with weights recomputed in the backward
pass, in powers of two.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, G = N/K, H head dim;
m, n blocks of a row; in kernels q, k tokens of a query and of a key block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from m2jax.kernels import block_sizes
from m2jax.kernels.pallas import Blocked, blocked, dot
from m2jax.kernels.tree_attention.block_pairs import FULL, block_kinds
from m2jax.kernels.tree_attention.visibility import Visibility

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


_LEAST = 16  # of each side of a product
_LN_2 = math.log(2)


class _Static(NamedTuple):
  scale: float
  rows: int
  group: int
  block_q: int
  block_k: int
  key_blocks: int  # of a row

  @property
  def padded(self) -> int:
    """Queries and keys are padded to a multiple of it."""
    return max(self.block_q, self.block_k)

  def swapped(self) -> _Static:
    """The same for a kernel of blocks of keys."""
    keys = self.key_blocks * self.block_k
    return self._replace(
      block_q=self.block_k, block_k=self.block_q, key_blocks=keys // self.block_q
    )


def _lists(kinds):
  """kinds [B, m, n] → partners [B, m, n] int32, FULL ones first, then PARTIAL ones; and
  where the two end [B, m, 2]."""
  partners = jnp.argsort(-kinds, axis=-1, stable=True).astype(jnp.int32)
  ends = jnp.stack([kinds == FULL, kinds > 0], -2)
  return partners, jnp.sum(ends, axis=-1, dtype=jnp.int32)


def _over_partners(partners, ends, add, init):
  """add(partner id, whether it needs a mask, carry) → carry over all block pairs."""

  def of(masked):
    return lambda t, carry: add(partners[t], masked, carry)

  full, seen = ends[0], ends[1]
  carry = lax.fori_loop(np.int32(0), full, of(False), init)
  return lax.fori_loop(full, seen, of(True), carry)


def _seen(static: _Static, q_at, k_id, index: Visibility):
  """[q, k] bool: which keys of block `k_id` the queries `q_at` see."""
  at = pl.ds(k_id * static.block_k, static.block_k)
  key = k_id * static.block_k + lax.iota(jnp.int32, static.block_k)
  q = index.q_index[q_at][:, None]
  seen = (key[None] <= q) & (q < index.subtree_end[at][None])
  if index.window is not None:
    k_at = index.k_position[at][None]
    near = index.q_position[q_at][:, None] - k_at < index.window
    seen &= near | (k_at < index.sinks)
  return seen


def _scores(static: _Static, q, k, seen):
  """Base 2. `seen` None: all."""
  scores = dot(q, k, 1, 1) * (static.scale / _LN_2)
  return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


class _ForwardRefs(NamedTuple):
  """Refs in the order in which Pallas passes them."""

  index: Visibility  # of whole rows
  partners: Any  # [n] ids of key blocks
  ends: Any  # [2] of those without a mask, and of all that are seen
  q: Any  # [q, H]
  k: Any  # [S, H]
  v: Any
  out: Any  # like q
  lse: Any  # [q]


def _forward_kernel(static: _Static, *refs):
  """A block of queries of one head: an online softmax."""
  index, partners, ends, q, k, v, out, lse = _ForwardRefs(*refs)
  q_at = pl.ds(pl.program_id(1) * static.block_q, static.block_q)
  queries = q[...]

  def add(k_id, masked, carry):
    top, total, acc = carry
    keys = pl.ds(k_id * static.block_k, static.block_k)
    seen = _seen(static, q_at, k_id, index) if masked else None
    scores = _scores(static, queries, k[keys], seen)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    weights = jnp.exp2(scores - safe[:, None])
    keep = jnp.exp2(top - safe)
    update = dot(weights.astype(v.dtype), v[keys], 1, 0)
    total = total * keep + jnp.sum(weights, axis=1)
    return new_top, total, acc * keep[:, None] + update

  none = jnp.full(static.block_q, -jnp.inf, jnp.float32)
  init = none, jnp.zeros_like(none), jnp.zeros(queries.shape, jnp.float32)
  top, total, acc = _over_partners(partners, ends, add, init)
  # +inf where a query saw nothing: its weights recompute to exactly 0
  nonempty = total > 0
  divisor = jnp.where(nonempty, total, 1.0)
  lse[...] = jnp.where(nonempty, top * _LN_2 + jnp.log(divisor), jnp.inf)
  out[...] = (acc / divisor[:, None]).astype(out.dtype)


def _d_scores(static, q, k, v, d_out, lse, delta, seen):
  """Weights and cotangents of the scores before scaling, [q, k] fp32."""
  weights = jnp.exp2(_scores(static, q, k, seen) - (lse / _LN_2)[:, None])
  return weights, weights * (dot(d_out, v, 1, 1) - delta[:, None])


class _BackwardRefs(NamedTuple):
  """Refs in the order in which Pallas passes them, without the outputs."""

  index: Visibility  # of whole rows
  partners: Any
  ends: Any
  q: Any
  k: Any
  v: Any
  d_out: Any  # like q
  lse: Any
  delta: Any  # like lse


def _d_q_kernel(static: _Static, *refs):
  """A block of queries of one head; shapes as in `_ForwardRefs`."""
  (*refs, d_q) = refs
  index, partners, ends, q, k, v, d_out, lse, delta = _BackwardRefs(*refs)
  q_at = pl.ds(pl.program_id(1) * static.block_q, static.block_q)
  fixed = d_out[...], lse[...], delta[...]
  queries = q[...]

  def add(k_id, masked, acc):
    keys = pl.ds(k_id * static.block_k, static.block_k)
    seen = _seen(static, q_at, k_id, index) if masked else None
    _, d_scores = _d_scores(static, queries, k[keys], v[keys], *fixed, seen)
    return acc + dot(d_scores.astype(k.dtype), k[keys], 1, 0)

  acc = _over_partners(partners, ends, add, jnp.zeros(queries.shape, jnp.float32))
  d_q[...] = (acc * static.scale).astype(d_q.dtype)


def _d_kv_kernel(static: _Static, *refs):
  """k, v [k, H] of a block, q, d_out [Q, G, H] and lse, delta [G, Q] of its group."""
  *refs, d_k, d_v = refs
  index, partners, ends, q, k, v, d_out, lse, delta = _BackwardRefs(*refs)
  k_id = pl.program_id(1)
  keys, values = k[...], v[...]

  def add(q_id, masked, carry):
    q_at = pl.ds(q_id * static.block_q, static.block_q)
    seen = _seen(static, q_at, k_id, index) if masked else None

    def head(g, carry):
      d_k, d_v = carry
      queries, cotangents = q[q_at, g], d_out[q_at, g]
      weights, d_scores = _d_scores(
        static, queries, keys, values, cotangents, lse[g, q_at], delta[g, q_at], seen
      )
      d_v += dot(weights.astype(q.dtype), cotangents, 0, 0)
      return d_k + dot(d_scores.astype(q.dtype), queries, 0, 0), d_v

    return lax.fori_loop(0, static.group, head, carry)

  zeros = jnp.zeros(keys.shape, jnp.float32)
  acc_k, acc_v = _over_partners(partners, ends, add, (zeros, zeros))
  d_k[...] = (acc_k * static.scale).astype(d_k.dtype)
  d_v[...] = acc_v.astype(d_v.dtype)


class _Specs(NamedTuple):
  """Grid: heads, blocks of a row, rows. Only pointers: nothing is copied ahead."""

  index: Visibility
  partners: pl.BlockSpec
  ends: pl.BlockSpec


def _specs(index: Visibility, partners):
  whole = jax.tree.map(
    lambda x: pl.BlockSpec((None, x.shape[1]), lambda h, i, b: (b, 0)), index
  )
  n = partners.shape[2]
  return _Specs(
    whole,
    pl.BlockSpec((None, None, n), lambda h, i, b: (b, i, 0)),
    pl.BlockSpec((None, None, 2), lambda h, i, b: (b, i, 0)),
  )


def _call(
  kernel: Callable,
  static: _Static,
  index: Visibility,
  kinds: jax.Array,
  heads: int,
  tensors: list[Blocked],
  outs: list[Blocked],
):
  """One kernel over heads x blocks of a row x rows; `kinds` by the kernel's blocks."""
  sizes = _sizes(backward=kernel is not _forward_kernel)
  partners, ends = _lists(kinds)
  return pl.pallas_call(
    functools.partial(kernel, static),
    grid=(heads, kinds.shape[1], static.rows),
    in_specs=[*_specs(index, partners), *(x.spec for x in tensors)],
    out_specs=[x.spec for x in outs],
    out_shape=[x.array for x in outs],
    compiler_params=plgpu.CompilerParams(
      num_warps=sizes['warps'], num_stages=sizes['stages']
    ),
    name=f'tree_attention{kernel.__name__.removesuffix("_kernel")}',
  )(index, partners, ends, *(x.array for x in tensors))


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _q_specs(static: _Static, q, k):
  """Specs of tensors like q and like k and of statistics [B, N, Q], by query block."""
  dim, group = q.shape[3], static.group
  q_spec = pl.BlockSpec((None, static.block_q, None, dim), lambda h, i, b: (b, i, h, 0))
  k_spec = pl.BlockSpec(
    (None, k.shape[1], None, dim),
    lambda h, i, b: (b, 0, lax.div(h, np.int32(group)), 0),
  )
  return (
    q_spec,
    k_spec,
    pl.BlockSpec((None, None, static.block_q), lambda h, i, b: (b, h, i)),
  )


@functools.partial(jax.jit, static_argnums=0)
def _forward(static, q, k, v, index):
  """q [B, Q, N, H], k, v [B, S, K, H] → out like q, logsumexp [B, N, Q] fp32."""
  q_spec, k_spec, statistic = _q_specs(static, q, k)
  batch, queries, heads, _ = q.shape
  lse = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
  return _call(
    _forward_kernel,
    static,
    index,
    block_kinds(static, index),
    heads,
    blocked((q, k, v), (q_spec, k_spec, k_spec)),
    blocked((_like(q), lse), (q_spec, statistic)),
  )


@functools.partial(jax.jit, static_argnums=0)
def _backward(static, residuals, d_out):
  """Cotangents of q, k and v; `static` is that of d_q's kernel."""
  q, k, v, index, out, lse = residuals
  delta = jnp.einsum('bqnh,bqnh->bnq', out, d_out, preferred_element_type=jnp.float32)
  tensors = (q, k, v, d_out, lse, delta)
  q_spec, k_spec, statistic = _q_specs(static, q, k)
  specs = (q_spec, k_spec, k_spec, q_spec, statistic, statistic)
  (d_q,) = _call(
    _d_q_kernel,
    static,
    index,
    block_kinds(static, index),
    q.shape[2],
    blocked(tensors, specs),
    [Blocked(_like(q), q_spec)],
  )
  static = static.swapped()
  queries, dim = q.shape[1], q.shape[3]
  group = pl.BlockSpec((None, queries, static.group, dim), lambda h, i, b: (b, 0, h, 0))
  statistic = pl.BlockSpec((None, static.group, queries), lambda h, i, b: (b, h, 0))
  k_spec = pl.BlockSpec((None, static.block_k, None, dim), lambda h, i, b: (b, i, h, 0))
  specs = (group, k_spec, k_spec, group, statistic, statistic)
  d_k, d_v = _call(
    _d_kv_kernel,
    static,
    index,
    block_kinds(static, index).swapaxes(1, 2),
    k.shape[2],
    blocked(tensors, specs),
    blocked((_like(k), _like(v)), (k_spec, k_spec)),
  )
  return d_q, d_k, d_v


def unsupported_reason(q, k, v) -> str | None:
  """Why the kernel does not support these tensors; None where it does."""
  if not (q.dtype == k.dtype == v.dtype) or q.dtype not in _DTYPES:
    return f'{q.dtype}, {k.dtype}, {v.dtype}: must all be bf16, all fp16 or all fp32'
  if q.shape[3] > 256:
    return f'head dim {q.shape[3]}: at most 256 fit the registers of a program'
  return None


def forward(q, k, v, visibility: Visibility, *, scale):
  """Same contract as `reference.forward`.

  Raises:
    ValueError: `unsupported_reason`: tensors that are not all bfloat16, all float16 or
      all float32, or heads of more than 256 dims.
  """
  if reason := unsupported_reason(q, k, v):
    raise ValueError(f'attend on GPU: {reason}')
  static, index = _static(q, k, visibility, scale, backward=False)
  out, lse = _forward(static, *(_tensor(static, x) for x in (q, k, v)), index)
  return _cut(out, q), lse[:, :, : q.shape[1]]


def backward(q, k, v, visibility: Visibility, out, lse, d_out, *, scale):
  """Same contract as `reference.backward`."""
  static, index = _static(q, k, visibility, scale, backward=True)
  # as `forward` leaves it where a query saw nothing
  pad = (0, 0), (0, 0), (0, -lse.shape[2] % static.padded)
  lse = jnp.pad(lse, pad, constant_values=jnp.inf)
  tensors = [_tensor(static, x) for x in (q, k, v, out, d_out)]
  cotangents = _backward(static, (*tensors[:3], index, tensors[3], lse), tensors[4])
  return tuple(_cut(d, x) for d, x in zip(cotangents, (q, k, v), strict=True))


def _sizes(backward: bool) -> dict[str, int]:
  return block_sizes.get('gpu', f'tree_attention{"_backward" * backward}')


def _static(q, k, visibility: Visibility, scale, backward: bool):
  """Sizes for a kernel of query blocks; and padded integers of queries and keys."""
  keys, kv_heads, dim = k.shape[1:]
  sizes = _sizes(backward)
  # Blocks were chosen for heads of 128 dims in 16 bits.
  larger = max(1, q.dtype.itemsize * _padded_dim(dim) // 256)
  block_q, block_k = (
    max(_LEAST, sizes[name] // larger) for name in ('tokens', 'partner_tokens')
  )
  multiple = max(block_q, block_k)

  def pad(x, padding):
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple)), constant_values=padding)
    return x.astype(jnp.int32)

  key_blocks = -(-keys // multiple) * multiple // block_k
  group = q.shape[2] // kv_heads
  static = _Static(scale, len(q), group, block_q, block_k, key_blocks)
  return static, visibility.map(pad, pad)


def _padded_dim(dim: int) -> int:
  return max(_LEAST, pl.next_power_of_2(dim))  # blocks are powers of two


def _tensor(static: _Static, x):
  """[B, S, heads, H], S padded to full blocks and H to a power of two."""
  padded_dim = _padded_dim(x.shape[3])
  tokens = (0, -x.shape[1] % static.padded)
  return jnp.pad(x, ((0, 0), tokens, (0, 0), (0, padded_dim - x.shape[3])))


def _cut(x, like):
  """The inverse of `_tensor`, in the shape of `like`."""
  return x[:, : like.shape[1], :, : like.shape[3]]
