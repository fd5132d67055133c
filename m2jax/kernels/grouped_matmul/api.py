"""`matmul`: the grouped matmul, dispatched on the target platform.

Axes: T rows sorted by group, E groups, D in, F out.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from m2jax import platforms
from m2jax.axes import Array, Float, Int
from m2jax.kernels.grouped_matmul import cpu, gpu, reference, tpu

_IMPLEMENTATIONS: dict[str, Callable] = {
  'reference': reference.matmul,
  'cpu': cpu.matmul,
  'tpu': tpu.matmul,
  'gpu': gpu.matmul,
}


def _ragged_dot(lhs, rhs, group_sizes):
  return jax.lax.ragged_dot(lhs, rhs, group_sizes)


def matmul(
  lhs: Float[Array, 'T D'],
  rhs: Float[Array, 'E D F'],
  group_sizes: Int[Array, 'E'],
  *,
  implementation: str | None = None,
) -> Float[Array, 'T F']:
  """Multiplies consecutive groups of rows by their own matrices.

  Args:
    lhs: rows sorted by group.
    rhs: the groups' matrices.
    group_sizes: rows of each group, int32; sum at most T.
    implementation: 'reference', 'cpu', 'tpu' or 'gpu'; None is that of the target
      platform, or `lax.ragged_dot` where that does not support these tensors.

  Returns:
    In lhs's dtype. Rows past the sum of the sizes are 0 and get no gradient.

  Raises:
    ValueError: an unknown implementation, or tensors that the one named does not
      support.
  """
  if implementation is None:
    return platforms.dependent(
      lhs,
      rhs,
      group_sizes,
      tpu=_ragged_dot if tpu.unsupported_reason(lhs, rhs) else tpu.matmul,
      cuda=_ragged_dot if gpu.unsupported_reason(lhs, rhs) else gpu.matmul,
      default=cpu.matmul,
    )
  if implementation not in _IMPLEMENTATIONS:
    raise ValueError(
      f'matmul: implementation={implementation!r}, want one of {list(_IMPLEMENTATIONS)}'
    )
  return _IMPLEMENTATIONS[implementation](lhs, rhs, group_sizes)
