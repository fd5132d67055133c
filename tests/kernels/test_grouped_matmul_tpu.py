"""The TPU kernels of the grouped matmul, interpreted on the CPU: values and gradients
against a loop over the groups, and what the default lowers to (law 7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from m2jax import platforms
from m2jax.kernels import grouped_matmul
from m2jax.kernels.grouped_matmul import tpu
from m2jax.kernels.grouped_matmul.block_pairs import block_pairs
from tests.kernels import test_grouped_matmul as grouped
from tests.kernels.parts import check_cuts
from tests.kernels.test_grouped_matmul import SIZES, by_hand, tensors, value_and_grads

ROWS, GROUPS = 75, 5  # five tiles of 16 rows, the last cut short

# a fixture that is the same for every example
SAME = dict(suppress_health_check=[HealthCheck.function_scoped_fixture])

PAIRS = jax.jit(block_pairs, static_argnums=(1, 2, 3, 4))
SMALL = dict(
  rows=16, chunk=8, columns=128, inner=128, d_rhs_columns=128, vmem_bytes=32 << 20
)


@pytest.fixture(autouse=True)
def small(interpreted, monkeypatch):
  """Kernels run as XLA loops on the CPU, in tiles of 16 rows and chunks of eight."""
  monkeypatch.setattr(tpu, '_sizes', lambda dtype: SMALL)
  monkeypatch.setattr(tpu, '_row_tile', lambda rows, most: min(rows, most))


check = functools.partial(grouped.check, implementation='tpu')


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
def test_group_shapes(sizes):
  """Value and gradients at every way of cutting rows into groups."""
  lhs, rhs, weight = tensors(0)
  check(lhs, rhs, sizes, weight)


@given(data=st.data())
@settings(**SAME)
def test_random_sizes(data):
  """Any sizes whose sum is at most T; rows past it may hold anything."""
  cuts = data.draw(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS))
  sizes = np.diff(sorted([0, *cuts]))
  lhs, rhs, weight = tensors(data.draw(st.integers(0, 9)))
  check(*grouped.with_nan(lhs, rhs, sizes, weight))


def test_many_blocks():
  """Matrices cut into several blocks along D and F, in every one of the kernels."""
  rng = np.random.default_rng(1)
  rows, inner, outer, sizes = 60, 256, 384, (33, 0, 20)
  lhs = np.float32(rng.normal(size=(rows, inner)) / 16)
  rhs = np.float32(rng.normal(size=(3, inner, outer)))
  weight = np.float32(rng.normal(size=(rows, outer)) / 16)
  check(lhs, rhs, sizes, weight, tolerance=1e-4)


def test_blocks_cut_short():
  """A side that is not summed over need not be a multiple of a block."""
  rng = np.random.default_rng(2)
  lhs, d_out = (np.float32(rng.normal(size=(40, n))) for n in (136, 200))
  rhs = np.float32(rng.normal(size=(2, 136, 200)))
  sizes = np.array([25, 9], np.int32)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tpu, '_sizes', lambda dtype: SMALL | dict(inner=256))
    out = tpu._per_row(lhs, rhs, sizes, transpose=False)
    d_lhs = tpu._per_row(d_out, rhs, sizes, transpose=True)
  d_rhs = tpu._per_group(lhs, d_out, sizes, dtype=lhs.dtype)
  want = by_hand(lhs, rhs, sizes, d_out)
  for a, b in zip((out, d_lhs, d_rhs), want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


@given(data=st.data())
@settings(**SAME)
def test_block_pairs(data):
  """Against every pair of a tile and a group: each pair that shares a row is listed
  once, each tile or group at least once, in order, and nothing else: the cost does not
  depend on the number of groups."""
  cuts = data.draw(st.lists(st.integers(0, ROWS), min_size=9, max_size=9))
  sizes = np.diff(sorted([0, *cuts]))
  by_group = data.draw(st.booleans())
  split = data.draw(st.booleans())
  table = jax.device_get(PAIRS(np.int32(sizes), ROWS, 8, by_group, split))
  start, *cuts, count = table.parts.tolist()
  tiles, groups = (x[:count] for x in table[:2])
  assert start == 0 and len(table.tile) >= count
  check_cuts(cuts, groups if by_group else tiles, split)
  assert table.steps == max(np.diff([0, *cuts, count]))
  assert np.all(np.diff(tiles) >= 0) and np.all(np.diff(groups) >= 0)
  owner = np.repeat(np.arange(len(sizes)), sizes)
  want = {(row // 8, g) for row, g in enumerate(owner)}
  got = list(zip(tiles.tolist(), groups.tolist(), strict=True))
  assert len(got) == len(set(got)) and want <= set(got)
  if by_group:
    assert set(groups) == set(range(len(sizes)))
    assert len(got) == len(want) + np.count_nonzero(sizes == 0)
  else:
    assert set(tiles) == set(range(-(-ROWS // 8)))
    assert len(got) == len(want) + len(set(tiles) - {tile for tile, _ in want})


def test_bfloat16_accumulates_in_float32():
  grouped.check_bfloat16('tpu')


@pytest.mark.long
@pytest.mark.parametrize('sizes, cores', [((9, 0, 5), 1), ((0, 20, 4), 2)])
def test_simulated(simulated, sizes, cores):
  """On a simulated TPU no two accesses race, and nothing is used before it is
  written: not the rows past the sum, not the matrix of an empty group."""
  rng = np.random.default_rng(4)
  lhs, rhs, weight = (
    np.float32(rng.normal(size=shape)) for shape in ((24, 8), (3, 8, 8), (24, 8))
  )
  with simulated(num_cores_or_threads=cores):
    check(lhs, rhs, sizes, weight)


def test_parts_divide_m2s_matrices():
  """At M2's D and F no block is cut short, and two cores get as many each."""
  for size in (1536, 3072):
    for most in (768, 1024):
      assert size % (2 * tpu._part(size, most)) == 0


def traced(dtype):
  """For all platforms, at sizes of real blocks."""
  shapes = [((300, 256), dtype), ((3, 256, 384), dtype), ((3,), jnp.int32)]
  arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
  weight = jax.ShapeDtypeStruct((300, 384), dtype)
  run = functools.partial(value_and_grads.__wrapped__, implementation=None)
  with platforms.any_platform(), pltpu.force_tpu_interpret_mode(None):
    return jax.jit(run).trace(*arrays, weight)


@pytest.mark.parametrize(
  'dtype, x64, kernels',
  [
    pytest.param(jnp.bfloat16, False, 3, marks=pytest.mark.long),
    (jnp.float32, True, 3),
    (jnp.float64, True, 0),
  ],
)
def test_default_is_the_platforms(monkeypatch, dtype, x64, kernels):
  """Without a name the kernels are lowered for a TPU, on a machine that has none, and
  only there; in a dtype that they lack, ragged_dot."""
  monkeypatch.undo()
  with jax.enable_x64(x64):
    program = traced(dtype)
    text = program.lower(lowering_platforms=('tpu',)).as_text()
    assert text.count('tpu_custom_call') == kernels
    if kernels:
      text = program.lower(lowering_platforms=('cpu',)).as_text()
      assert 'custom_call' not in text


def test_unsupported():
  """The error names a dtype that the kernels do not support."""
  lhs, rhs, _ = tensors(0)
  with pytest.raises(ValueError, match='float16.*must both be bfloat16'):
    grouped_matmul.matmul(
      lhs.astype(jnp.float16), rhs, jnp.zeros(GROUPS, int), implementation='tpu'
    )
