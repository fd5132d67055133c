"""Matmul of rows grouped by expert: [T, D] x [E, D, F] -> [T, F]."""

from m2jax.kernels.grouped_matmul.api import matmul

__all__ = ['matmul']
