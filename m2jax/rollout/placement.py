"""The engine on a mesh: which device stores and computes what.

No weights are gathered: heads, vocabulary and expert channels are split over `tensor`,
experts over `expert`. All other axes split the rows of a call. Every device stores all
slots (of its heads), so that any slot can be in any row: each computes its own rows,
and their results and new cache entries are gathered.

Axes: P rows of a call, n shards of the rows, S slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from m2jax.config import ModelConfig
from m2jax.rollout.decode_state import DecodeState, Prefix
from m2jax.rollout.kv_cache import KvCache
from m2jax.sharding import PRESETS, Rules, Sharding

_ROWS = ('data', 'fsdp', 'context', 'expert')
_EVERYWHERE = PartitionSpec()


def serving(cfg: ModelConfig, sharding: Sharding) -> Sharding:
  """The mesh of `sharding` under the engine's rules, with its method of dispatch.

  Key/value heads that do not divide over `tensor` are computed on each of its devices.

  Raises:
    ValueError: the model does not divide over the mesh; names the field.
  """
  if sharding.mesh is None:
    return sharding
  rules = dataclasses.replace(
    PRESETS['serve'],
    rows=_ROWS,
    dispatch=sharding.rules.dispatch,
    exchange_factor=sharding.rules.exchange_factor,
  )
  served = Sharding(sharding.mesh, rules)
  if cfg.num_kv_heads % served.size('heads'):
    served = Sharding(sharding.mesh, dataclasses.replace(rules, heads=None))
  served.check(cfg)
  return served


def cache_specs(rules: Rules, *, record_experts: bool) -> KvCache:
  """PartitionSpecs of a KvCache: heads like the key/value projections."""
  spec = rules.spec('cache', None, None, 'heads', None, None)
  return KvCache(spec, spec, _EVERYWHERE if record_experts else None)


def state_specs(rules: Rules, *, record_experts: bool) -> DecodeState:
  """PartitionSpecs of a DecodeState, a prefix of its tree."""
  cache = cache_specs(rules, record_experts=record_experts)
  return DecodeState(cache, _EVERYWHERE)


def prefix_specs(rules: Rules, *, record_experts: bool) -> Prefix:
  """PartitionSpecs of a Prefix."""
  cache = cache_specs(rules, record_experts=record_experts)
  return Prefix(cache, _EVERYWHERE, _EVERYWHERE)


def own_rows(sharding: Sharding, tree: Any) -> Any:
  """[P, …] → this device's [⌈P/n⌉, …]; rows beyond the last are zeros."""
  shards = sharding.size('rows')
  if shards == 1:
    return tree

  def one(x):
    part = -(-len(x) // shards)
    x = jnp.pad(x, [(0, part * shards - len(x))] + [(0, 0)] * (x.ndim - 1))
    return lax.dynamic_slice_in_dim(x, sharding.index('rows') * part, part)

  return jax.tree.map(one, tree)


def all_rows(sharding: Sharding, tree: Any, count: int, axis: int = 0) -> Any:
  """The inverse of `own_rows`, for `count` = P rows along `axis`."""
  if sharding.size('rows') == 1:
    return tree

  def one(x):
    gathered = sharding.all_gather(x, 'rows', axis)
    return lax.slice_in_dim(gathered, 0, count, axis=axis)

  return jax.tree.map(one, tree)
