"""`attend`: forest attention's implementation for the platform lowered for.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float
from m2jax.kernels.tree_attention import cpu, gpu, reference, tpu
from m2jax.kernels.tree_attention.visibility import Visibility

_IMPLEMENTATIONS = {
  'reference': reference.attend,
  'cpu': cpu.attend,
  'tpu': tpu.attend,
  'gpu': gpu.attend,
}


def prepare(
  visibility: Visibility,
  q: Float[Array | jax.ShapeDtypeStruct, 'B Q N H'],
  k: Float[Array | jax.ShapeDtypeStruct, 'B S K H'],
) -> Visibility:
  """`visibility` with the TPU kernels' block pairs, for all layers that share it.

  XLA does not move the making of block pairs out of the backward pass of a loop over
  layers: outside the loop they are made once per step. On other platforms nothing is
  computed.

  Args:
    visibility: which keys each query sees.
    q, k: of the shapes and dtypes of those that `attend` then gets. Only the ratio of
      their numbers of heads matters, so that heads may be split over devices.
  """
  visibility = visibility.complete(q.shape[1])
  if tpu.unsupported_reason(q, k, k):
    return visibility
  make = functools.partial(tpu.prepare, q=q, k=k)
  like = jax.eval_shape(make, visibility)

  def unused(visibility):
    del visibility
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

  pairs = jax.lax.platform_dependent(visibility, tpu=make, default=unused)
  return dataclasses.replace(visibility, pairs=pairs)


def attend(
  q: Float[Array, 'B Q N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  visibility: Visibility,
  *,
  scale: float | None = None,
  implementation: str | None = None,
) -> Float[Array, 'B Q N H']:
  """Softmax attention in which a token sees its ancestors and itself.

  Args:
    q: queries; N is a multiple of K.
    k, v: keys and values.
    visibility: which keys each query sees.
    scale: of the scores; None is H ** -0.5.
    implementation: 'reference', 'cpu', 'tpu' or 'gpu'; None is that of the platform
      lowered for, or 'reference' where that does not support these tensors.

  Returns:
    In q's dtype; 0 for a query that sees no key.

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
