"""QK-norm and RoPE on GPU: a Pallas Triton kernel that reads and writes x once.

A program computes one token with all its channels; in the backward pass several tokens
in sequence, and one row of partial sums of the scale's gradient. The partner of a
rotated dim is read a second time, from cache. tpu.py has the formulas.

Axes: T tokens, C = heads · H channels, H head dim, R rotary dim; c = C rounded up to a
power of two.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from m2jax.kernels import block_sizes

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_MOST_CHANNELS = 1 << 15


class _Static(NamedTuple):
  head_dim: int
  eps: float


class _Lanes(NamedTuple):
  """Values of each channel: [c]."""

  at: jax.Array
  live: jax.Array  # a channel, not padding
  partner: jax.Array  # channel it is rotated with; itself past R
  angle: jax.Array  # column of cos and sin
  rotated: jax.Array
  sign: jax.Array  # of sin in the forward rotation


def _lanes(static, x, cos):
  channels, half = x.shape[1], cos.shape[1]
  at = lax.iota(jnp.int32, pl.next_power_of_2(channels))
  dim = lax.rem(at, jnp.int32(static.head_dim))
  first, rotated = dim < half, dim < 2 * half
  step = jnp.where(rotated, jnp.where(first, half, -half), 0)
  angle = jnp.where(rotated, dim - jnp.where(first, 0, half), 0)
  sign = jnp.where(first, -1.0, 1.0)
  return _Lanes(at, at < channels, at + step, angle, rotated, sign)


def _row(ref, row, at, live):
  return plgpu.load(ref.at[row, at], mask=live, other=0).astype(jnp.float32)


def _angles(cos, sin, row, lanes):
  c = plgpu.load(cos.at[row, lanes.angle], mask=lanes.rotated, other=1)
  s = plgpu.load(sin.at[row, lanes.angle], mask=lanes.rotated, other=0)
  return c, s * lanes.sign


def _rsqrt(static, x, values, variance, row):
  mean = jnp.sum(values * values) / x.shape[1] if variance is None else variance[row, 0]
  return lax.rsqrt(mean + static.eps)


def _forward_kernel(static, x, scale, cos, sin, variance, out):
  row, lanes = pl.program_id(0), _lanes(static, x, cos)
  values = _row(x, row, lanes.at, lanes.live)
  r = _rsqrt(static, x, values, variance, row)

  def scaled(values, at):
    x_hat = (values * r).astype(x.dtype).astype(jnp.float32)
    weight = plgpu.load(scale.at[at], mask=lanes.live, other=0).astype(x.dtype)
    return (x_hat * weight.astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)

  c, s = _angles(cos, sin, row, lanes)
  partner = scaled(_row(x, row, lanes.partner, lanes.live), lanes.partner)
  y = scaled(values, lanes.at) * c + partner * s
  plgpu.store(out.at[row, lanes.at], y.astype(out.dtype), mask=lanes.live)


class _BackwardRefs(NamedTuple):
  """Refs in the order in which Pallas passes them; whole arrays."""

  x: Any  # [T, C]
  scale: Any  # [C]
  cos: Any  # [T, R/2]
  sin: Any
  variance: Any  # [T, 1] or None
  d_out: Any  # like x
  d_x: Any
  d_scale: Any  # [programs, C]
  d_variance: Any  # like variance


def _backward_kernel(static, tokens, *refs):
  """A program computes `tokens` tokens and their share of d_scale."""
  x, scale, cos, sin, variance, d_out, d_x, d_scale, d_variance = _BackwardRefs(*refs)
  lanes = _lanes(static, x, cos)
  weight = plgpu.load(scale.at[lanes.at], mask=lanes.live, other=0).astype(jnp.float32)
  begin = pl.program_id(0) * tokens

  def token(row, total):
    values = _row(x, row, lanes.at, lanes.live)
    r = _rsqrt(static, x, values, variance, row)
    x_hat = values * r
    c, s = _angles(cos, sin, row, lanes)
    d_y = _row(d_out, row, lanes.at, lanes.live) * c
    d_y -= _row(d_out, row, lanes.partner, lanes.live) * s
    g = d_y * weight
    dot = jnp.sum(g * x_hat)
    if variance is None:
      d = r * (g - x_hat * (dot / x.shape[1]))
    else:
      d = r * g
      d_variance[row, 0] = -0.5 * r * r * dot
    plgpu.store(d_x.at[row, lanes.at], d.astype(d_x.dtype), mask=lanes.live)
    return total + d_y * x_hat

  end = jnp.minimum(begin + tokens, x.shape[0])
  total = lax.fori_loop(begin, end, token, jnp.zeros(lanes.at.shape, jnp.float32))
  plgpu.store(d_scale.at[pl.program_id(0), lanes.at], total, mask=lanes.live)


def _call(kernel, name, programs, arrays, outs):
  sizes = block_sizes.get('gpu', 'qk_norm_rope')
  return pl.pallas_call(
    kernel,
    grid=(programs,),
    out_shape=outs,
    compiler_params=plgpu.CompilerParams(num_warps=sizes['warps']),
    name=f'qk_norm_rope_{name}',
  )(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_rope(static, x, scale, cos, sin, variance):
  kernel = functools.partial(_forward_kernel, static)
  out = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return _call(kernel, 'forward', len(x), [x, scale, cos, sin, variance], out)


def _fwd(static, *arrays):
  return _norm_rope(static, *arrays), arrays


def _bwd(static, arrays, d_out):
  x, scale, _, _, variance = arrays
  tokens = block_sizes.get('gpu', 'qk_norm_rope')['tokens']
  programs = pl.cdiv(len(x), tokens)
  kernel = functools.partial(_backward_kernel, static, tokens)
  outs = [
    jax.ShapeDtypeStruct(x.shape, x.dtype),
    jax.ShapeDtypeStruct((programs, x.shape[1]), jnp.float32),
    None if variance is None else jax.ShapeDtypeStruct(variance.shape, jnp.float32),
  ]
  d_x, d_scale, d_variance = _call(kernel, 'backward', programs, [*arrays, d_out], outs)
  return d_x, jnp.sum(d_scale, axis=0).astype(scale.dtype), None, None, d_variance


_norm_rope.defvjp(_fwd, _bwd)


def unsupported_reason(x, head_dim, rotary_dim) -> str | None:
  """Why the kernel does not support these tensors; None where it does."""
  del head_dim, rotary_dim
  if x.dtype not in _DTYPES:
    return f'{x.dtype}: must be bfloat16, float16 or float32'
  if x.shape[1] > _MOST_CHANNELS:
    return f'{x.shape[1]} channels: at most {_MOST_CHANNELS} fit a program'
  return None


def norm_rope(x, scale, cos, sin, variance, *, head_dim, eps):
  """Same contract as `reference.norm_rope`.

  Raises:
    ValueError: `unsupported_reason`: a dtype other than bfloat16, float16 and float32,
      or more than 2^15 channels.
  """
  if reason := unsupported_reason(x, head_dim, 2 * cos.shape[1]):
    raise ValueError(f'norm_rope on GPU: {reason}')
  cos, sin = (a.astype(jnp.float32) for a in (cos, sin))
  variance = None if variance is None else variance.astype(jnp.float32)
  return _norm_rope(_Static(head_dim, eps), x, scale, cos, sin, variance)
