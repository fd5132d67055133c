"""Grouped matmul: a NumPy loop over the groups is the reference's reference (law 7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
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

  def loss(lhs, rhs):
    out = grouped_matmul.matmul(lhs, rhs, sizes, implementation=implementation)
    return jnp.sum(
      (out * weight).astype(jnp.promote_types(out.dtype, jnp.float32))
    ), out

  (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(lhs, rhs)
  return (out, *grads)


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
  return [jnp.array(rng.normal(size=shape), dtype) for shape in shapes]


def check(lhs, rhs, sizes, weight, tolerance):
  want = by_hand(lhs, rhs, sizes, weight)
  for implementation in ('cpu', 'reference'):
    got = value_and_grads(lhs, rhs, jnp.array(sizes, jnp.int32), weight, implementation)
    for a, b in zip(got, want, strict=True):
      assert a.dtype == lhs.dtype
      np.testing.assert_allclose(
        np.float64(a), b, atol=tolerance, rtol=tolerance, err_msg=implementation
      )


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
def test_group_shapes(sizes):
  """Value and gradients at every way of cutting rows into groups."""
  lhs, rhs, weight = tensors(0)
  check(lhs, rhs, sizes, weight, 1e-5)


@given(data=st.data())
@settings(max_examples=25)
def test_random_sizes(data):
  """Any sizes whose sum is at most T."""
  cuts = data.draw(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS))
  sizes = np.diff(sorted([0, *cuts]))
  lhs, rhs, weight = tensors(data.draw(st.integers(0, 9)))
  check(lhs, rhs, sizes, weight, 1e-5)


@pytest.mark.parametrize(
  'rows, sizes', [(300, (170, 130)), (1, (0, 1, 0)), (3, (1, 0, 0, 0, 1, 0, 1, 0))]
)
def test_other_sizes(rows, sizes):
  """Groups longer than a tile; a single row; more groups than rows."""
  lhs, rhs, weight = tensors(1, rows, len(sizes))
  check(lhs, rhs, sizes, weight, 1e-5)


def test_float64():
  """In float64 nothing is computed in less."""
  with jax.enable_x64():
    lhs, rhs, weight = tensors(2, dtype=np.float64)
    check(lhs, rhs, SIZES['rows past the sum'], weight, 1e-13)


def test_bfloat16_accumulates_in_float32():
  """The result is the exact sum rounded once, not a sum of rounded parts."""
  rng = np.random.default_rng(3)
  lhs = jnp.array(rng.normal(size=(64, 512)), jnp.bfloat16)
  rhs = jnp.array(rng.normal(size=(2, 512, 4)), jnp.bfloat16)
  sizes = jnp.array([40, 24])
  want = np.concatenate(
    [
      np.float64(lhs[:40]) @ np.float64(rhs[0]),
      np.float64(lhs[40:]) @ np.float64(rhs[1]),
    ]
  )
  for implementation in ('cpu', 'reference'):
    out = grouped_matmul.matmul(lhs, rhs, sizes, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    error = np.abs(np.float64(out) - want) / np.abs(want).max()
    assert error.max() < 2**-8


@pytest.mark.parametrize('implementation', ['cpu', 'reference'])
def test_rows_past_the_sum(implementation):
  """Padding rows may hold anything, even NaN: they give 0 and take no gradient."""
  lhs, rhs, weight = tensors(4)
  sizes = SIZES['rows past the sum']
  live = sum(sizes)
  want = by_hand(lhs, rhs, sizes, weight)
  dirty = [x.at[live:].set(jnp.nan) for x in (lhs, weight)]
  got = value_and_grads(
    dirty[0], rhs, jnp.array(sizes, jnp.int32), dirty[1], implementation
  )
  for name, a, b in zip(('out', 'd_lhs', 'd_rhs'), got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)


def test_default_is_the_platforms():
  """Without a name the CPU implementation is lowered on a CPU: bit-identical to it."""
  lhs, rhs, weight = tensors(5)
  sizes = jnp.array(SIZES['even'], jnp.int32)
  named = value_and_grads(lhs, rhs, sizes, weight, 'cpu')
  for a, b in zip(named, value_and_grads(lhs, rhs, sizes, weight, None), strict=True):
    np.testing.assert_array_equal(a, b)


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
