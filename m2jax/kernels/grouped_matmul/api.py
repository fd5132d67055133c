"""`matmul`: the implementation of the grouped matmul for the platform lowered to."""

from __future__ import annotations

import jax

from m2jax.kernels.grouped_matmul import cpu, reference

_IMPLEMENTATIONS = {'reference': reference.matmul, 'cpu': cpu.matmul}


def _ragged_dot(lhs, rhs, group_sizes):
  return jax.lax.ragged_dot(lhs, rhs, group_sizes)


def matmul(
  lhs: jax.Array,
  rhs: jax.Array,
  group_sizes: jax.Array,
  *,
  implementation: str | None = None,
) -> jax.Array:
  """Multiplies consecutive groups of rows by their own matrices.

  Args:
    lhs: [T, D], rows sorted by group.
    rhs: [E, D, F].
    group_sizes: [E] int32, sum at most T.
    implementation: 'reference' or 'cpu'; None resolves by the platform lowered for.

  Returns:
    [T, F] in lhs's dtype. Rows past the sum of the sizes give 0, and no gradient.

  Raises:
    ValueError: an unknown implementation.
  """
  if implementation is None:
    return jax.lax.platform_dependent(
      lhs, rhs, group_sizes, cpu=cpu.matmul, default=_ragged_dot
    )
  if implementation not in _IMPLEMENTATIONS:
    raise ValueError(
      f'matmul: implementation={implementation!r}, want one of {list(_IMPLEMENTATIONS)}'
    )
  return _IMPLEMENTATIONS[implementation](lhs, rhs, group_sizes)
