"""Shapes, costs and peers of paged attention.

Axes: P rows, C new tokens of a row, N query heads, K key/value heads, H head dim, n
pages of a table.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases.op import Op, arrays_of, bytes_of
from m2jax import config
from m2jax.kernels import paged_attention

M2 = config.m2()


def _make(rows, chunk, context, heads, kv_heads, dim, page, dtype):
  """Rows of half the context to all of it, in pages in no order."""
  n, rng = context // page, np.random.default_rng(1)
  chunk = min(chunk, context // 2)
  shape = kv_heads, rows * n + 1, page, dim
  q, k, v, weight = arrays_of(
    dtype, (rows, chunk, heads, dim), shape, shape, (rows, chunk, heads, dim)
  )
  tables = 1 + rng.permutation(rows * n).reshape(rows, n)
  start = rng.integers(context // 2, context - chunk + 1, rows)
  position = start[:, None] + np.arange(chunk)
  return [q, k, v, jnp.array(tables, jnp.int32), jnp.array(position, jnp.int32), weight]


def _attend(q, k, v, tables, position, implementation=None):
  cache = paged_attention.Cache(k, v, tables)
  return paged_attention.attend(q, cache, position, implementation=implementation)


def _cost(arrays, both):
  del both
  q, k, _, _, position, _ = arrays
  position = np.asarray(position)
  pairs, stored = int(np.sum(position + 1)), int(np.sum(position[:, -1] + 1))
  flops = 2 * 2 * pairs * q.shape[2] * q.shape[3]
  return flops, bytes_of(q, q) + 2 * stored * k.shape[0] * k.shape[3] * k.dtype.itemsize


def _dense(q, k, v, tables, position):
  """jax.nn's attention over a copy of the rows' pages."""
  k, v = (jnp.moveaxis(x[:, tables], 0, 3) for x in (k, v))  # [P, n, page, K, H]
  k, v = (x.reshape(len(x), -1, *x.shape[3:]) for x in (k, v))
  seen = jnp.arange(k.shape[1]) <= position[:, None, :, None]
  return jax.nn.dot_product_attention(q, k, v, mask=seen)


def _ragged(q, k, v, tables, position):
  """jax's ragged paged attention, with its layout of pages: K and V alternating."""
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged

  (rows, chunk, heads, dim), (kv_heads, pages, page, _) = q.shape, k.shape
  both = jnp.stack([k, v], 1).transpose(2, 3, 0, 1, 4)
  out = ragged.ragged_paged_attention(
    q.reshape(rows * chunk, heads, dim),
    both.reshape(pages, page, 2 * kv_heads, dim),
    position[:, -1] + 1,
    tables,
    jnp.arange(rows + 1, dtype=jnp.int32) * chunk,
    jnp.array([rows], jnp.int32),
    sm_scale=dim**-0.5,
  )
  return out.reshape(q.shape)


def _decode_tpu(q, k, v, tables, position):
  """jax's paged attention, of one token and one layer."""
  from jax.experimental.pallas.ops.tpu import paged_attention as kernel

  block = max(n for n in (1, 2, 4, 8) if tables.shape[1] % n == 0)
  out = kernel.paged_attention(
    q[:, 0] * q.shape[3] ** -0.5,
    k,
    v,
    position[:, 0] + 1,
    tables,
    pages_per_compute_block=block,
  )
  return out[:, None]


def _decode_gpu(q, k, v, tables, position):
  """jax's paged attention, of one token and one layer."""
  from jax.experimental.pallas.ops.gpu import paged_attention as kernel

  q = q[:, 0] * q.shape[3] ** -0.5
  more = dict(pages_per_compute_block=2)  # 8, its default, exceed shared memory
  return kernel.paged_attention(q, k, v, tables, position[:, 0] + 1, **more)[:, None]


def _peers(platform, *, chunk, **_):
  peers = {'jax.nn, pages copied': _dense}
  if platform == 'tpu':
    peers['jax ragged, its layout made'] = _ragged
  if platform == 'gpu':
    peers['m2jax, Triton'] = functools.partial(_attend, implementation='gpu')
  if chunk == 1 and platform in ('tpu', 'gpu'):
    peers['jax paged'] = _decode_tpu if platform == 'tpu' else _decode_gpu
  return peers


_SMALL_M2 = dict(heads=8, kv_heads=2, dim=32, page=16, dtype=jnp.float32)
_SHARE_OF_M2 = dict(
  heads=M2.num_heads // 8,
  kv_heads=M2.num_kv_heads // 8,
  dim=M2.head_dim,
  page=64,
  dtype=jnp.bfloat16,
)
PAGED = Op(
  name='paged_attention',
  cases={
    'cpu': {
      'small M2, decode 64 x 512': dict(_SMALL_M2, rows=64, chunk=1, context=512),
      'small M2, drafts 8 x 2048': dict(_SMALL_M2, rows=8, chunk=4, context=2048),
      'small M2, prefill 2 x 2048': dict(_SMALL_M2, rows=2, chunk=512, context=2048),
    },
    'accelerator': {
      'M2 / 8, decode 64 x 32k': dict(_SHARE_OF_M2, rows=64, chunk=1, context=32768),
      'M2 / 8, drafts 64 x 32k': dict(_SHARE_OF_M2, rows=64, chunk=4, context=32768),
      'M2 / 8, prefill 2 x 32k': dict(_SHARE_OF_M2, rows=2, chunk=2048, context=32768),
    },
  },
  make=_make,
  ours=_attend,
  reference=functools.partial(_attend, implementation='reference'),
  peers=_peers,
  cost=_cost,
  wrt=0,
  small=dict(rows=2, context=1024),
)
