"""Experts in tiles: value and gradients against float64 NumPy, whatever the routing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax.moe import experts, tiled
from tests import cost

TOKENS, MODEL, EXPERTS, HIDDEN, TOP_K = 450, 12, 6, 10, 2


def tensors(seed, tokens=TOKENS, num_experts=EXPERTS, dtype=np.float32):
  """x, weights, gate, up, down, and a cotangent of the output."""
  rng = np.random.default_rng(seed)
  x, d_out = rng.normal(size=(2, tokens, MODEL))
  weights = rng.random((tokens, TOP_K))
  gate, up = 0.3 * rng.normal(size=(2, num_experts, MODEL, HIDDEN))
  down = 0.3 * rng.normal(size=(num_experts, HIDDEN, MODEL))
  return [jnp.array(a, dtype) for a in (x, weights, gate, up, down, d_out)]


def routing(kind: str) -> np.ndarray:
  """ids [T, k], different experts for a token."""
  rng = np.random.default_rng(1)
  if kind == 'one expert':  # more rows than a tile; all other experts but two empty
    return np.tile([[4, 1]], (TOKENS, 1))
  ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
  if kind == 'elsewhere':  # ids of E may repeat within a token
    ids[rng.random(ids.shape) < 0.4] = EXPERTS
  if kind == 'all elsewhere':
    ids[:] = EXPERTS
  return ids


@functools.partial(jax.jit, static_argnames='run')
def value_and_grads(x, weights, gate, up, down, d_out, ids, run=tiled.experts):
  """The output, and the cotangents of everything but ids under d_out."""
  out, vjp = jax.vjp(
    lambda x, w, *kernels: run(x, ids, w, *kernels),
    *(x, weights, gate, up, down),
  )
  return out, *vjp(d_out)


def by_hand(x, weights, gate, up, down, d_out, ids):
  """The same six arrays, one assignment after the other, in float64."""
  arrays = [np.asarray(a, np.float64) for a in (x, weights, gate, up, down, d_out)]
  x, weights, gate, up, down, d_out = arrays
  out, *grads = [np.zeros_like(a) for a in (x, x, weights, gate, up, down)]
  d_x, d_weights, d_gate, d_up, d_down = grads
  for t, k in np.ndindex(*ids.shape):
    e, w = ids[t, k], weights[t, k]
    if e == len(gate):
      continue
    g, u = x[t] @ gate[e], x[t] @ up[e]
    s = 1 / (1 + np.exp(-g))
    h = g * s * u
    out[t] += w * h @ down[e]
    d_weights[t, k] = h @ down[e] @ d_out[t]
    d_down[e] += np.outer(w * h, d_out[t])
    d_h = w * down[e] @ d_out[t]
    d_g, d_u = d_h * u * s * (1 + g * (1 - s)), d_h * g * s
    d_gate[e] += np.outer(x[t], d_g)
    d_up[e] += np.outer(x[t], d_u)
    d_x[t] += gate[e] @ d_g + up[e] @ d_u
  return out, d_x, d_weights, d_gate, d_up, d_down


NAMES = ('out', 'd_x', 'd_weights', 'd_gate', 'd_up', 'd_down')


def check(arrays, ids, tolerance):
  want = by_hand(*arrays, ids)
  got = value_and_grads(*arrays, jnp.array(ids, jnp.int32))
  for name, a, b in zip(NAMES, got, want, strict=True):
    assert a.dtype == arrays[0].dtype
    scale = max(1.0, np.abs(b).max())
    np.testing.assert_allclose(
      np.float64(a), b, atol=tolerance * scale, rtol=0, err_msg=name
    )


@pytest.mark.parametrize('kind', ['even', 'one expert', 'elsewhere', 'all elsewhere'])
def test_routings(kind):
  """Tiles of both sizes, cut short or several of one expert; experts and tokens
  without any."""
  assert len(tiled._sizes(TOKENS * TOP_K, EXPERTS)) == 2
  check(tensors(0), routing(kind), 1e-5)


def test_float64():
  """In float64 nothing is computed in less: the exactness tests stand on this."""
  with jax.enable_x64():
    check(tensors(2, dtype=np.float64), routing('elsewhere'), 1e-13)


def test_bfloat16():
  """bf16 is as near to the fp32 result as with grouped matmuls."""
  ids = jnp.array(routing('even'), jnp.int32)
  low = tensors(3, dtype=jnp.bfloat16)
  exact = by_hand(*low, np.asarray(ids))
  for run in (tiled.experts, experts.grouped):
    for a, b in zip(value_and_grads(*low, ids, run=run), exact, strict=True):
      assert a.dtype == jnp.bfloat16
      assert np.linalg.norm(np.float64(a) - b) < 0.03 * np.linalg.norm(b), run


def test_other_tokens_do_not_matter():
  """With the same experts, a token's result has the same bits whatever others hold:
  one NaN in the batch stays with its token."""
  arrays, ids = tensors(4), jnp.array(routing('even'), jnp.int32)
  spoiled = [arrays[0].at[7].set(jnp.nan), *arrays[1:]]
  (out, d_x, *_), (out2, d_x2, *_) = (
    value_and_grads(*a, ids) for a in (arrays, spoiled)
  )
  others = np.arange(TOKENS) != 7
  np.testing.assert_array_equal(out[others], out2[others])
  np.testing.assert_array_equal(d_x[others], d_x2[others])
  assert np.all(np.isnan(out2[7]))


@pytest.mark.long
def test_cost_does_not_grow_with_experts():
  """256 experts cost no multiple of 8 experts at the same number of assignments."""
  tokens = 4096

  def run(num_experts):
    arrays = tensors(5, tokens, num_experts)
    ids = jnp.arange(tokens * TOP_K, dtype=jnp.int32).reshape(tokens, TOP_K)
    return functools.partial(value_and_grads, *arrays, ids % num_experts)

  assert cost.ratio(run(256), run(8)) < 10
