"""Shapes, costs and peers of tree attention.

Axes: B rows, S tokens, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases.op import Op, arrays_of, bytes_of
from m2jax import config
from m2jax.kernels import tree_attention

M2 = config.m2()


def tree(kind: str, length: int) -> np.ndarray:
  """subtree_end [S] of a 'chain', 8 'documents', or a 'star' with 15 answers."""
  if kind == 'chain':
    return np.full(length, length, np.int32)
  parts = 8 if kind == 'documents' else 16
  part = -(-length // parts)
  end = np.minimum((np.arange(length) // part + 1) * part, length).astype(np.int32)
  if kind == 'star':  # all answers share the first part, the prompt
    end[:part] = length
  return end


def visible_pairs(end: np.ndarray) -> int:
  """Number of visible query-key pairs of rows [B, S]."""
  return int(np.sum(np.maximum(end - np.arange(end.shape[1]), 0)))


def _attention_make(rows, length, heads, kv_heads, dim, kind, dtype):
  q, k, v, weight = arrays_of(
    dtype,
    *((rows, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)),
  )
  return [q, k, v, jnp.array(np.tile(tree(kind, length), (rows, 1))), weight]


def _attention(q, k, v, end, implementation=None):
  seen = tree_attention.Visibility(end)
  return tree_attention.attend(q, k, v, seen, implementation=implementation)


def _attention_cost(arrays, both):
  q, k, v, end, _ = arrays
  matmuls = 6 if both else 2
  flops = 2 * matmuls * visible_pairs(np.asarray(end)) * q.shape[2] * q.shape[3]
  forward = bytes_of(q, k, v, q)
  return flops, forward + (bytes_of(q, k, v, q, q, q, k, v) if both else 0)


def _dense(q, k, v, end):
  """jax.nn's attention with a dense mask."""
  at = jnp.arange(q.shape[1])
  seen = (at[None, None] <= at[None, :, None]) & (at[None, :, None] < end[:, None])
  return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])


def _cudnn(q, k, v, end):
  del end
  return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation='cudnn')


def _splash(q, k, v, end):
  """Splash attention, which supports documents (as segments) but no other tree."""
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as mask,
  )

  rows, length, heads, dim = q.shape
  block = min(512, length)
  names = ('q', 'kv', 'kv_compute', 'q_dkv', 'kv_dkv', 'kv_dkv_compute', 'q_dq')
  sizes = splash.BlockSizes(**{f'block_{n}': block for n in (*names, 'kv_dq')})
  causal = mask.MultiHeadMask(
    [mask.CausalMask((length, length))] * (heads // k.shape[2])
  )
  kernel = splash.make_splash_mqa_single_device(causal, block_sizes=sizes)
  q = q.reshape(rows, length, k.shape[2], -1, dim).transpose(0, 2, 3, 1, 4)
  k, v = (x.swapaxes(1, 2) for x in (k, v))
  run = jax.vmap(kernel, in_axes=(0, 0, 0, None))
  segments = jax.vmap(lambda e: splash.SegmentIds(e, e))(end)
  out = jax.vmap(run)(q * dim**-0.5, k, v, segments)
  return out.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, dim)


def _tokamax_attention(q, k, v, end):
  import tokamax

  at = jnp.arange(q.shape[1])
  seen = (at[None, None] <= at[None, :, None]) & (at[None, :, None] < end[:, None])
  return tokamax.dot_product_attention(q, k, v, mask=seen[:, None])


def _attention_peers(platform, *, kind, **_):
  peers = {'jax.nn, dense mask': _dense, 'tokamax, dense mask': _tokamax_attention}
  if platform == 'tpu' and kind != 'star':
    peers['splash attention'] = _splash
  if platform == 'gpu' and kind == 'chain':
    peers['cuDNN'] = _cudnn
  return peers


_SMALL_M2 = dict(rows=8, length=512, heads=8, kv_heads=2, dim=32, dtype=jnp.float32)
_LARGE_M2 = dict(
  rows=2,
  length=8192,
  heads=M2.num_heads,
  kv_heads=M2.num_kv_heads,
  dim=M2.head_dim,
  dtype=jnp.bfloat16,
)
ATTENTION = Op(
  name='tree_attention',
  cases={
    'cpu': {
      'small M2, 8 x 512': dict(_SMALL_M2, kind='chain'),
      'documents, 1 x 2048': dict(_SMALL_M2, rows=1, length=2048, kind='documents'),
      'star, 1 x 2048': dict(_SMALL_M2, rows=1, length=2048, kind='star'),
    },
    'accelerator': {
      'M2, 2 x 8192': dict(_LARGE_M2, kind='chain'),
      'M2, documents, 2 x 8192': dict(_LARGE_M2, kind='documents'),
      'M2, star, 2 x 8192': dict(_LARGE_M2, kind='star'),
    },
  },
  make=_attention_make,
  ours=_attention,
  reference=functools.partial(_attention, implementation='reference'),
  peers=_attention_peers,
  cost=_attention_cost,
  wrt=3,
  small=dict(rows=1, length=512),
)
