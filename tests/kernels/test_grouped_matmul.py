"""Grouped matmul: a NumPy loop over the groups is the reference's reference (law 7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.kernels import grouped_matmul
from tests import cost

ROWS, GROUPS, IN, OUT = 75, 5, 6, 7

# Where groups may begin and end: empty ones, one for all, tiles cut short.
SIZES = {
  'even': (15, 15, 15, 15, 15),
  'empty groups': (0, 30, 0, 45, 0),
  'one group': (0, 0, 75, 0, 0),
  'single rows': (1, 1, 71, 1, 1),
  'rows past the sum': (9, 0, 20, 17, 3),
  'nothing': (0, 0, 0, 0, 0),
}


@functools.partial(jax.jit, static_argnames='implementation')
def value_and_grads(lhs, rhs, sizes, weight, implementation):
  """The product, and the cotangents of lhs and rhs under `weight`."""

  def run(lhs, rhs):
    return grouped_matmul.matmul(lhs, rhs, sizes, implementation=implementation)

  out, vjp = jax.vjp(run, lhs, rhs)
  return out, *vjp(weight)


MATMUL = jax.jit(grouped_matmul.matmul, static_argnames='implementation')


def by_hand(lhs, rhs, sizes, weight):
  """The same three arrays from a loop over the groups in float64."""
  lhs, rhs, weight = (np.asarray(x, np.float64) for x in (lhs, rhs, weight))
  out = np.zeros((len(lhs), rhs.shape[2]))
  d_lhs, d_rhs = np.zeros_like(lhs), np.zeros_like(rhs)
  start = 0
  for group, size in enumerate(sizes):
    rows = slice(start, start + size)
    out[rows] = lhs[rows] @ rhs[group]
    d_lhs[rows] = weight[rows] @ rhs[group].T
    d_rhs[group] = lhs[rows].T @ weight[rows]
    start += size
  return out, d_lhs, d_rhs


def tensors(seed, rows=ROWS, groups=GROUPS, dtype=np.float32):
  rng = np.random.default_rng(seed)
  shapes = [(rows, IN), (groups, IN, OUT), (rows, OUT)]
  return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def check(lhs, rhs, sizes, weight, implementation, *, tolerance=1e-5, run=None):
  """The product and both gradients are those by hand."""
  run = run or value_and_grads
  got = run(lhs, rhs, np.array(sizes, np.int32), weight, implementation=implementation)
  # rows past the sum may have anything
  want = by_hand(*(np.nan_to_num(x) for x in (lhs, rhs)), sizes, np.nan_to_num(weight))
  for name, a, b in zip(('out', 'd_lhs', 'd_rhs'), got, want, strict=True):
    assert a.dtype == lhs.dtype
    np.testing.assert_allclose(
      np.float64(a), b, atol=tolerance, rtol=tolerance, err_msg=name
    )


def with_nan(lhs, rhs, sizes, weight):
  """The same with NaN in rows past the sum."""
  for x in (lhs, weight):
    x[sum(sizes) :] = np.nan
  return lhs, rhs, sizes, weight


def check_bfloat16(implementation):
  """The result is the exact sum rounded once, not a sum of rounded parts."""
  rng = np.random.default_rng(3)
  lhs = rng.normal(size=(64, 512)).astype(jnp.bfloat16)
  rhs = rng.normal(size=(2, 512, 4)).astype(jnp.bfloat16)
  sizes = np.array([40, 24], np.int32)
  out = MATMUL(lhs, rhs, sizes, implementation=implementation)
  want = by_hand(lhs, rhs, sizes, np.zeros((64, 4)))[0]
  assert out.dtype == jnp.bfloat16
  assert np.max(np.abs(np.float64(out) - want)) / np.abs(want).max() < 2**-8


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
def test_group_shapes(sizes, implementation):
  """Value and gradients at every way of cutting rows into groups; padding rows may have
  anything, even NaN: they give 0 and take no gradient."""
  lhs, rhs, weight = tensors(0)
  check(*with_nan(lhs, rhs, sizes, weight), implementation)


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
@given(data=st.data())
def test_random_sizes(implementation, data):
  """Any sizes whose sum is at most T."""
  cuts = data.draw(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS))
  sizes = np.diff(sorted([0, *cuts]))
  lhs, rhs, weight = tensors(data.draw(st.integers(0, 9)))
  check(lhs, rhs, sizes, weight, implementation)


@pytest.mark.parametrize(
  'rows, sizes', [(300, (170, 130)), (1, (0, 1, 0)), (3, (1, 0, 0, 0, 1, 0, 1, 0))]
)
def test_other_sizes(rows, sizes):
  """Groups longer than a tile; a single row; more groups than rows."""
  lhs, rhs, weight = tensors(1, rows, len(sizes))
  check(lhs, rhs, sizes, weight, 'cpu')


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
def test_float64(implementation):
  """In float64 nothing is computed in less."""
  with jax.enable_x64():
    lhs, rhs, weight = tensors(2, dtype=np.float64)
    sizes = SIZES['rows past the sum']
    check(lhs, rhs, sizes, weight, implementation, tolerance=1e-13)


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
def test_bfloat16_accumulates_in_float32(implementation):
  check_bfloat16(implementation)


def test_default_is_the_platforms():
  """Without a name the CPU implementation is lowered on a CPU: the same program."""
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tensors(5)]
  shapes.insert(2, jax.ShapeDtypeStruct((GROUPS,), np.int32))
  default, cpu, reference = (
    value_and_grads.lower(*shapes, implementation=name).as_text()
    for name in (None, 'cpu', 'reference')
  )
  assert default == cpu != reference


def test_unknown_implementation():
  """A wrong name is refused, and the message lists the right ones."""
  with pytest.raises(ValueError, match="'fast'.*reference.*cpu"):
    lhs, rhs, _ = tensors(0)
    grouped_matmul.matmul(lhs, rhs, jnp.zeros(GROUPS, int), implementation='fast')


@pytest.mark.long
def test_cost_does_not_grow_with_experts():
  """The reason to exist: at the same T, 256 groups cost no multiple of 8 groups, where
  `lax.ragged_dot` on CPU costs 32 times more."""
  rows, dim = 2048, 128

  def run(groups):
    rng = np.random.default_rng(6)
    lhs = jnp.array(rng.normal(size=(rows, dim)), jnp.float32)
    rhs = jnp.array(rng.normal(size=(groups, dim, dim)), jnp.float32)
    sizes = jnp.full(groups, rows // groups, jnp.int32)
    return functools.partial(value_and_grads, lhs, rhs, sizes, lhs, 'cpu')

  assert cost.ratio(run(256), run(8)) < 10
