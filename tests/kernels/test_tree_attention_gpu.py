"""The GPU kernel of forest attention, interpreted on the CPU with small blocks: values
and gradients against the reference, and what it lowers to for CUDA (law 7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2jax.kernels import tree_attention
from m2jax.kernels.tree_attention import Visibility, gpu
from tests.kernels import cuda
from tests.kernels.test_tree_attention import arrays, random_forest, value_and_grads

ROWS, LENGTH, HEADS, KV_HEADS, DIM = (
  2,
  75,
  4,
  2,
  8,
)  # blocks of 16 and 32, the last cut short
# a program's block is twice its partners', or half of them
BLOCKS = {
  'tree_attention': dict(tokens=32, partner_tokens=16, warps=4, stages=2),
  'tree_attention_backward': dict(tokens=16, partner_tokens=32, warps=4, stages=2),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  """Kernels run as XLA loops on the CPU, in small blocks."""
  call = functools.partial(gpu.pl.pallas_call, interpret=True)
  monkeypatch.setattr(gpu.pl, 'pallas_call', call)
  monkeypatch.setattr(gpu.block_sizes, 'get', lambda platform, op: BLOCKS[op])


def tensors(rng, dtype=np.float32, queries=LENGTH):
  return arrays(rng, ROWS, queries, LENGTH, HEADS, KV_HEADS, DIM, dtype)


def assert_same(inputs, end, *, atol=3e-6, **more):
  """The kernel agrees with the reference, run in fp32, on output and gradients."""
  got = value_and_grads(*inputs, end, implementation='gpu', **more)
  wide = (x.astype(jnp.float32) for x in inputs)
  want = value_and_grads(*wide, end, implementation='reference', **more)
  for name, a, b in zip(('out', 'd_q', 'd_k', 'd_v'), got, want, strict=True):
    assert a.dtype == inputs[0].dtype, name
    scale = max(1.0, np.abs(b).max())
    np.testing.assert_allclose(
      np.float32(a), b, atol=atol * scale, rtol=0, err_msg=name
    )


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_reference(seed):
  """Random trees, ragged rows, two query heads on each key head, odd sizes."""
  rng = np.random.default_rng(seed)
  assert_same(tensors(rng), random_forest(rng, ROWS, LENGTH)[1])


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_low_precision(dtype):
  """Inputs of 16 bits accumulate in fp32: near the result of fp32 inputs."""
  rng = np.random.default_rng(1)
  assert_same(tensors(rng, dtype), random_forest(rng, ROWS, LENGTH)[1], atol=0.02)


@pytest.mark.parametrize('window, sinks', [(None, 0), (9, 2)])
def test_query_subsets_and_windows(window, sinks):
  """Queries at any indices, some at none; windows and sinks count positions."""
  rng = np.random.default_rng(2)
  _, end, position = random_forest(rng, ROWS, LENGTH)
  end[1, :20] = 0  # tokens that nobody sees, and queries that see nothing
  index = np.stack([rng.permutation(LENGTH)[:40] for _ in range(ROWS)]).astype(np.int32)
  at = np.take_along_axis(position, index, 1)
  index[:, 3] = -1
  more = dict(q_index=index)
  if window is not None:
    more |= dict(window=window, sinks=sinks, q_position=at, k_position=position)
  assert_same(tensors(rng, queries=40), end, **more)


def test_unseen_blocks_are_not_read():
  """NaN in blocks that nobody asked for reaches nothing: 0 · NaN would."""
  inputs = tensors(np.random.default_rng(3))
  end = np.full((ROWS, LENGTH), LENGTH, np.int32)
  end[:, :32] = 32
  want = value_and_grads(*inputs, end, implementation='gpu')
  dirty = [x.at[:, :32].set(jnp.nan) for x in inputs]
  got = value_and_grads(*dirty, end, implementation='gpu')
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a[:, 32:], b[:, 32:])


@pytest.mark.parametrize(
  'dtype, x64, kernels',
  [(jnp.bfloat16, False, 3), (jnp.float32, True, 3), (jnp.float64, True, 0)],
)
def test_lowers_for_cuda(monkeypatch, dtype, x64, kernels):
  """Without a name three Triton kernels are lowered for CUDA at M2's head dim, with x64
  too, and the reference for a dtype that they lack."""
  monkeypatch.undo()
  jax.clear_caches()
  with jax.enable_x64(x64):
    q = jax.ShapeDtypeStruct((1, 300, 4, 128), dtype)
    kv = jax.ShapeDtypeStruct((1, 300, 2, 128), dtype)
    end = jax.ShapeDtypeStruct((1, 300), jnp.int32)
    run = functools.partial(value_and_grads.__wrapped__, implementation=None)
    assert cuda.lowered(run, q, kv, kv, q, end).count(cuda.CALL) == kernels


def test_unsupported():
  """The error names what the kernel does not support."""
  end = jnp.full((1, 4), 4)
  for shape, dtype, match in (
    ((1, 4, 2, 8), jnp.float8_e4m3fn, 'float8.*must all be bf16'),
    ((1, 4, 2, 300), jnp.float32, 'head dim 300'),
  ):
    q = jnp.zeros(shape, dtype)
    with pytest.raises(ValueError, match=match):
      tree_attention.attend(q, q, q, Visibility(end), implementation='gpu')
