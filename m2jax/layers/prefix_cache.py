"""Cached state of the path that a chunk's tokens continue (forest/cutting.py).

Axes: B rows, P slots, indexed by position, D model, L layers, K key/value heads, H head
dim; mtp modules.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from m2jax.axes import Array, Float
from m2jax.config import ModelConfig
from m2jax.layers import mtp
from m2jax.sharding import Rules


class PrefixCache(NamedTuple):
  """A cached path, or its next entries.

  Attributes:
    k, v: the trunk's keys and values.
    states: the trunk's states after its final norm.
    mtp: the same for the MTP modules, with mtp as leading axis.
  """

  k: Float[Array, 'L B P K H']
  v: Float[Array, 'L B P K H']
  states: Float[Array, '1 B P D']
  mtp: mtp.Cache | None


def empty(cfg: ModelConfig, rows: int, slots: int) -> PrefixCache:
  """Zeros for paths of at most `slots` tokens."""

  def zeros(copies, states):
    keys = (copies, rows, slots, cfg.num_kv_heads, cfg.head_dim)
    shapes = keys, keys, (states, rows, slots, cfg.embed_dim)
    return (jnp.zeros(shape, cfg.dtype) for shape in shapes)

  modules = mtp.Cache(*zeros(cfg.num_mtp_modules, cfg.num_mtp_modules))
  return PrefixCache(*zeros(cfg.num_layers, 1), modules)


def slots(prefix: PrefixCache | None) -> int:
  """P; 0 without a prefix."""
  return 0 if prefix is None else prefix.states.shape[2]


def specs(rules: Rules) -> PrefixCache:
  """PartitionSpecs: rows as a batch's, heads as the weights'."""
  keys = rules.spec('cached keys', None, 'rows', None, 'heads', None)
  states = rules.spec('cached states', None, 'rows', None, None)
  return PrefixCache(keys, keys, states, mtp.Cache(keys, keys, states))
