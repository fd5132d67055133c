"""`attend`: paged attention, dispatched on the target platform.

Axes: P rows, C new tokens of a row (its chunk), N query heads, K key/value heads, H
head dim, S positions of a row's table.
"""

from __future__ import annotations

import functools

from m2jax import platforms
from m2jax.axes import Array, Float, Int
from m2jax.kernels.paged_attention import (
  cpu,
  gpu,
  invariant,
  mosaic_gpu,
  reference,
  tpu,
)
from m2jax.kernels.paged_attention.cache import Cache

_IMPLEMENTATIONS = {
  'reference': reference,
  'cpu': cpu,
  'tpu': tpu,
  'gpu': gpu,
  'mosaic_gpu': mosaic_gpu,
  'invariant': invariant,
}


def attend(
  q: Float[Array, 'P C N H'],
  cache: Cache,
  position: Int[Array, 'P C'],
  subtree_end: Int[Array, 'P C'] | None = None,
  *,
  scale: float | None = None,
  logsumexp: bool = False,
  implementation: str | None = None,
) -> Float[Array, 'P C N H'] | tuple[Float[Array, 'P C N H'], Float[Array, 'P C N']]:
  """Softmax attention of new tokens over what is stored of their rows. No gradient.

  A token sees the stored positions up to its own, which is stored too. The new tokens
  of a row may be a tree in depth-first order, as drafts to be verified are: they are
  stored one after the other from `position[:, 0]` on, and token i sees token j of them
  iff `j <= i < subtree_end[j]`, and all positions before the first.

  Args:
    q: queries; N is a multiple of K.
    cache: keys and values, in pages.
    position: where each token is stored; -1 for padding, which sees nothing. At or
      beyond S a token sees all positions. With `subtree_end` consecutive, but for
      padding at the end.
    subtree_end: exclusive, in the chunk; None: the chunk is a chain.
    scale: factor on the scores; None is H ** -0.5.
    logsumexp: whether to return the logsumexp of each query's scores, too, at least
      fp32; +inf for a query that sees nothing.
    implementation: 'reference', 'cpu', 'tpu', 'mosaic_gpu' (Hopper), 'gpu' (Triton) or
      'invariant' (see that module; without `subtree_end`).
      None is the platform's: on a GPU the first of these two that supports these
      tensors, and where the platform's does not 'cpu', which is plain XLA.

  Returns:
    In q's dtype; 0 for a query that sees nothing.

  Raises:
    ValueError: an unknown implementation, or tensors that the one named does not
      support.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  if implementation not in (None, *_IMPLEMENTATIONS):
    raise ValueError(
      f'attend: implementation={implementation!r}, want one of {list(_IMPLEMENTATIONS)}'
    )

  arrays = (q, cache.stacked(), position, subtree_end)

  def of(name):
    return functools.partial(_IMPLEMENTATIONS[name].attend, scale=scale)

  def first_of(*names):
    found = (n for n in names if not _IMPLEMENTATIONS[n].unsupported_reason(*arrays))
    return of(next(found, 'cpu'))

  if implementation is not None:
    out, lse = of(implementation)(*arrays)
  else:
    out, lse = platforms.dependent(
      *arrays,
      tpu=first_of('tpu'),
      cuda=first_of('mosaic_gpu', 'gpu'),
      default=of('cpu'),
    )
  return (out, lse) if logsumexp else out
