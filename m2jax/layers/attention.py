"""Grouped-query attention with flat QK-norm and partial RoPE (m2-and-forge.md §1.4).

One RMSNorm over all N·H query channels and one over all K·H key channels, before the
head split and before RoPE. Activations are [T, D] matrices: one matmul a projection.

Axes: T = B·S tokens, D model, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import jax

from m2jax.config import ModelConfig
from m2jax.kernels import tree_attention
from m2jax.layers import rope
from m2jax.layers.norm import rms_norm


def project(x, p, cfg: ModelConfig, tables):
  """x [T, D] → q [T, N, H], k, v [T, K, H], normed and rotated."""
  q = rms_norm(x @ p['q'].astype(x.dtype), p['q_norm'], cfg.rms_norm_eps)
  k = rms_norm(x @ p['k'].astype(x.dtype), p['k_norm'], cfg.rms_norm_eps)
  v = x @ p['v'].astype(x.dtype)
  q = rope.rotate(q.reshape(-1, cfg.num_heads, cfg.head_dim), *tables)
  k = rope.rotate(k.reshape(-1, cfg.num_kv_heads, cfg.head_dim), *tables)
  return q, k, v.reshape(k.shape)


def attend(x, p, cfg: ModelConfig, tables, subtree_end: jax.Array):
  """Forest attention: x [T, D], subtree_end [B, S] → [T, D]."""
  q, k, v = project(x, p, cfg, tables)
  rows = subtree_end.shape
  out = tree_attention.attend(
    q.reshape(*rows, *q.shape[1:]),
    k.reshape(*rows, *k.shape[1:]),
    v.reshape(*rows, *v.shape[1:]),
    subtree_end,
  )
  return out.reshape(x.shape[0], -1) @ p['o'].astype(x.dtype)
