"""Tiles of one shape: equal to the bit in every batch, with the function's gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax.kernels import invariant

D, F = 96, 80


def layer(tokens, shared):
  """A norm, a matmul and an activation, of x and of ids that pick a row of a table."""
  x, ids = tokens
  w, table = shared
  x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) + table[ids]
  return jax.nn.silu(x @ w), ids + 1


@functools.partial(jax.jit, static_argnames='tiled')
def run(tokens, shared, tiled):
  return invariant.rows(layer, tokens, shared, tiled)


def inputs(T):
  rng = np.random.default_rng(0)
  x, w, table = (
    jnp.asarray(rng.normal(size=shape), jnp.float32)
    for shape in ((T, D), (D, F), (5, D))
  )
  return (x, jnp.asarray(rng.integers(5, size=T))), (w, table)


@pytest.mark.parametrize('T', [1, 7, 16, 33, 100])
def test_rows_do_not_depend_on_the_batch(T):
  """Any tokens, in any order and number, and in another program."""
  tokens, shared = inputs(512)
  want = run(tokens, shared, True)
  at = np.random.default_rng(T).choice(512, T, replace=False)
  some = jax.tree.map(lambda x: x[at], tokens)
  for a, b in zip(run(some, shared, True), want, strict=True):
    np.testing.assert_array_equal(a, b[at])
  other = jax.jit(
    lambda t, s: invariant.rows(layer, jax.tree.map(jnp.copy, t), s, True)
  )
  np.testing.assert_array_equal(other(some, shared)[0], want[0][at])


def test_ordinary_rows_do():
  """Else nothing here would show anything."""
  tokens, shared = inputs(512)
  some = jax.tree.map(lambda x: x[:16], tokens)
  a, b = run(some, shared, False)[0], run(tokens, shared, False)[0][:16]
  assert np.any(np.asarray(a) != b)


def test_values_and_gradients_are_those_of_the_function():
  """Of integers there is none."""
  tokens, shared = inputs(50)

  def loss(x, shared, tiled):
    return jnp.sum(jnp.sin(run((x, tokens[1]), shared, tiled)[0]))

  both = [
    jax.value_and_grad(loss, argnums=(0, 1))(tokens[0], shared, tiled)
    for tiled in (True, False)
  ]
  for a, b in zip(*map(jax.tree.leaves, both), strict=True):
    assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)
