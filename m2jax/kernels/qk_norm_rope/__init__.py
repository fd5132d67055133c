"""Flat QK-norm and partial RoPE in one pass over queries or keys."""

from m2jax.kernels.qk_norm_rope.api import norm_rope

__all__ = ['norm_rope']
