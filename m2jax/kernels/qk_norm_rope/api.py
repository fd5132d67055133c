"""`norm_rope`: QK-norm and RoPE's implementation for the platform lowered for."""

from __future__ import annotations

import functools

import jax

from m2jax.kernels.qk_norm_rope import gpu, reference, tpu

_IMPLEMENTATIONS = {
  'reference': reference.norm_rope,
  'cpu': reference.norm_rope,
  'tpu': tpu.norm_rope,
  'gpu': gpu.norm_rope,
}


def norm_rope(
  x: jax.Array,
  scale: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  *,
  head_dim: int,
  eps: float,
  variance: jax.Array | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """RMSNorm over all channels of queries, or of keys, then RoPE on each head.

  Args:
    x: [T, C], heads · head_dim channels.
    scale: [C] of the norm.
    cos, sin: [T, R/2], at least fp32; no gradient. Of each head the first R dims are
      rotated, dim i with dim i + R/2.
    head_dim: channels of a head.
    eps: added to the mean square.
    variance: [T, 1], at least fp32: the mean square to divide by, where x is one
      device's share of the channels; None: that of x itself. It takes a gradient.
    implementation: 'reference', 'cpu', 'tpu' or 'gpu'; None is that of the platform
      lowered for, or 'reference' where that does not support these tensors.

  Returns:
    [T, C] in x's dtype. The norm is computed in at least fp32 and rounded to x's dtype
    before the scale, and after it, as M2 does.

  Raises:
    ValueError: an unknown implementation, heads that do not divide C, or tensors that
      the implementation named does not support.
  """
  if x.shape[1] % head_dim or 2 * cos.shape[1] > head_dim:
    raise ValueError(
      f'norm_rope: {x.shape[1]} channels in heads of {head_dim} with '
      f'{2 * cos.shape[1]} rotary dims'
    )
  cos, sin = jax.lax.stop_gradient((cos, sin))
  static = dict(head_dim=head_dim, eps=eps)
  arrays = (x, scale, cos, sin, variance)
  if implementation is None:

    def supported(module):
      reason = module.unsupported_reason(x, head_dim, 2 * cos.shape[1])
      return functools.partial((reference if reason else module).norm_rope, **static)

    return jax.lax.platform_dependent(
      *arrays,
      tpu=supported(tpu),
      cuda=supported(gpu),
      default=functools.partial(reference.norm_rope, **static),
    )
  if implementation not in _IMPLEMENTATIONS:
    raise ValueError(
      f'norm_rope: implementation={implementation!r}, want one of '
      f'{list(_IMPLEMENTATIONS)}'
    )
  return _IMPLEMENTATIONS[implementation](*arrays, **static)
