"""QK-norm and RoPE on TPU: a Pallas Mosaic kernel that reads and writes x once.

A block is a number of tokens with all their channels. The partner of a rotated dim
comes from a roll of the lanes of its head. The backward pass recomputes the norm. The
tokens are split over two cores; in the backward pass each of them writes eight rows of
partial sums of the scale's gradient.

With x̂ = r x, r = (variance + eps)^-1/2, y = scale x̂ and g = scale · rotateᵀ(d_out):
d_x = r (g − x̂ mean(g x̂)), or r g where the variance is given, whose cotangent is
−½ r² Σ g x̂; d_scale = Σ_t x̂ rotateᵀ(d_out).

Axes: T tokens, C = heads · H channels, H head dim, R rotary dim; t tokens of a block.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from m2jax.kernels import block_sizes

_LANES, _SUBLANES = 128, 8
_CORES = 2  # of a v4 or v5p chip; a single core computes both shares in sequence
_DTYPES = (jnp.bfloat16, jnp.float32)


class _Static(NamedTuple):
  head_dim: int
  half: int  # R/2
  eps: float
  tokens: int  # of a block
  count: int  # of all tokens


def _block_tokens():
  return block_sizes.get('tpu', 'qk_norm_rope')['tokens']


def _heads(static, x):
  return [pl.ds(at, static.head_dim) for at in range(0, x.shape[1], static.head_dim)]


def _wide(x):
  return x.astype(jnp.float32)


def _angles(static, table):
  """cos and sin of each lane of a head, [t, H]: 1 and 0 past R, sin < 0 before R/2.

  `table` is [R, t], cos above sin: with tokens along lanes no lane in HBM is padding.
  """
  cos, sin = table[: static.half], table[static.half :]
  past = static.head_dim - 2 * static.half, static.tokens
  cos = jnp.concatenate([cos, cos, jnp.ones(past, jnp.float32)], axis=0)
  sin = jnp.concatenate([-sin, sin, jnp.zeros(past, jnp.float32)], axis=0)
  return cos.T, sin.T


def _rotate(static, x, cos, sin):
  """x [t, H] fp32, cos and sin as from `_angles`; -sin rotates back."""
  lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
  ahead = pltpu.roll(x, np.int32(static.head_dim - static.half), 1)
  behind = pltpu.roll(x, np.int32(static.half), 1)
  return x * cos + jnp.where(lane < static.half, ahead, behind) * sin


def _rsqrt(static, x, variance):
  """1 / rms of each token, [t, 1]."""
  if variance is not None:
    row = lax.rsqrt(variance[...] + static.eps)
    return jnp.broadcast_to(row, (_LANES, static.tokens)).T[:, :1]
  square = jnp.zeros((static.tokens, static.head_dim), jnp.float32)
  for head in _heads(static, x):
    square += _wide(x[:, head]) ** 2
  mean = jnp.sum(square, axis=1, keepdims=True) / x.shape[1]
  return lax.rsqrt(mean + static.eps)


def _forward_kernel(static, inputs, outs):
  (x,), scale, (table, variance) = (inputs[n] for n in ('tokens', 'scale', 'lanes'))
  out = outs['tokens']
  r = _rsqrt(static, x, variance)
  cos, sin = _angles(static, table)
  dtype = x.dtype
  for head in _heads(static, x):
    x_hat = _wide((_wide(x[:, head]) * r).astype(dtype))
    y = (x_hat * _wide(scale[:, head].astype(dtype))).astype(dtype)
    out[:, head] = _rotate(static, _wide(y), cos, sin).astype(dtype)


def _backward_kernel(static, inputs, outs):
  """The grid is cores and their blocks."""
  (x, d_out), scale, (table, variance) = (
    inputs[n] for n in ('tokens', 'scale', 'lanes')
  )
  d_x, d_scale, d_variance = (outs.get(n) for n in ('tokens', 'sums', 'lanes'))
  step, block = pl.program_id(1), pl.program_id(0) * pl.num_programs(1)

  @pl.when(step == 0)
  def _():
    d_scale[...] = jnp.zeros_like(d_scale)

  @pl.when((block + step) * static.tokens < static.count)
  def _():
    row = (block + step) * static.tokens
    row += lax.broadcasted_iota(jnp.int32, (static.tokens, 1), 0)
    r = _rsqrt(static, x, variance)
    cos, sin = _angles(static, table)

    def d_y(head):
      return _rotate(static, _wide(d_out[:, head]), cos, -sin)

    dot = jnp.zeros((static.tokens, static.head_dim), jnp.float32)
    for head in _heads(static, x):
      part = d_y(head) * _wide(x[:, head]) * r
      # tokens past the last are unspecified
      sums = jnp.where(row < static.count, part, 0).reshape(
        -1, _SUBLANES, static.head_dim
      )
      d_scale[:, head] += jnp.sum(sums, axis=0)
      dot += part * _wide(scale[:, head])
    if variance is None:
      mean = jnp.sum(dot, axis=1, keepdims=True) / x.shape[1]
    else:
      mean = jnp.zeros_like(r)
      total = jnp.sum(dot.T, axis=0, keepdims=True)
      d_variance[...] = -0.5 * total / (variance[...] + static.eps)
    for head in _heads(static, x):
      x_hat = _wide(x[:, head]) * r
      g = d_y(head) * _wide(scale[:, head])
      d_x[:, head] = (r * (g - x_hat * mean)).astype(d_x.dtype)


def _cores(static):
  """Cores with a block of their own: one that had none would write another's."""
  return min(_CORES, pl.cdiv(static.count, static.tokens))


def _call(kernel, name, static, inputs, outs):
  """Blocks of tokens in order, split over cores. Arrays by the kind of their blocks."""
  (rows, channels) = inputs['tokens'][0].shape
  cores, blocks = _cores(static), pl.cdiv(rows, static.tokens)
  steps = pl.cdiv(blocks, cores)

  def at(c, i):
    # a core without a last block stays at the one before, and has the same result
    return jnp.minimum(c * steps + i, blocks - 1)

  specs = {
    'tokens': lambda x: pl.BlockSpec(
      (static.tokens, channels), lambda c, i: (at(c, i), 0)
    ),
    'lanes': lambda x: pl.BlockSpec(
      (len(x), static.tokens), lambda c, i: (0, at(c, i))
    ),
    'scale': lambda x: pl.BlockSpec((1, channels), lambda c, i: (0, 0)),
    'sums': lambda x: pl.BlockSpec((_SUBLANES, channels), lambda c, i: (c, 0)),
  }
  in_specs, out_specs = (
    {kind: jax.tree.map(specs[kind], xs) for kind, xs in arrays.items()}
    for arrays in (inputs, outs)
  )
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((inputs, outs)))
  return pl.pallas_call(
    functools.partial(kernel, static),
    grid=(cores, steps),
    in_specs=[in_specs],
    out_specs=out_specs,
    out_shape=outs,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      vmem_limit_bytes=block_sizes.get('tpu', 'qk_norm_rope')['vmem_bytes'],
    ),
    cost_estimate=pl.CostEstimate(
      flops=10 * rows * channels, transcendentals=rows, bytes_accessed=size
    ),
    name=f'qk_norm_rope_{name}',
  )(inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_rope(static, x, scale, table, variance):
  """x [T, C], scale [1, C], table [R, T], variance [1, T] or None → [T, C]."""
  inputs = {'tokens': [x], 'scale': scale, 'lanes': [table, variance]}
  outs = {'tokens': jax.ShapeDtypeStruct(x.shape, x.dtype)}
  return _call(_forward_kernel, 'forward', static, inputs, outs)['tokens']


def _fwd(static, *arrays):
  return _norm_rope(static, *arrays), arrays


def _bwd(static, arrays, d_out):
  x, scale, table, variance = arrays
  inputs = {'tokens': [x, d_out], 'scale': scale, 'lanes': [table, variance]}
  sums = jax.ShapeDtypeStruct((_cores(static) * _SUBLANES, x.shape[1]), jnp.float32)
  outs = {'tokens': jax.ShapeDtypeStruct(x.shape, x.dtype), 'sums': sums}
  if variance is not None:
    outs['lanes'] = jax.ShapeDtypeStruct(variance.shape, jnp.float32)
  outs = _call(_backward_kernel, 'backward', static, inputs, outs)
  d_scale = jnp.sum(outs['sums'], axis=0, keepdims=True).astype(scale.dtype)
  return outs['tokens'], d_scale, None, outs.get('lanes')


_norm_rope.defvjp(_fwd, _bwd)


def unsupported_reason(x, head_dim, rotary_dim) -> str | None:
  """Why the kernel does not support these tensors; None where it does."""
  if x.dtype not in _DTYPES:
    return f'{x.dtype}: must be bfloat16 or float32'
  if head_dim % _LANES:
    return f'heads of {head_dim} channels: must be a multiple of {_LANES}'
  if rotary_dim % (2 * _SUBLANES):
    return f'{rotary_dim} rotary dims: must be a multiple of {2 * _SUBLANES}'
  return None


def norm_rope(x, scale, cos, sin, variance, *, head_dim, eps):
  """Same contract as `reference.norm_rope`.

  Raises:
    ValueError: `unsupported_reason`: a dtype other than bfloat16 and float32, heads
      that are not a multiple of 128 channels, or rotary dims that are not one of 16.
  """
  if reason := unsupported_reason(x, head_dim, 2 * cos.shape[1]):
    raise ValueError(f'norm_rope on TPU: {reason}')
  tokens, count = _block_tokens(), max(len(x), _block_tokens())
  pad = (0, count - len(x)), (0, 0)  # at least one block
  static = _Static(head_dim, cos.shape[1], eps, tokens, count)
  table = jnp.concatenate([_wide(cos).T, _wide(sin).T], axis=0)
  if variance is not None:
    variance = jnp.pad(_wide(variance), pad).T
  out = _norm_rope(
    static, jnp.pad(x, pad), scale[None], jnp.pad(table, pad[::-1]), variance
  )
  return out[: len(x)]
