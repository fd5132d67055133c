"""Prefill and one decode step on a mesh, with sharded weights.

Under the rules `serve` no weights are gathered: rows of the cache are sharded over
`data` and `expert`, heads, vocabulary and expert channels over `tensor`, experts over
`expert`, and tokens are sent to their experts. Pure functions over global arrays;
inside, each device computes its own rows. `m2jax.plan` compiles them for a slice. The
engine (`rollout.calls`) does not call them: its slots can be in any row, so each of its
devices stores all of them.

Axes: P rows, C new tokens of a row, S positions of the cache, N positions of a tail,
V vocabulary, D model, L layers, K key/value heads, H head dim.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.layers import head
from m2jax.rollout import forward, kv_cache, sampling
from m2jax.rollout.kv_cache import KvCache, Tail
from m2jax.sharding import Sharding


class Sampling(NamedTuple):
  """How each row's next token is drawn, all [P]; see `sampling.sample`."""

  seeds: jax.Array  # [P, 2]
  counters: jax.Array
  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array


def cache_specs(rules: sharding_lib.Rules) -> KvCache:
  """PartitionSpecs of a KvCache: rows, and heads like the key/value projections."""
  spec = rules.spec('cache', None, 'rows', 'heads', None, None)
  return KvCache(spec, spec)


def prefill(
  cfg: ModelConfig,
  sharding: Sharding,
  variables,
  cache: KvCache,
  tokens: jax.Array,
  starts: jax.Array,
) -> KvCache:
  """Consumes C tokens of each row and writes their keys and values.

  Args:
    cache: k [L, P, K, H, S], v [L, P, K, S, H].
    tokens: [P, C] int32.
    starts: [P] int32, positions in the cache before; at most S - C.

  Returns:
    The cache with positions starts … starts + C - 1 of each row filled.
  """

  def run(variables, cache, tokens, starts):
    _, tail = _extend(cfg, sharding, variables, cache, tokens, starts)
    return _append(cache, tail, starts)

  rules = sharding.rules
  caches, row = cache_specs(rules), rules.spec('rows', 'rows')
  specs = (sharding_lib.param_specs(cfg, rules), caches, row, row)
  return sharding.shard_map(run, specs, caches)(variables, cache, tokens, starts)


def decode(
  cfg: ModelConfig,
  sharding: Sharding,
  variables,
  cache: KvCache,
  tokens: jax.Array,
  lengths: jax.Array,
  draws: Sampling,
) -> tuple[KvCache, jax.Array, jax.Array]:
  """Consumes each row's last token and draws its next.

  Args:
    cache: as `prefill`. tokens: [P] int32. lengths: [P] int32, positions in use.

  Returns:
    The cache with one more position per row, tokens [P] int32, logprobs [P] fp32.
  """

  def run(variables, cache, tokens, lengths, draws):
    hidden, tail = _extend(cfg, sharding, variables, cache, tokens[:, None], lengths)
    logits = head.logits(variables['params'], hidden[:, 0])
    logits = sharding.all_gather(logits, 'vocab', axis=1)
    token, logprob = sampling.sample(logits, *draws)
    return _append(cache, tail, lengths), token, logprob

  rules = sharding.rules
  caches, row = cache_specs(rules), rules.spec('rows', 'rows')
  specs = (sharding_lib.param_specs(cfg, rules), caches, row, row, row)
  arguments = variables, cache, tokens, lengths, draws
  return sharding.shard_map(run, specs, (caches, row, row))(*arguments)


def _extend(cfg, sharding: Sharding, variables, cache: KvCache, tokens, starts):
  rows, kv_heads, head_dim = cache.v.shape[1], cache.v.shape[2], cache.v.shape[4]
  shape = (cfg.num_layers, rows, tokens.shape[1], kv_heads, head_dim)
  tail = Tail(jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype))
  return forward.extend(cfg, variables, tokens, cache, starts, tail, 0, sharding)


def _append(cache: KvCache, tail: Tail, starts) -> KvCache:
  rows = jnp.arange(len(starts), dtype=jnp.int32)
  return kv_cache.append(cache, tail, rows, jnp.int32(len(starts)), starts)


def jit_prefill(cfg: ModelConfig, sharding: Sharding):
  """`prefill` compiled; donates the cache."""
  return jax.jit(functools.partial(prefill, cfg, sharding), donate_argnums=1)


def jit_decode(cfg: ModelConfig, sharding: Sharding):
  """`decode` compiled; donates the cache."""
  return jax.jit(functools.partial(decode, cfg, sharding), donate_argnums=1)
