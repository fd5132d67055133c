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
from tests.kernels.parts import check_cuts
from tests.kernels.test_grouped_matmul import SIZES, by_hand, tensors, value_and_grads

ROWS, GROUPS = 75, 5  # five tiles of 16 rows, the last cut short

# a fixture that is the same for every example
SAME = dict(suppress_health_check=[HealthCheck.function_scoped_fixture])


SMALL = dict(
  rows=16, chunk=8, columns=128, inner=128, d_rhs_columns=128, vmem_bytes=32 << 20
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  """Kernels run as XLA loops on the CPU, in tiles of 16 rows and chunks of eight."""
  call = functools.partial(tpu.pl.pallas_call, interpret=True)
  monkeypatch.setattr(tpu.pl, 'pallas_call', call)
  monkeypatch.setattr(tpu, '_sizes', lambda dtype: SMALL)
  monkeypatch.setattr(tpu, '_row_tile', lambda rows, most: min(rows, most))


def unmemoised():
  """`value_and_grads` traced anew: memory does not know what a test has patched."""
  jax.clear_caches()
  return jax.jit(value_and_grads.__wrapped__, static_argnames='implementation')


def check(lhs, rhs, sizes, weight, tolerance=1e-5, run=value_and_grads):
  got = run(lhs, rhs, jnp.array(sizes, jnp.int32), weight, implementation='tpu')
  for name, a, b in zip(
    ('out', 'd_lhs', 'd_rhs'), got, by_hand(lhs, rhs, sizes, weight), strict=True
  ):
    assert a.dtype == lhs.dtype
    np.testing.assert_allclose(
      np.float64(a), b, atol=tolerance, rtol=tolerance, err_msg=name
    )


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
def test_group_shapes(sizes):
  """Value and gradients at every way of cutting rows into groups."""
  lhs, rhs, weight = tensors(0)
  check(lhs, rhs, sizes, weight)


@given(data=st.data())
@settings(max_examples=15, **SAME)
def test_random_sizes(data):
  """Any sizes whose sum is at most T; rows past it may hold anything."""
  cuts = data.draw(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS))
  sizes = np.diff(sorted([0, *cuts]))
  lhs, rhs, weight = tensors(data.draw(st.integers(0, 9)))
  live = sum(sizes)
  want = by_hand(lhs, rhs, sizes, weight)
  dirty = [x.at[live:].set(jnp.nan) for x in (lhs, weight)]
  sizes = jnp.array(sizes, jnp.int32)
  got = value_and_grads(dirty[0], rhs, sizes, dirty[1], implementation='tpu')
  for name, a, b in zip(('out', 'd_lhs', 'd_rhs'), got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)


def test_many_blocks():
  """Matrices cut into several blocks along D and F, in every one of the kernels."""
  rng = np.random.default_rng(1)
  rows, inner, outer, sizes = 60, 256, 384, (33, 0, 20)
  lhs = jnp.array(rng.normal(size=(rows, inner)) / 16, jnp.float32)
  rhs = jnp.array(rng.normal(size=(3, inner, outer)), jnp.float32)
  weight = jnp.array(rng.normal(size=(rows, outer)) / 16, jnp.float32)
  check(lhs, rhs, sizes, weight, 1e-4)


def test_blocks_cut_short():
  """A side that is not summed over need not be a multiple of a block."""
  rng = np.random.default_rng(2)
  lhs, d_out = (jnp.array(rng.normal(size=(40, n)), jnp.float32) for n in (136, 200))
  rhs = jnp.array(rng.normal(size=(2, 136, 200)), jnp.float32)
  sizes = (25, 9)
  want = by_hand(lhs, rhs, sizes, d_out)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tpu, '_sizes', lambda dtype: SMALL | dict(inner=256))
    out = tpu._per_row(lhs, rhs, jnp.array(sizes), transpose=False)
    d_lhs = tpu._per_row(d_out, rhs, jnp.array(sizes), transpose=True)
  d_rhs = tpu._per_group(lhs, d_out, jnp.array(sizes), dtype=lhs.dtype)
  for a, b in zip((out, d_lhs, d_rhs), want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


@given(data=st.data())
@settings(max_examples=12, **SAME)
def test_block_pairs(data):
  """Against every pair of a tile and a group: each pair that shares a row is listed
  once, each tile or group at least once, in order, and nothing else: the cost does not
  depend on the number of groups."""
  cuts = data.draw(st.lists(st.integers(0, ROWS), min_size=9, max_size=9))
  sizes = np.diff(sorted([0, *cuts]))
  by_group = data.draw(st.booleans())
  split = data.draw(st.booleans())
  table = block_pairs(jnp.array(sizes, jnp.int32), ROWS, 8, by_group, split)
  start, *cuts, count = np.asarray(table.parts).tolist()
  tiles, groups = (np.asarray(x)[:count] for x in table[:2])
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
  """The result is the exact sum rounded once, not a sum of rounded parts."""
  rng = np.random.default_rng(3)
  lhs = jnp.array(rng.normal(size=(64, 512)), jnp.bfloat16)
  rhs = jnp.array(rng.normal(size=(2, 512, 4)), jnp.bfloat16)
  sizes = jnp.array([40, 24])
  out = grouped_matmul.matmul(lhs, rhs, sizes, implementation='tpu')
  want = by_hand(lhs, rhs, (40, 24), jnp.zeros((64, 4)))[0]
  assert out.dtype == jnp.bfloat16
  assert np.max(np.abs(np.float64(out) - want)) / np.abs(want).max() < 2**-8


@pytest.mark.parametrize(
  'sizes, cores',
  [((9, 0, 5), 1), pytest.param((0, 20, 4), 2, marks=pytest.mark.long)],
)
def test_simulated(monkeypatch, sizes, cores):
  """On a simulated TPU no two accesses race, and nothing is used before it is
  written: not the rows past the sum, not the matrix of an empty group."""
  params = pltpu.InterpretParams(
    detect_races=True,
    uninitialized_memory='nan',
    out_of_bounds_reads='raise',
    num_cores_or_threads=cores,
  )
  rng = np.random.default_rng(4)
  lhs, rhs, weight = (
    jnp.array(rng.normal(size=shape), jnp.float32)
    for shape in ((24, 8), (3, 8, 8), (24, 8))
  )
  call = functools.partial(tpu.pl.pallas_call.func, interpret=params)
  monkeypatch.setattr(tpu.pl, 'pallas_call', call)
  try:
    check(lhs, rhs, sizes, weight, run=unmemoised())
  finally:
    pltpu.reset_tpu_interpret_mode_state()
    jax.clear_caches()


def test_parts_divide_m2s_matrices():
  """At M2's D and F no block is cut short, and two cores get as many each."""
  for size in (1536, 3072):
    for most in (768, 1024):
      assert size % (2 * tpu._part(size, most)) == 0


def lowered(platform, dtype=jnp.bfloat16):
  shapes = [((300, 256), dtype), ((3, 256, 384), dtype), ((3,), jnp.int32)]
  arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
  weight = jax.ShapeDtypeStruct((300, 384), dtype)
  with platforms.any_platform():
    traced = unmemoised().trace(*arrays, weight, implementation=None)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def test_default_is_the_platforms(monkeypatch):
  """Without a name the kernels are lowered for a TPU, on a machine that has none, and
  only there; in a dtype that they lack, ragged_dot."""
  monkeypatch.undo()
  assert lowered('tpu').count('tpu_custom_call') == 3
  assert 'custom_call' not in lowered('cpu')
  with jax.enable_x64():
    assert 'tpu_custom_call' not in lowered('cpu', jnp.float32)
    assert 'tpu_custom_call' not in lowered('tpu', jnp.float64)


def test_unsupported():
  """The error names a dtype that the kernels do not support."""
  lhs, rhs, _ = tensors(0)
  with pytest.raises(ValueError, match='float16.*must both be bfloat16'):
    grouped_matmul.matmul(
      lhs.astype(jnp.float16), rhs, jnp.zeros(GROUPS, int), implementation='tpu'
    )
