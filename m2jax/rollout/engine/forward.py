"""The trunk over paged sequences: new tokens are stored, then see all before them.

The blocks are those of `model.trunk`. Prefill, decoding and JetStream's calls all are
this function, for chunks of many tokens or of one. On a mesh it runs inside
`shard_map`, on this device's rows, pages, heads, experts and part of the vocabulary.

Axes: P rows, C new tokens of a row, n pages of a table, S = n·page positions, D model,
L layers, K key/value heads, G query heads per K, H head dim.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.config import ModelConfig
from m2jax.kernels import block_fp8
from m2jax.layers import attention, block, rope
from m2jax.layers.embed import embed
from m2jax.layers.norm import rms_norm
from m2jax.moe import batched, dispatch
from m2jax.rollout.engine.contexts import Contexts
from m2jax.rollout.engine.pages import Pages, Places
from m2jax.sharding import ONE_DEVICE, Sharding

FEW = 'few'  # a layer's experts, as calls of at most FEW_TOKENS tokens want them
FEW_TOKENS = 8
FUSED = 'gate_up'  # and as two matrices an expert, in place of gate and up


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
  params, (P, C) = variables['params'], rows.tokens.shape
  block = layer_block(cfg, rows, sharding)
  at = rows.places(pages)

  def body(x, pages, p, bias, layer):
    x, pages, ids = block(x, pages, p, bias, layer)
    return x, pages.write_experts(layer, at, ids)

  pages = pages.write_tokens(at, rows.tokens)
  x = embed(cfg, params, rows.tokens, sharding)
  weights = (params['layers'], variables['router']['layers'])
  x, pages = _through_layers(cfg, body, x, pages, weights)
  x = rms_norm(x, params['final_norm'], cfg.rms_norm_eps)
  return x.reshape(P, C, -1), pages


def layer_block(cfg: ModelConfig, rows: Rows, sharding: Sharding, visible=None):
  """A decoder block over the rows' tokens, whose keys and values it stores.

  Args:
    visible: [P, S], if not all are: which keys a token other than itself sees.

  Returns:
    (x [P·C, D], pages, parameters, router bias, layer of the pages) → x, pages, expert
    ids [P, C, top_k].
  """
  P, C = rows.tokens.shape
  position = rows.position
  sees_up_to = jnp.where(rows.live, position, -1)  # no page is read for padding
  tables = rope.tables(position.reshape(-1), cfg.rotary_dim, cfg.rope_theta, cfg.dtype)

  def apply(x, pages, p, bias, layer):
    def attend(x, p):
      qkv = attention.project(x, p, cfg, tables, sharding)
      q, k, v = (a.reshape(P, C, *a.shape[1:]) for a in qkv)
      after = pages.write(layer, rows.places(pages), k, v)
      out = after.attend(layer, q, rows.tables, sees_up_to, visible)
      out = block_fp8.dot(out.reshape(P * C, -1), p['o'], cfg.matmuls)
      return sharding.psum(out, 'heads'), after

    ones = jnp.ones(P * C, jnp.int32)
    experts = _experts_of(cfg, sharding, p)
    x, after, routing = block.apply(
      *(x, p, bias, cfg, attend, ones), sharding=sharding, experts=experts
    )
    return x, after, routing.ids.reshape(P, C, -1)

  return apply


def _through_layers(cfg: ModelConfig, body, x, pages, weights):
  """Applies `body` to every layer, unrolled or scanned; returns x and the pages."""
  if cfg.unroll_layers:
    layers, biases = weights
    if not isinstance(layers, tuple):  # else `split_layers` has done it
      layers, biases = (_split(cfg.num_layers, x) for x in weights)
    for l, (p, bias) in enumerate(zip(layers, biases, strict=True)):
      x, pages = body(x, pages, p, bias, l)
    return x, pages

  def one(carry, layer):
    (p, bias), l = layer
    return body(*carry, p, bias, l), None

  layers = (weights, jnp.arange(cfg.num_layers))
  return lax.scan(one, (x, pages), layers)[0]


def prepared(cfg: ModelConfig, variables, *, quantize: bool, **options):
  """Weights as the calls take them: `split_layers` with `options` where unrolled.

  Args:
    quantize: the linear layers are stored in block FP8.
  """
  if quantize:
    variables = block_fp8.quantize_variables(variables)
  return split_layers(cfg, variables, **options) if cfg.unroll_layers else variables


def split_layers(
  cfg: ModelConfig,
  variables,
  *,
  few: Callable | None = None,
  modules: bool = False,
):
  """The weights with a tuple over layers in place of stacked arrays.

  XLA copies each slice of a stacked array that a matmul reads, in every call.

  Args:
    few: `batched.dense` or `batched.separate`, to add that form of a layer's experts,
      and `batched.fused`, for `batched`'s functions; None keeps gate and up.
    modules: splits the MTP modules, too.
  """
  params, router = variables['params'], variables['router']
  prepare = functools.partial(_for_batched, few=few) if few else lambda p: p
  split = {'layers': tuple(map(prepare, _split(cfg.num_layers, params['layers'])))}
  biases = {'layers': _split(cfg.num_layers, router['layers'])}
  if modules:
    made = _split(cfg.num_mtp_modules, params['mtp'])
    split['mtp'] = tuple({**p, 'layers': prepare(p['layers'])} for p in made)
    biases['mtp'] = _split(cfg.num_mtp_modules, router['mtp'])
  return {**variables, 'params': {**params, **split}, 'router': {**router, **biases}}


def _for_batched(p, few: Callable):
  gate, up, down = (p[name] for name in ('gate', 'up', 'down'))
  rest = {name: x for name, x in p.items() if name not in ('gate', 'up')}
  return {**rest, FUSED: batched.fused(gate, up), FEW: few(gate, up, down)}


def _experts_of(cfg: ModelConfig, sharding: Sharding, p):
  """`block.apply`'s experts, if the weights were split with `few`."""
  if FEW not in p:
    return None

  here = len(p['down'])

  def run(x, ids, weights):
    cast = lambda matrices: jax.tree.map(lambda m: m.astype(x.dtype), matrices)
    if len(x) > FEW_TOKENS:
      kernels = cast((p[FUSED], p['down']))
      return batched.experts(x, ids, weights, *kernels, cfg.num_experts)
    if isinstance(p[FEW][0], tuple):
      return batched.chosen_experts(x, ids, weights, *cast(p[FEW]))
    return batched.all_experts(x, ids, weights, *cast(p[FEW]), here)

  def apply(x, ids, weights, _):
    out = dispatch.gathered(run, x, ids, weights, here, sharding, together=True)
    return sharding.sum_to_residual(out, 'expert_hidden')

  return apply


def _split(count: int, stacked) -> tuple:
  layer = lambda l: jax.tree.map(operator.itemgetter(l), stacked)
  return tuple(layer(l) for l in range(count))
