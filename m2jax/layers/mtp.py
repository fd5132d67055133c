"""Multi-token prediction module (algorithms.md §4.1, law 2).

Module k at node v reads the state of module k-1 at parent(v) (module 0 is the trunk
after its final norm) and the embedding of v, and predicts v's children: it looks one
token further than module k-1. Keys of position below k have no such
state and are hidden.
Hidden half first in the projection (m2-and-forge.md §3); final norm and head are the
trunk's.

Axes: T = B·S tokens, D model.
"""

from __future__ import annotations

import jax.numpy as jnp

from m2jax.config import ModelConfig
from m2jax.layers.norm import rms_norm


def join(parent_state, embedding, p, cfg: ModelConfig):
  """Module input from the parent's state and the token's embedding, [T, D] each."""
  both = jnp.concatenate(
    [
      rms_norm(parent_state, p['hidden_norm'], cfg.rms_norm_eps),
      rms_norm(embedding, p['embed_norm'], cfg.rms_norm_eps),
    ],
    axis=-1,
  )
  return both @ p['proj'].astype(both.dtype)
