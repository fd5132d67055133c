"""x·w in fp32 for activations of any dtype: the product of LM head and router.

Rounding these weights to bf16 would change the logits, and so the choice of experts. A
matrix unit multiplies bf16 and adds in fp32; with fp32 operands it needs six products
of bf16 parts. Activations in bf16 have one part only, so two products are enough: the
weights are split into their rounding to bf16 and the remainder, rounded too. The error
is 2**-17 of a weight, about that of summing thousands of products in fp32.

The products of the backward pass have the precision of the activations.

Axes: T tokens, D model, V outputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from m2jax import platforms
from m2jax.axes import Array, Float


@jax.custom_vjp
def matmul(x: Float[Array, '*T D'], w: Float[Array, 'D V']) -> Float[Array, '*T V']:
  """x·w in at least fp32 on every platform."""
  return product(x, w)


def product(x: Float[Array, '*T D'], w: Float[Array, 'D V']) -> Float[Array, '*T V']:
  """`matmul` without its gradient rule, for callers that have their own."""
  if x.dtype != jnp.bfloat16:
    return _exact(x, w)
  return platforms.dependent(x, w, cpu=_exact, default=_split)


def _exact(x, w):
  dtype = jnp.promote_types(jnp.promote_types(x.dtype, w.dtype), jnp.float32)
  return jnp.matmul(x.astype(dtype), w.astype(dtype), precision=lax.Precision.HIGHEST)


def _split(x, w):
  w = w.astype(jnp.float32)
  # not by casts: the compiler may remove a pair of them, and the remainder with it
  high = lax.reduce_precision(w, exponent_bits=8, mantissa_bits=7)
  parts = (part.astype(jnp.bfloat16) for part in (high, w - high))
  return sum(jnp.matmul(x, part, preferred_element_type=jnp.float32) for part in parts)


def gradients(
  x: Float[Array, 'T D'], w: Float[Array, 'D V'], d_out: Float[Array, 'T V']
) -> tuple[Float[Array, 'T D'], Float[Array, 'D V']]:
  """Cotangents: of x in its dtype, of w in that of `d_out`, at least fp32."""
  half = x.dtype == jnp.bfloat16
  precision = lax.Precision.DEFAULT if half else lax.Precision.HIGHEST
  dtype = d_out.dtype
  d_x = jnp.matmul(d_out, w.T.astype(dtype), precision=precision)
  d_w = jnp.matmul(x.astype(dtype).T, d_out, precision=precision)
  return d_x.astype(x.dtype), d_w


def _bwd(residuals, d_out):
  x, w = residuals
  flat = x.reshape(-1, x.shape[-1]), w, d_out.reshape(-1, d_out.shape[-1])
  d_x, d_w = gradients(*flat)
  return d_x.reshape(x.shape), d_w.astype(w.dtype)


matmul.defvjp(lambda x, w: (product(x, w), (x, w)), _bwd)
