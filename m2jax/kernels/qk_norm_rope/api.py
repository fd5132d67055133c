"""`norm_rope`: QK-norm and RoPE, dispatched on the target platform.

Axes: T tokens, C = heads · H channels, H head dim, R rotary dim; half = R/2.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from m2jax import platforms
from m2jax.axes import Array, Float
from m2jax.kernels.qk_norm_rope import gpu, reference, tpu

_IMPLEMENTATIONS = {
  'reference': reference.norm_rope,
  'cpu': reference.norm_rope,
  'tpu': tpu.norm_rope,
  'gpu': gpu.norm_rope,
}


def norm_rope(
  x: Float[Array, 'T C'],
  scale: Float[Array, 'C'],
  cos: Float[Array, 'T half'],
  sin: Float[Array, 'T half'],
  *,
  head_dim: int,
  eps: float,
  variance: Float[Array, 'T 1'] | None = None,
  implementation: str | None = None,
) -> Float[Array, 'T C']:
  """RMSNorm over all channels of queries, or of keys, then RoPE on each head.

  Args:
    x: queries or keys of all heads.
    scale: the norm's scale.
    cos, sin: at least fp32; no gradient. Of each head the first R dims are rotated, dim
      i with dim i + R/2.
    head_dim: channels of a head.
    eps: added to the mean square.
    variance: at least fp32: the mean square to divide by, where x is one device's share
      of the channels; None: that of x itself. It takes a gradient.
    implementation: 'reference', 'cpu', 'tpu' or 'gpu'; None is that of the target
      platform, or 'reference' where that does not support these tensors.

  Returns:
    In x's dtype. The norm is computed in at least fp32 and rounded to x's dtype before
    the scale, and after it, as M2 does.

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
  static: dict[str, Any] = dict(head_dim=head_dim, eps=eps)
  arrays = (x, scale, cos, sin, variance)
  if implementation is None:

    def supported(module):
      reason = module.unsupported_reason(x, head_dim, 2 * cos.shape[1])
      return functools.partial((reference if reason else module).norm_rope, **static)

    return platforms.dependent(
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
