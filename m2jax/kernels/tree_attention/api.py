"""`attend`: forest attention, dispatched on the target platform.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from m2jax import platforms
from m2jax.axes import Array, Float
from m2jax.kernels.tree_attention import cpu, gpu, invariant, reference, tpu
from m2jax.kernels.tree_attention.visibility import Visibility

_IMPLEMENTATIONS = {'reference': reference, 'cpu': cpu, 'tpu': tpu, 'gpu': gpu}

# For policies of `jax.checkpoint`: output and logsumexp. A backward pass that has them
# saved recomputes q, k and v only, and runs no forward kernel.
NAME = 'tree_attention'


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
    q, k: arrays, or shapes and dtypes, like those that `attend` then gets. Only the
      ratio of their numbers of heads matters, so that heads may be split over devices.
  """
  visibility = visibility.complete(q.shape[1])
  if tpu.unsupported_reason(q, k, k):
    return visibility
  make = functools.partial(tpu.prepare, q=q, k=k)
  like = jax.eval_shape(make, visibility)

  def unused(visibility):
    del visibility
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

  pairs = platforms.dependent(visibility, tpu=make, default=unused)
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
    scale: factor on the scores; None is H ** -0.5.
    implementation: 'reference', 'cpu', 'tpu' or 'gpu'; None is that of the target
      platform, or 'reference' where that does not support these tensors. 'invariant'
      needs the positions, has no windows, and has the gradient of None.

  Returns:
    In q's dtype; 0 for a query that sees no key.

  Raises:
    ValueError: an unknown implementation, a window without positions, or tensors that
      the implementation named does not support.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  if implementation not in (None, 'invariant', *_IMPLEMENTATIONS):
    raise ValueError(
      f'attend: implementation={implementation!r}, want one of {list(_IMPLEMENTATIONS)}'
    )
  if implementation == 'invariant':
    return _attend((implementation, scale), q, k, v, visibility)
  visibility = visibility.complete(q.shape[1])
  if implementation == 'reference':  # its gradients are jax's
    return reference.attend(q, k, v, visibility, scale=scale)
  return _attend((implementation, scale), q, k, v, visibility)


def _run(which: str, static, q, k, v, visibility, *residuals):
  """An implementation's 'forward' or 'backward'."""
  implementation, scale = static

  def of(name):
    return functools.partial(getattr(_IMPLEMENTATIONS[name], which), scale=scale)

  arrays = (q, k, v, visibility, *residuals)
  if implementation == 'invariant' and which == 'forward':
    return invariant.forward(*arrays, scale=scale)
  if implementation not in (None, 'invariant'):
    return of(implementation)(*arrays)
  return platforms.dependent(
    *arrays,
    cpu=of('cpu'),
    tpu=of('reference' if tpu.unsupported_reason(q, k, v) else 'tpu'),
    cuda=of('reference' if gpu.unsupported_reason(q, k, v) else 'gpu'),
    default=of('reference'),
  )


# One gradient for all platforms: results named inside of `platform_dependent` would be
# saved for each of its branches.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q, k, v, visibility):
  return _run('forward', static, q, k, v, visibility)[0]


def _attend_fwd(static, q, k, v, visibility):
  out, lse = _run('forward', static, q, k, v, visibility)
  flat = out.reshape(*out.shape[:2], -1)  # as the kernels store it: no copy on TPU
  flat, lse = checkpoint_name((flat, lse), NAME)
  return flat.reshape(out.shape), (q, k, v, visibility, flat, lse)


def _attend_bwd(static, residuals, d_out):
  q, k, v, visibility, flat, lse = residuals
  out = flat.reshape(d_out.shape)
  arrays = (q, k, v, visibility, out, lse, d_out)
  return *_run('backward', static, *arrays), None


_attend.defvjp(_attend_fwd, _attend_bwd)
