"""The trunk over an engine's cache: stores new tokens, which then see all before them.

`extend` is `model.trunk` over `CachedKeys`: storage is here, arithmetic there. Prefill,
decoding and JetStream's calls all use this function, for chunks of many tokens or of
one. On a mesh it runs inside `shard_map`, on this device's rows, pages, heads, experts
and part of the vocabulary.

Axes: P rows, C new tokens of a row, n pages of a table, S = n·page positions, D model,
L layers, K key/value heads, G query heads per K, H head dim.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax import model
from m2jax.config import ModelConfig
from m2jax.kernels import block_fp8
from m2jax.layers import rope
from m2jax.moe import served
from m2jax.rollout.engine.contexts import Contexts
from m2jax.rollout.engine.pages import Pages, Places
from m2jax.sharding import ONE_DEVICE, Sharding


class Rows(NamedTuple):
  """What a call consumes of its rows.

  Attributes:
    tokens: [P, C] int32.
    starts: [P] int32, positions stored before; token i of row p has starts[p] + i.
    counts: [P] int32, tokens without padding.
    tables: [P, n] int32, pages of each row's positions, which end within n pages.
  """

  tokens: jax.Array
  starts: jax.Array
  counts: jax.Array
  tables: jax.Array

  @property
  def position(self) -> jax.Array:
    """[P, C]."""
    return self.starts[:, None] + jnp.arange(self.tokens.shape[1])

  @property
  def live(self) -> jax.Array:
    """[P, C], which are not padding."""
    return jnp.arange(self.tokens.shape[1]) < self.counts[:, None]

  def places(self, pages: Pages | Contexts) -> Places:
    """Where the tokens are stored."""
    return pages.places(self.tables, self.position, self.live)


class CachedKeys(NamedTuple):
  """The keys of an engine's cache, where the rows' tokens are stored first.

  A `layers.attention.Keys` whose carry is the cache.

  Attributes:
    tables: cos, sin of RoPE.
    carry: the cache.
    stacked: [L], the cache's index of each layer.
    rows: the tokens' rows.
    visible: [P, S], if not all are: which keys a token other than itself sees.
  """

  tables: tuple[jax.Array, jax.Array]
  carry: Pages | Contexts
  stacked: jax.Array | list[int]
  rows: Rows
  visible: jax.Array | None = None

  def attention(self, cfg: ModelConfig, window: int | None) -> Callable:
    """See `layers.attention.Keys`.

    Raises:
      ValueError: the model has sliding windows, which only forests support.
    """
    if window is not None:
      raise ValueError(
        f'ModelConfig.window={window}: a model with sliding windows can be trained '
        'and scored, but not served: cached attention has no windows'
      )
    rows = self.rows
    sees_up_to = jnp.where(rows.live, rows.position, -1)  # no page is read for padding

    def attend(q, k, v, carry, layer):
      q, k, v = (a.reshape(*rows.tokens.shape, *a.shape[1:]) for a in (q, k, v))
      cache = carry.write(layer, rows.places(carry), k, v)
      how = {'implementation': 'invariant'} if cfg.invariant else {}
      out = cache.attend(layer, q, rows.tables, sees_up_to, self.visible, **how)
      return out, (cache, None)

    return attend


def cached_keys(cfg: ModelConfig, rows: Rows, cache: Pages | Contexts) -> CachedKeys:
  """The keys of the trunk's layers in a cache."""
  position = rows.position.reshape(-1)
  tables = rope.tables(
    *(position, cfg.rotary_dim, cfg.rope_theta, cfg.dtype, cfg.invariant)
  )
  layers = (
    list(range(cfg.num_layers)) if cfg.unroll_layers else jnp.arange(cfg.num_layers)
  )
  return CachedKeys(tables, cache, layers, rows)


def extend(
  cfg: ModelConfig,
  variables,
  pages: Pages | Contexts,
  rows: Rows,
  sharding: Sharding = ONE_DEVICE,
) -> tuple[jax.Array, Pages | Contexts]:
  """Consumes the tokens: hidden [P, C, D] after the final norm, and the pages.

  A token sees the stored positions up to its own. Hidden states of padding are
  undefined. With a mesh all arguments are this device's part.
  """
  at = rows.places(pages)
  keys = cached_keys(cfg, rows, pages.write_tokens(at, rows.tokens))
  out = model.trunk(cfg, split_layers(cfg, variables), rows.tokens, keys, sharding)
  ids = out.routing.ids.reshape(cfg.num_layers, *rows.tokens.shape, -1)
  return out.hidden, out.carry.write_experts(at, ids)


def prepared(cfg: ModelConfig, variables, *, quantize: bool, **options):
  """Weights as the calls take them: `split_layers` with `options` where unrolled.

  Args:
    quantize: the linear layers are stored in block FP8.
  """
  if quantize:
    variables = block_fp8.quantize_variables(variables)
  return split_layers(cfg, variables, **options)


def split_layers(
  cfg: ModelConfig,
  variables,
  *,
  small_batch: Callable | None = None,
  modules: bool = False,
):
  """Where layers are unrolled, the weights with a list over layers in place of stacks.

  XLA copies each slice of a stacked array that a matmul reads, in every call.

  Args:
    small_batch: `batched.dense` or `batched.separate`, to add that form of a layer's
      experts (`moe.served`); None keeps gate and up.
    modules: splits the MTP modules, too.
  """
  params, router = variables['params'], variables['router']
  if not cfg.unroll_layers or isinstance(params['layers'], list):
    return variables
  prepare = lambda p: served.prepare(p, small_batch) if small_batch else p
  split = {'layers': list(map(prepare, _split(cfg.num_layers, params['layers'])))}
  biases = {'layers': _split(cfg.num_layers, router['layers'])}
  if modules:
    made = _split(cfg.num_mtp_modules, params['mtp'])
    split['mtp'] = [{**p, 'layers': prepare(p['layers'])} for p in made]
    biases['mtp'] = _split(cfg.num_mtp_modules, router['mtp'])
  return {**variables, 'params': {**params, **split}, 'router': {**router, **biases}}


def _split(count: int, stacked) -> list:
  layer = lambda l: jax.tree.map(operator.itemgetter(l), stacked)
  return [layer(l) for l in range(count)]
