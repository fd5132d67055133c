"""The gradient rule shared by the TPU and GPU kernels.

Axes: T rows sorted by group, E groups, D in, F out.
"""

from __future__ import annotations

from collections.abc import Callable

import jax


def differentiable(per_row: Callable, per_group: Callable) -> Callable:
  """`matmul(lhs [T, D], rhs [E, D, F], group_sizes [E]) → [T, F]` with its gradient.

  Args:
    per_row: (lhs, rhs, group_sizes, *, transpose) → each row times its group's matrix,
      transposed or not.
    per_group: (lhs, d_out, group_sizes, *, dtype) → Σ over a group's rows of
      lhsᵀ d_out.
  """

  @jax.custom_vjp
  def matmul(lhs, rhs, group_sizes):
    return per_row(lhs, rhs, group_sizes, transpose=False)

  def forward(lhs, rhs, group_sizes):
    return matmul(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)

  def backward(residuals, d_out):
    lhs, rhs, group_sizes = residuals
    d_lhs = per_row(d_out, rhs, group_sizes, transpose=True)
    return d_lhs, per_group(lhs, d_out, group_sizes, dtype=rhs.dtype), None

  matmul.defvjp(forward, backward)
  return matmul
