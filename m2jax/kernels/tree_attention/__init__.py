"""Attention over a forest: the one attention primitive of training (law 1)."""

from m2jax.kernels.tree_attention.api import NAME, attend, prepare
from m2jax.kernels.tree_attention.visibility import Visibility

__all__ = ['NAME', 'Visibility', 'attend', 'prepare']
