"""Plain matmuls whose saved activations have few bits.

The forward pass and the gradient of x are exact. The weights' gradient reads x as it
would have been saved: as integers with one scale per token. GNMR was tested under this
stress (arXiv 2606.00539). It reproduces the rounding but saves no memory: saved
activations have x's dtype.

Axes: T rows (tokens), D in, F out, E groups.
"""

from __future__ import annotations

import functools

import jax

from m2jax.config import Matmuls
from m2jax.kernels import grouped_matmul
from m2jax.kernels.block_fp8.blocks import rounded_to_int


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot(x, w, bits: int, how: Matmuls):
  """x [T, D] · w [D, F] → [T, F]."""
  return x @ w


def _dot_fwd(x, w, bits, how):
  return x @ w, (rounded_to_int(x, bits, how), w)


def _dot_bwd(bits, how, residuals, d_out):
  saved, w = residuals
  return d_out @ w.T, saved.T @ d_out


dot.defvjp(_dot_fwd, _dot_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped(rows, w, group_sizes, bits: int, how: Matmuls):
  """`grouped_matmul.matmul` of rows [T, D] and w [E, D, F]."""
  return grouped_matmul.matmul(rows, w, group_sizes)


def _grouped_fwd(rows, w, group_sizes, bits, how):
  out = grouped_matmul.matmul(rows, w, group_sizes)
  return out, (rounded_to_int(rows, bits, how), w, group_sizes)


def _grouped_bwd(bits, how, residuals, d_out):
  saved, w, group_sizes = residuals
  product = lambda rows, w: grouped_matmul.matmul(rows, w, group_sizes)
  d_rows, d_w = jax.vjp(product, saved, w)[1](d_out)
  return d_rows, d_w, None


grouped.defvjp(_grouped_fwd, _grouped_bwd)
