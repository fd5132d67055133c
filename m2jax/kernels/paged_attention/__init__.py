"""Attention over a key/value cache in pages: the rollout engine's, forward only."""

from m2jax.kernels.paged_attention.api import attend
from m2jax.kernels.paged_attention.cache import Cache, gather

__all__ = ['Cache', 'attend', 'gather']
