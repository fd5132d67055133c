"""Paged attention on Hopper: a Pallas Mosaic GPU kernel that copies pages by tables.

The default where the device is a Hopper GPU and jax 0.11 or later; `gpu` elsewhere.

A program is one warpgroup. It computes a block of a row's queries for one key/value
head, over one of several parts of the row's keys, as in `gpu` (FlashDecoding). The
tensor memory accelerator copies the pages of later steps into a ring of slots in shared
memory while the tensor cores multiply the current one.

Source: FlashAttention-3 (arXiv:2407.08608) for the order of the loop; the rest as in
`gpu`.

Axes: P rows, C new tokens of a row, N query heads, K key/value heads, H head dim, L
layers; m blocks of a row's queries, q rows of a block; k keys of a step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from m2jax.kernels import block_sizes
from m2jax.kernels.paged_attention.blocks import MOST_TREE, Blocks, Seen, in_parts
from m2jax.kernels.paged_attention.cache import Cache

_HOPPER = '9.0'
_LEAST_JAX = 0, 11  # its `load` takes no index, and the kernel can be interpreted
_DTYPES = (jnp.bfloat16, jnp.float16)
_ROWS = 64  # of a product of a warpgroup
_LANES = 64  # of 16 bits in a swizzled row of shared memory


class _Static(NamedTuple):
  scale: float
  blocks: Blocks  # of _ROWS rows
  parts: int  # of a row's keys
  page: int
  pages: int  # of a step
  slots: int  # of the ring

  @property
  def keys(self) -> int:
    """k."""
    return self.page * self.pages


class _Inputs(NamedTuple):
  """Refs in GPU memory."""

  base: Any  # [K] index of a head's first page in k and v
  tables: Any  # [P, pages of a row]
  length: Any  # [P, m]
  start: Any  # [P] of the chunk
  position: Any  # [P, m, q]
  tree: Any  # [P, m, q] or None
  q: Any  # [P, K, m, q, H]
  k: Any  # [L·K·pages, tokens of a page, H]
  v: Any


class _Scratch(NamedTuple):
  """Refs in shared memory."""

  q: Any  # [q, H]
  k: Any  # [slots, k, H]
  v: Any
  weights: Any  # [q, k]
  out: Any  # [q, H] fp32
  lse: Any  # [q] fp32
  q_ready: Any  # barriers
  ready: Any  # one a slot


def _rows(ref):
  """[q] of GPU memory in registers, as reductions over a product's columns are."""
  layout = plgpu.Layout.WGMMA.reduce(1)
  return plgpu.load(ref, layout=layout, optimized=False)


def _as_columns(x, columns):
  """[q] → [q, columns]."""
  return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def _seen(static: _Static, first, position, tree, start):
  """[q, k] bool: which of the positions from `first` on the queries see."""
  shape = _ROWS, static.keys
  key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first
  found = key <= _as_columns(position, static.keys)
  if tree is None:
    return found
  at = key - start
  bits = _as_columns(tree, static.keys)
  # No shift by what is not 0 to 31.
  within = jnp.minimum(jnp.maximum(at, 0), MOST_TREE - 1)
  bit = lax.shift_right_logical(bits, within) & 1
  return found & ((at < 0) | (bit == 1))


def _zero_unstored(static: _Static, values, first, length):
  """Clears rows of values that no token has stored, which may be anything, also NaN."""
  loaded = plgpu.load(values, layout=plgpu.Layout.WGMMA, optimized=False)
  shape = loaded.shape
  row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
  values[...] = jnp.where(row + first < length, loaded, jnp.zeros_like(loaded))


def _kernel(static: _Static, tree: bool, *refs):
  """Grid: rows x key/value heads, blocks of queries, parts."""
  count = len(_Inputs._fields) - (not tree)
  given = list(refs[:count])
  if not tree:
    given.insert(_Inputs._fields.index('tree'), None)
  inputs, (out, lse) = _Inputs(*given), refs[count : count + 2]
  scratch = _Scratch(*refs[count + 2 :])
  head_of_row, block, part = map(lax.axis_index, ('lead', 'block', 'part'))
  kv_heads, keys, dim = static.blocks.kv_heads, static.keys, inputs.q.shape[-1]
  row, head = lax.div(head_of_row, kv_heads), lax.rem(head_of_row, kv_heads)
  length, base = inputs.length[row, block], inputs.base[head]
  most = inputs.tables.shape[1]
  steps = lax.div(length + (keys - 1), keys)
  per = lax.div(steps + (static.parts - 1), static.parts)
  begin = jnp.minimum(part * per, steps)
  end = jnp.minimum(begin + per, steps)

  def fetch(step):
    slot = lax.rem(step - begin, static.slots)
    for i in range(static.pages):
      # Pages beyond the table's end are masked; they must only exist.
      at = base + inputs.tables[row, jnp.minimum(step * static.pages + i, most - 1)]
      where = pl.ds(i * static.page, static.page)
      for source, target in ((inputs.k, scratch.k), (inputs.v, scratch.v)):
        plgpu.copy_gmem_to_smem(
          source.at[at], target.at[slot, where], scratch.ready.at[slot]
        )

  for ahead in range(static.slots):
    pl.when(begin + ahead < end)(functools.partial(fetch, begin + ahead))
  plgpu.copy_gmem_to_smem(inputs.q.at[row, head, block], scratch.q, scratch.q_ready)
  plgpu.barrier_wait(scratch.q_ready)
  position = _rows(inputs.position.at[row, block])
  bits = _rows(inputs.tree.at[row, block]) if tree else None
  start = inputs.start[row]

  def add(step, carry):
    top, sums, acc = carry
    slot, first = lax.rem(step - begin, static.slots), step * keys
    plgpu.barrier_wait(scratch.ready.at[slot])
    k, v = scratch.k.at[slot], scratch.v.at[slot]

    def scores_of(product):
      plgpu.wgmma(product, scratch.q, k.transpose((1, 0)))
      return product[...]

    scores = pl.run_scoped(scores_of, plgpu.ACC((_ROWS, keys), jnp.float32))
    visible = _seen(static, first, position, bits, start)
    scores = jnp.where(visible, scores * static.scale, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    safe = jnp.where(new_top == -jnp.inf, jnp.zeros_like(new_top), new_top)
    weights = jnp.exp(scores - _as_columns(safe, keys))
    keep = jnp.exp(top - safe)
    scratch.weights[...] = weights.astype(scratch.weights.dtype)
    pl.when(first + keys > length)(
      functools.partial(_zero_unstored, static, v, first, length)
    )
    plgpu.commit_smem()

    def update_of(product):
      plgpu.wgmma(product, scratch.weights, v)
      return product[...]

    update = pl.run_scoped(update_of, plgpu.ACC((_ROWS, dim), jnp.float32))
    plgpu.commit_smem()  # all warps have read the slot
    pl.when(step + static.slots < end)(functools.partial(fetch, step + static.slots))
    sums = sums * keep + jnp.sum(weights, axis=1)
    return new_top, sums, acc * _as_columns(keep, dim) + update

  cast = functools.partial(plgpu.layout_cast, new_layout=plgpu.Layout.WGMMA)
  of_rows = functools.partial(
    plgpu.layout_cast, new_layout=plgpu.Layout.WGMMA.reduce(1)
  )
  init = (
    of_rows(jnp.full((_ROWS,), -jnp.inf, jnp.float32)),
    of_rows(jnp.zeros((_ROWS,), jnp.float32)),
    cast(jnp.zeros((_ROWS, dim), jnp.float32)),
  )
  top, sums, acc = lax.fori_loop(begin, end, add, init)
  nonempty = sums > 0
  divisor = jnp.where(nonempty, sums, jnp.ones_like(sums))
  scratch.out[...] = acc / _as_columns(divisor, dim)
  scratch.lse[...] = jnp.where(
    nonempty, top + jnp.log(divisor), jnp.full_like(top, -jnp.inf)
  )
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(scratch.out, out.at[part, row, head, block])
  plgpu.copy_smem_to_gmem(scratch.lse, lse.at[part, row, head, block])
  plgpu.wait_smem_to_gmem(0)


def _scratch(static: _Static, dtype, dim: int) -> _Scratch:
  def tile(shape, dtype, lanes):
    transforms = plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)

  arrivals = 2 * static.pages
  return _Scratch(
    q=tile((_ROWS, dim), dtype, _LANES),
    k=tile((static.slots, static.keys, dim), dtype, _LANES),
    v=tile((static.slots, static.keys, dim), dtype, _LANES),
    weights=tile((_ROWS, static.keys), dtype, _LANES),
    out=tile((_ROWS, dim), jnp.float32, _LANES // 2),
    lse=plgpu.SMEM((_ROWS,), jnp.float32),
    q_ready=plgpu.Barrier(),
    ready=plgpu.Barrier(num_arrivals=arrivals, num_barriers=static.slots),
  )


@functools.partial(jax.jit, static_argnums=0)
def _call(static: _Static, q, cache: Cache, seen: Seen):
  """q [P, K, m, q, H] → per part out like q and logsumexp [P, K, m, q], fp32."""
  (P, K, m, rows, dim), (_, _, pages, page, _) = q.shape, cache.k.shape
  base = (cache.layer * K + jnp.arange(K, dtype=jnp.int32)) * pages
  inputs = _Inputs(
    *(base, cache.tables, seen.length, seen.start, seen.position, seen.tree, q),
    *(x.reshape(-1, page, dim) for x in (cache.k, cache.v)),
  )
  shape = static.parts, P, K, m, rows
  call = plgpu.kernel(
    functools.partial(_kernel, static, seen.tree is not None),
    out_type=(
      jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    ),
    scratch_types=tuple(_scratch(static, q.dtype, dim)),
    grid=(P * K, m, static.parts),
    grid_names=('lead', 'block', 'part'),
  )
  with jax.enable_x64(False):  # Mosaic GPU has no loops over int64
    return call(*(x for x in inputs if x is not None))


def _capability() -> str:
  """Compute capability of the local GPU; Hopper's if there is none."""
  if jax.default_backend() != 'gpu':
    return _HOPPER
  return jax.local_devices()[0].compute_capability


def unsupported_reason(q, cache: Cache, position, subtree_end=None) -> str | None:
  """Why the kernel does not support these tensors; None where it does."""
  del position
  if jax.__version_info__ < _LEAST_JAX:
    return f'jax {jax.__version__}: Mosaic GPU needs 0.11; use the Triton kernel'
  if (capability := _capability()) != _HOPPER:
    return f'compute capability {capability}: the kernel is for Hopper, {_HOPPER}'
  k, v = cache.k, cache.v
  if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
    return f'{q.dtype}, {k.dtype}, {v.dtype}: must be the same 16-bit float'
  page, dim, group = cache.page_tokens, q.shape[3], q.shape[2] // k.shape[1]
  if page < 8 or page > 128 or page & (page - 1):
    return f'page {page}: must be a power of two, 8 to 128'
  if dim % _LANES or dim > 256:
    return f'head dim {dim}: must be a multiple of {_LANES}, at most 256'
  if group > _ROWS:
    return f'{group} query heads a key/value head: at most {_ROWS}'
  if subtree_end is not None and q.shape[1] > MOST_TREE:
    return f'a tree of {q.shape[1]} tokens: at most {MOST_TREE}'
  return None


def _static(q, cache: Cache, scale: float) -> _Static:
  sizes = block_sizes.get('gpu', 'paged_attention')
  (P, C, N, _), K, page = q.shape, cache.k.shape[1], cache.page_tokens
  blocks = Blocks(K, N // K, C, min(C, _ROWS // (N // K)), _ROWS)
  pages = max(1, sizes['keys'] // page)
  steps = -(-cache.tables.shape[1] // pages)
  parts = max(1, min(sizes['programs'] // (P * K * blocks.number), steps))
  return _Static(scale, blocks, parts, page, pages, sizes['slots'])


def attend(q, cache: Cache, position, subtree_end=None, *, scale):
  """Same contract as `reference.attend`.

  Raises:
    ValueError: `unsupported_reason`: dtypes, pages or heads that the kernel lacks, or a
      large tree.
  """
  cache = cache.stacked()
  if reason := unsupported_reason(q, cache, position, subtree_end):
    raise ValueError(f'attend by Mosaic GPU: {reason}')
  static = _static(q, cache, scale) if q.size else None
  return in_parts(_call, static, q, cache, position, subtree_end)
