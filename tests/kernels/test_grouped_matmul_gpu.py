"""The GPU kernels of the grouped matmul, interpreted on the CPU: values and gradients
against a loop over the groups, and what they lower to for CUDA (law 7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2jax.kernels import grouped_matmul
from m2jax.kernels.grouped_matmul import gpu
from tests.kernels import cuda
from tests.kernels import test_grouped_matmul as grouped
from tests.kernels.test_grouped_matmul import SIZES, tensors, value_and_grads

ROWS, GROUPS = 75, 5
# tiles of eight rows; blocks that neither D = 6 nor F = 7 fills or divides
TILES = jax.jit(gpu.tiles, static_argnums=(1, 2))
BLOCKS = dict(rows=8, columns=4, inner=4, warps=4, stages=3)


@pytest.fixture(autouse=True)
def small(interpreted, monkeypatch):
  """Kernels run as XLA loops on the CPU."""
  monkeypatch.setattr(gpu, '_sizes', lambda dtype: BLOCKS)


def check(*arrays):
  """With NaN in rows past the sum."""
  grouped.check(*grouped.with_nan(*arrays), 'gpu')


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
def test_group_shapes(sizes):
  """Value and gradients at every way of cutting rows into groups."""
  lhs, rhs, weight = tensors(0)
  check(lhs, rhs, sizes, weight)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_sizes(data):
  """Any sizes whose sum is at most T."""
  cuts = data.draw(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS))
  lhs, rhs, weight = tensors(data.draw(st.integers(0, 9)))
  check(lhs, rhs, np.diff(sorted([0, *cuts])), weight)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tiles_cover_each_row_once(data):
  """Each row is in one tile, of its own group; the table is never too short."""
  cuts = data.draw(st.lists(st.integers(0, ROWS), min_size=9, max_size=9))
  sizes = np.diff(sorted([0, *cuts]))
  table = jax.device_get(TILES(np.int32(sizes), ROWS, 8))
  owner = np.full(ROWS, -1)
  for first, group in zip(*table[:2], strict=True):
    rows = slice(first, max(first, min(first + 8, int(table.bounds[group + 1]))))
    assert np.all(owner[rows] == -1)
    owner[rows] = group
  want = np.repeat(np.arange(len(sizes)), sizes)
  np.testing.assert_array_equal(owner[: len(want)], want)
  assert np.all(owner[len(want) :] == len(sizes))


def test_bfloat16_accumulates_in_float32():
  grouped.check_bfloat16('gpu')


@pytest.mark.parametrize(
  'dtype, x64, kernels',
  [(jnp.bfloat16, False, 3), (jnp.float32, True, 3), (jnp.float64, True, 0)],
)
def test_lowers_for_cuda(monkeypatch, dtype, x64, kernels):
  """Without a name three Triton kernels are lowered for CUDA at M2's shapes, with x64
  too, and ragged_dot for a dtype that they lack."""
  monkeypatch.undo()
  with jax.enable_x64(x64):
    shapes = (4096, 3072), (256, 3072, 1536), (256,), (4096, 1536)
    dtypes = dtype, dtype, jnp.int32, dtype
    arrays = map(jax.ShapeDtypeStruct, shapes, dtypes)
    run = functools.partial(value_and_grads.__wrapped__, implementation=None)
    assert cuda.lowered(run, *arrays).count(cuda.CALL) == kernels


def test_unsupported():
  """The error names a dtype that the kernels do not support."""
  lhs, rhs, _ = tensors(0)
  with pytest.raises(ValueError, match='float8.*must both be bf16'):
    grouped_matmul.matmul(
      lhs.astype(jnp.float8_e4m3fn),
      rhs,
      jnp.zeros(GROUPS, int),
      implementation='gpu',
    )
