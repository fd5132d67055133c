"""Experts for few tokens: exact for every routing, whatever fits into the batch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax.moe import batched
from tests.moe import test_tiled as tiled_tests


def experts(x, ids, weights, gate, up, down):
  return batched.experts(x, ids, weights, batched.fused(gate, up), down)


@jax.jit
def all_experts(x, ids, weights, *kernels):
  dense = batched.dense(*kernels)
  return batched.all_experts(x, ids, weights, *dense, len(kernels[0]))


@jax.jit
def chosen_experts(x, ids, weights, *kernels):
  return batched.chosen_experts(x, ids, weights, *batched.separate(*kernels))


KINDS = ('even', 'one expert', 'repeated', 'elsewhere', 'all elsewhere')


def routing(kind):
  """`test_tiled.routing`; or experts that a token may have twice, as in a replay."""
  if kind == 'repeated':
    shape = tiled_tests.TOKENS, tiled_tests.TOP_K
    return np.random.default_rng(2).integers(2, size=shape)
  return tiled_tests.routing(kind)


@functools.cache
def program(rows):
  """`experts` of its own for each `rows`, which is not part of jax's key."""
  del rows
  return jax.jit(lambda *arrays: experts(*arrays))


@pytest.mark.parametrize('rows', [1, 4, None])
@pytest.mark.parametrize('kind', KINDS)
def test_routings(kind, rows, monkeypatch):
  """Against float64 NumPy; with room for fewer of an expert's tokens than it has, and
  for all."""
  if rows:
    monkeypatch.setattr(batched, '_rows', lambda *_: rows)
  with jax.enable_x64():
    *arrays, weight = tiled_tests.tensors(0, dtype=np.float64)
    x, weights, *kernels = arrays
    got = program(rows)(x, np.array(routing(kind)), weights, *kernels)
    want = tiled_tests.by_hand(*arrays, weight, routing(kind))[0]
    np.testing.assert_allclose(got, want, atol=1e-12 * max(1.0, np.abs(want).max()))


@pytest.mark.long
def test_gradients(monkeypatch):
  """Not in a jitted function: a loop whose number of steps is data has none."""
  monkeypatch.setattr(batched, '_rows', lambda *_: 4)
  with jax.enable_x64():
    arrays, ids = tiled_tests.tensors(0, dtype=np.float64), routing('repeated')
    run = tiled_tests.value_and_grads.__wrapped__
    got = run(*arrays, jnp.array(ids), run=experts)
    want = tiled_tests.by_hand(*arrays, ids)
    for name, a, b in zip(tiled_tests.NAMES, got, want, strict=True):
      scale = max(1.0, np.abs(b).max())
      np.testing.assert_allclose(a, b, atol=1e-12 * scale, rtol=0, err_msg=name)


def test_more_assignments_than_tokens():
  """Of one expert, if the tokens have it twice: all count, although they are more than
  the room for each token."""
  tokens = 6
  x, weights, *kernels = tiled_tests.tensors(0, tokens=tokens)[:5]
  twice = jnp.full((tokens, 2), 3)
  once = twice.at[:, 1].set(tiled_tests.EXPERTS)
  run = jax.jit(experts)
  got = run(x, twice, weights, *kernels)
  total = weights.sum(axis=1, keepdims=True)
  want = run(x, once, jnp.repeat(total, 2, axis=1), *kernels)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('kind', KINDS)
def test_few_tokens(kind):
  """All experts in two matmuls, or each that was chosen: as `experts`, also where one
  that was not chosen would give NaN."""
  ids = routing(kind)
  with jax.enable_x64():
    x, weights, *kernels = tiled_tests.tensors(0, dtype=np.float64)[:5]
    ids = np.array(ids)
    want = jax.jit(experts)(x, ids, weights, *kernels)
    np.testing.assert_allclose(all_experts(x, ids, weights, *kernels), want, atol=1e-12)
    unused = ~np.isin(np.arange(len(kernels[0])), ids)
    kernels = [np.where(unused[:, None, None], np.nan, m) for m in kernels]
    np.testing.assert_allclose(
      chosen_experts(x, ids, weights, *kernels), want, atol=1e-12
    )
