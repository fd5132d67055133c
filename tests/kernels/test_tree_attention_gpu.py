"""The GPU kernel of forest attention, interpreted on the CPU with small blocks: values
and gradients against NumPy, and what it lowers to for CUDA (law 7)."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2jax.kernels import block_sizes, tree_attention
from m2jax.kernels.tree_attention import Visibility
from tests.kernels import cuda
from tests.kernels import test_tree_attention as forests
from tests.kernels.test_tree_attention import random_forest, value_and_grads

ROWS, LENGTH = 2, 75  # blocks of 16 and 32, the last cut short
# a program's block is twice its partners', or half of them
BLOCKS = {
  'tree_attention': dict(tokens=32, partner_tokens=16, warps=4, stages=2),
  'tree_attention_backward': dict(tokens=16, partner_tokens=32, warps=4, stages=2),
}

check = functools.partial(forests.check, implementation='gpu')
RUN = functools.partial(value_and_grads, implementation='gpu')


@pytest.fixture(autouse=True)
def small(interpreted):
  """Kernels run as XLA loops on the CPU, in small blocks."""
  with contextlib.ExitStack() as stack:
    for op, sizes in BLOCKS.items():
      stack.enter_context(block_sizes.replaced('gpu', op, **sizes))
    yield


def tensors(rng, dtype=np.float32, queries=LENGTH):
  return forests.tensors(rng, dtype, queries, LENGTH)


@given(seed=st.integers(0, 2**32 - 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_trees(seed):
  """Random trees, ragged rows, two query heads on each key head, odd sizes."""
  rng = np.random.default_rng(seed)
  check(tensors(rng), random_forest(rng, ROWS, LENGTH)[1])


@pytest.mark.parametrize(
  'dtype', [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.long)]
)
def test_low_precision(dtype):
  """Inputs of 16 bits accumulate in fp32: the results are near those of exact sums."""
  rng = np.random.default_rng(1)
  check(tensors(rng, dtype), random_forest(rng, ROWS, LENGTH)[1], atol=0.02)


@pytest.mark.parametrize(
  'window, sinks', [pytest.param(None, 0, marks=pytest.mark.long), (9, 2)]
)
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
  check(tensors(rng, queries=40), end, **more)


def test_unseen_blocks_are_not_read():
  """NaN in blocks that nobody asked for reaches nothing: 0 · NaN would."""
  inputs = tensors(np.random.default_rng(3))
  end = np.full((ROWS, LENGTH), LENGTH, np.int32)
  end[:, :32] = 32
  want = jax.device_get(RUN(*inputs, end))
  for x in inputs:
    x[:, :32] = np.nan
  got = jax.device_get(RUN(*inputs, end))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a[:, 32:], b[:, 32:])


@pytest.mark.parametrize(
  'dtype, x64, kernels',
  [
    pytest.param(jnp.bfloat16, False, 3, marks=pytest.mark.long),
    (jnp.float32, True, 3),
    (jnp.float64, True, 0),
  ],
)
def test_lowers_for_cuda(dtype, x64, kernels):
  """Without a name three Triton kernels are lowered for CUDA at M2's head dim, with x64
  too, and the reference for a dtype that they lack."""
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
