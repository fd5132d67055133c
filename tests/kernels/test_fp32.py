"""fp32 products of bf16 activations and fp32 weights, against float64."""

import jax
import jax.numpy as jnp
import numpy as np

from m2jax.kernels import fp32


def tensors(dtype, seed=0):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.normal(size=(2, 32, 1024)), dtype)
  return x, jnp.asarray(rng.normal(size=(1024, 64)), jnp.float32)


def test_split_weights_lose_no_more_than_fp32_sums_do():
  """What runs on TPU in two bf16 products; one would be a hundred times as far off.
  Compiled, since the compiler may drop a rounding that it takes for an accident."""
  x, w = tensors(jnp.bfloat16)
  exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
  scale = np.std(exact)

  def error(function):
    return np.abs(np.asarray(jax.jit(function)(x, w), np.float64) - exact).max() / scale

  once = error(lambda x, w: jnp.matmul(x, w.astype(x.dtype)).astype(jnp.float32))
  assert error(fp32._split) < 1.5e-5 < 1e-3 < once
  assert error(fp32._exact) < 5e-6


def test_gradients_equal_those_of_a_plain_product():
  """The rule is written by hand: in fp32 it has to be the derivative."""
  x, w = tensors(jnp.float32)

  def loss(product):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), argnums=(0, 1))(x, w)

  for got, want in zip(loss(fp32.matmul), loss(jnp.matmul), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-3)


def test_gradients_have_the_types_of_their_arguments():
  """bf16 activations get bf16 cotangents, weights theirs, also in float64."""
  for dtype in (jnp.bfloat16, jnp.float32):
    x, w = tensors(dtype)
    d_x, d_w = jax.grad(lambda x, w: jnp.sum(fp32.matmul(x, w)), argnums=(0, 1))(x, w)
    assert (d_x.dtype, d_w.dtype) == (x.dtype, w.dtype)
    assert fp32.matmul(x, w).dtype == jnp.float32
