"""`attend`: picks an implementation of forest attention by the platform lowered for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from m2jax.kernels.tree_attention import cpu, gpu, reference, tpu

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
  subtree_end: jax.Array,
  *,
  q_index: jax.Array | None = None,
  window: int | None = None,
  sinks: int = 0,
  q_position: jax.Array | None = None,
  k_position: jax.Array | None = None,
  scale: float | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Softmax attention in which a token sees its ancestors and itself.

  Args:
    q: [B, Q, N, H] queries.
    k, v: [B, S, K, H] keys and values, N a multiple of K.
    subtree_end: [B, S] int32: key j is seen iff `j <= q_index[i] < subtree_end[j]`.
    q_index: [B, Q] int32 index of each query in the row; None: 0 … Q-1, Q = S.
    window: a query also needs `q_position - k_position < window`, except for keys of
      position below `sinks`; None: no window.
    q_position, k_position: [B, Q] and [B, S] int32, needed by `window`.
    scale: of the scores; None is H ** -0.5.
    implementation: 'reference', 'cpu', 'tpu' or 'gpu'; None resolves by the platform
      lowered for, to 'reference' where its own does not take these tensors.

  Returns:
    [B, Q, N, H] in q's dtype; a query that sees no key gives 0.

  Raises:
    ValueError: an unknown implementation, a window without positions, or tensors that
      the implementation named does not take.
  """
  if window is not None and (q_position is None or k_position is None):
    raise ValueError('attend: window needs q_position and k_position')
  if q_index is None:
    q_index = jnp.broadcast_to(
      jnp.arange(q.shape[1], dtype=jnp.int32), (q.shape[0], q.shape[1])
    )
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  static = dict(window=window, sinks=sinks, scale=scale)
  if window is None:
    q_position = k_position = None

  def call(name, *arrays):
    q, k, v, subtree_end, q_index, q_position, k_position = arrays
    return _IMPLEMENTATIONS[name](
      q,
      k,
      v,
      subtree_end,
      q_index,
      q_position=q_position,
      k_position=k_position,
      **static,
    )

  arrays = (q, k, v, subtree_end, q_index, q_position, k_position)
  if implementation is None:
    return jax.lax.platform_dependent(
      *arrays,
      cpu=functools.partial(call, 'cpu'),
      tpu=functools.partial(call, 'reference' if tpu.refusal(q, k, v) else 'tpu'),
      cuda=functools.partial(call, 'reference' if gpu.refusal(q, k, v) else 'gpu'),
      default=functools.partial(call, 'reference'),
    )
  if implementation not in _IMPLEMENTATIONS:
    raise ValueError(
      f'attend: implementation={implementation!r}, want one of {list(_IMPLEMENTATIONS)}'
    )
  return call(implementation, *arrays)
