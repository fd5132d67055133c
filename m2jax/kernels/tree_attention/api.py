"""`attend`: forest attention's implementation for the platform lowered for."""

from __future__ import annotations

import functools

import jax

from m2jax.kernels.tree_attention import cpu, gpu, reference, tpu
from m2jax.kernels.tree_attention.visibility import Visibility

_IMPLEMENTATIONS = {
  'reference': reference.attend,
  'cpu': cpu.attend,
  'tpu': tpu.attend,
  'gpu': gpu.attend,
}


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  visibility: Visibility,
  *,
  scale: float | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Softmax attention in which a token sees its ancestors and itself.

  Args:
    q: [B, Q, N, H] queries.
    k, v: [B, S, K, H] keys and values, N a multiple of K.
    visibility: which keys each query sees.
    scale: of the scores; None is H ** -0.5.
    implementation: 'reference', 'cpu', 'tpu' or 'gpu'; None is that of the platform
      lowered for, or 'reference' where that does not support these tensors.

  Returns:
    [B, Q, N, H] in q's dtype; 0 for a query that sees no key.

  Raises:
    ValueError: an unknown implementation, a window without positions, or tensors that
      the implementation named does not support.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  arrays = (q, k, v, visibility.complete(q.shape[1]))

  def call(name):
    return functools.partial(_IMPLEMENTATIONS[name], scale=scale)

  if implementation is None:
    return jax.lax.platform_dependent(
      *arrays,
      cpu=call('cpu'),
      tpu=call('reference' if tpu.unsupported_reason(q, k, v) else 'tpu'),
      cuda=call('reference' if gpu.unsupported_reason(q, k, v) else 'gpu'),
      default=call('reference'),
    )
  if implementation not in _IMPLEMENTATIONS:
    raise ValueError(
      f'attend: implementation={implementation!r}, want one of {list(_IMPLEMENTATIONS)}'
    )
  return call(implementation)(*arrays)
