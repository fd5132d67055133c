"""The GPU kernels on a GPU, with the block sizes of its kind: values and gradients
against NumPy loops, or the reference on the CPU in fp32 (law 7).

  JAX_PLATFORMS=cuda,cpu pytest -m gpu_backend tests/kernels/test_gpu_backend.py
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax.kernels import paged_attention
from m2jax.kernels.paged_attention import mosaic_gpu
from m2jax.kernels.token_logprobs import token_logprobs
from tests.kernels import paged
from tests.kernels import test_grouped_matmul as grouped
from tests.kernels import test_qk_norm_rope as norm
from tests.kernels import test_token_logprobs as logprobs
from tests.kernels import test_tree_attention as tree

pytestmark = [
  pytest.mark.gpu_backend,
  pytest.mark.skipif(
    jax.default_backend() != 'gpu', reason='needs a GPU and JAX_PLATFORMS=cuda,cpu'
  ),
]
HALF = [jnp.bfloat16, jnp.float16]
FLOATS = [*HALF, jnp.float32]


def tolerance(dtype) -> float:
  """Relative to the largest number of an array."""
  return {'bfloat16': 0.02, 'float16': 4e-3, 'float32': 1e-5}[jnp.dtype(dtype).name]


def on_cpu(arrays):
  return jax.device_put(arrays, jax.devices('cpu')[0])


def assert_close(names, got, want, dtype):
  for name, a, b in zip(names, got, want, strict=True):
    a, b = np.float64(a), np.float64(b)
    scale = max(1.0, np.abs(b).max())
    np.testing.assert_allclose(
      a, b, atol=tolerance(dtype) * scale, rtol=0, err_msg=name
    )


@pytest.mark.parametrize('dtype', FLOATS)
@pytest.mark.parametrize('page', [16, 64])
@pytest.mark.parametrize('chunk, trees', [(1, False), (9, True), (70, False)])
@pytest.mark.parametrize('implementation', ['gpu', 'mosaic_gpu'])
def test_paged_attention(implementation, chunk, trees, page, dtype):
  """Decoding, drafts and prefill in several blocks; NaN where nothing is stored."""
  one = paged.case(
    np.random.default_rng(page + chunk), chunk, page=page, dtype=dtype, tree=trees
  )
  if implementation == 'mosaic_gpu' and (reason := mosaic_gpu.unsupported_reason(*one)):
    pytest.skip(reason)
  paged.check(one, implementation, atol=tolerance(dtype))


@pytest.mark.parametrize('implementation', ['gpu', 'mosaic_gpu'])
def test_paged_attention_in_many_parts(implementation):
  """Long rows, each divided over many programs, and more pages than slots of a ring."""
  rng = np.random.default_rng(0)
  rows, pages, page, heads, kv_heads, dim = 2, 96, 64, 12, 2, 128
  shape = kv_heads, rows * pages + 1, page, dim
  k, v, q = (
    jnp.array(rng.normal(size=s), jnp.bfloat16)
    for s in (shape, shape, (rows, 1, heads, dim))
  )
  tables = jnp.array(1 + rng.permutation(rows * pages).reshape(rows, pages), jnp.int32)
  arrays = q, paged_attention.Cache(k, v, tables), np.array([[6143], [4000]], np.int32)
  if implementation == 'mosaic_gpu' and (
    reason := mosaic_gpu.unsupported_reason(arrays[0], arrays[1].stacked(), arrays[2])
  ):
    pytest.skip(reason)
  run = functools.partial(paged_attention.attend, logsumexp=True)
  got = jax.jit(functools.partial(run, implementation=implementation))(*arrays)
  wide = jax.tree.map(
    lambda x: np.float32(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x),
    arrays,
  )
  want = run(*on_cpu(wide), implementation='reference')
  assert_close(('out', 'lse'), got, want, jnp.bfloat16)


@pytest.mark.parametrize('dtype', FLOATS)
@pytest.mark.parametrize('dim', [64, 128])
@pytest.mark.parametrize('window, sinks', [(None, 0), (90, 2)])
def test_tree_attention(window, sinks, dim, dtype):
  """Random trees over several blocks; windows; queries at any indices."""
  rng = np.random.default_rng(dim)
  rows, length, queries = 2, 700, 300
  _, end, position = tree.random_forest(rng, rows, length)
  index = np.stack([rng.permutation(length)[:queries] for _ in range(rows)])
  index = index.astype(np.int32)
  more = dict(q_index=index)
  if window is not None:
    at = np.take_along_axis(position, index, 1)
    more |= dict(window=window, sinks=sinks, q_position=at, k_position=position)
  inputs = tree.arrays(rng, rows, queries, length, 6, 2, dim, dtype)
  got = tree.value_and_grads(*inputs, end, implementation='gpu', **more)
  wide = on_cpu([np.float32(x) for x in inputs])
  want = tree.value_and_grads(*wide, end, implementation='reference', **more)
  assert_close(('out', 'd_q', 'd_k', 'd_v'), got, want, dtype)


@pytest.mark.parametrize('dtype', FLOATS)
@pytest.mark.parametrize('sizes', grouped.SIZES.values(), ids=grouped.SIZES.keys())
def test_grouped_matmul(sizes, dtype):
  """Every way of cutting rows into groups, tiles cut short in all dimensions."""
  rng = np.random.default_rng(0)
  sizes, (inner, outer) = 7 * np.array(sizes), (200, 136)
  shapes = (7 * grouped.ROWS, inner), (len(sizes), inner, outer)
  lhs, rhs, weight = (
    jnp.array(rng.normal(size=s), dtype) for s in (*shapes, (7 * grouped.ROWS, outer))
  )
  want = grouped.by_hand(lhs, rhs, sizes, weight)
  lhs, weight = (x.at[sizes.sum() :].set(jnp.nan) for x in (lhs, weight))
  sizes = jnp.array(sizes, jnp.int32)
  got = grouped.value_and_grads(lhs, rhs, sizes, weight, 'gpu')
  assert_close(('out', 'd_lhs', 'd_rhs'), got, want, dtype)


@pytest.mark.parametrize('dtype', FLOATS)
@pytest.mark.parametrize('split', [False, True])
def test_qk_norm_rope(split, dtype):
  """The whole and the split form; three heads are no power of two."""
  arrays = norm.tensors(2, dtype, tokens=333)
  variance = jnp.full((333, 1), 2.0) if split else None
  got = norm.value_and_grads(*arrays, 'gpu', variance)
  wide = on_cpu([np.float32(x) for x in arrays])
  variance = None if variance is None else on_cpu(np.asarray(variance))
  want = norm.value_and_grads(*wide, 'reference', variance)
  names = ('out', 'd_x', 'd_scale', 'd_variance')[: len(want)]
  assert_close(names, got, want, dtype)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_token_logprobs(dtype):
  """Logits in fp32 whatever the default precision of this platform's products."""
  rng = np.random.default_rng(0)
  tokens, width, vocab = 300, 256, 1000
  hidden = jnp.array(rng.normal(size=(tokens, width)), dtype)
  head = jnp.array(rng.normal(size=(width, vocab)) / width**0.5, jnp.float32)
  targets = jnp.array(rng.integers(0, vocab, tokens), jnp.int32)
  weight = jnp.array(rng.normal(size=tokens), jnp.float32)
  arrays = hidden, head, targets, weight
  got = logprobs.value_and_grads(token_logprobs, *arrays)
  wide = on_cpu([np.float32(hidden), *map(np.asarray, arrays[1:])])
  want = logprobs.value_and_grads(logprobs.plain, *wide)
  assert_close(('logprob', 'entropy'), got[:2], want[:2], jnp.float32)
  assert_close(('d_hidden', 'd_head'), got[2:], want[2:], dtype)
