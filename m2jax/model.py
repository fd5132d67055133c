"""M2: embed → L blocks → final norm → untied head, and K MTP modules.

Design §5; facts/m2-and-forge.md §1.4 and §3. `M2` is a thin Flax module that owns the
parameters (params.py); everything it does is a pure function over `variables`.

With a mesh (`sharding`) `forward` and `token_logprobs` take and return global arrays;
what lies between runs once on each device, over its own shard of B, S, V and of the
layers' axes.

Axes: B rows, S tokens, T = B·S, D model, V vocabulary, L layers, K MTP modules, E
experts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from m2jax import forest as forest_lib
from m2jax import params as params_lib
from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.kernels import fp32
from m2jax.kernels.token_logprobs import token_logprobs as head_logprobs
from m2jax.layers import attention, block, mtp, rope
from m2jax.layers.norm import rms_norm
from m2jax.moe import by_expert
from m2jax.sharding import ONE_DEVICE, Sharding


class M2(nn.Module):
  """The decoder. `m2.init(key, tokens)` gives `{'params': …, 'router': …}`.

  `m2.apply(variables, tokens)`: [B, S] int32 rows of one causal chain each → logits
  [B, S, V], at least fp32.
  """

  cfg: ModelConfig

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    cfg = self.cfg
    params = {
      name: self.param(name, params_lib.initialize, part)
      for name, part in params_lib.initializers(cfg).items()
    }
    # Steps of 1e-3 would be lost in bfloat16 as a bias grows.
    state_dtype = jnp.promote_types(cfg.param_dtype, jnp.float32)
    shapes = params_lib.router_tree(cfg, lambda shape: shape)
    router = {
      name: self.variable('router', name, jnp.zeros, shape, state_dtype).value
      for name, shape in shapes.items()
    }
    variables = {'params': params, 'router': router}
    hidden, _, _ = trunk(cfg, variables, forest_lib.causal(tokens))
    return head(self, variables, hidden)


def _at(tree, index: int):
  """Every leaf at `index` of its leading axis."""
  return jax.tree.map(lambda a: a[index], tree)


def _kept(body, remat: bool, sharding: Sharding):
  """`body` with what its backward pass computes again: with `remat` all but the order
  of assignments, which is small and slow to make; else gathered weights."""
  if remat:
    policy = jax.checkpoint_policies.save_only_these_names(by_expert.NAME)
    return jax.checkpoint(body, policy=policy)
  if sharding.gathers:
    return jax.checkpoint(body, policy=sharding_lib.keep_all_but_weights)
  return body


def _over_layers(body, x, stacked, cfg: ModelConfig, sharding: Sharding):
  """x → body(window)(x, layer's slice) for each layer; outputs stacked.

  Layers that differ in their window form a period; a scan goes over whole periods.
  """

  bodies = [_kept(body(window), cfg.remat, sharding) for window in cfg.windows]

  def several(x, layers):
    outs = []
    for layer in range(len(jax.tree.leaves(layers)[0])):
      x, out = bodies[layer % len(bodies)](x, _at(layers, layer))
      outs.append(out)
    return x, jax.tree.map(lambda *a: jnp.stack(a), *outs)

  if cfg.unroll_layers:
    return several(x, stacked)
  if len(bodies) == 1:
    return jax.lax.scan(bodies[0], x, stacked)
  shape = cfg.num_layers // len(bodies), len(bodies)
  periods = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), stacked)
  x, outs = jax.lax.scan(several, x, periods)
  return x, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outs)


def _embed(cfg, params, tokens, sharding: Sharding = ONE_DEVICE):
  """[B, S] → [T, D]. The table is never gathered: tokens go where their piece is."""
  table, tokens = params['embed'], tokens.reshape(-1)
  tokens = sharding.all_gather(tokens, 'model', axis=0)
  if sharding.size('vocab') == 1:
    x = jnp.take(table, tokens, axis=0).astype(cfg.dtype)
  else:
    here = tokens - sharding.index('vocab') * len(table)
    own = (here >= 0) & (here < len(table))
    x = jnp.take(table, jnp.where(own, here, 0), axis=0)
    x = jnp.where(own[:, None], x, 0).astype(cfg.dtype)
    x = sharding.psum(x, 'vocab')
  return sharding.all_to_all(x, 'model', split=0, join=1)


class Stack(NamedTuple):
  """What tokens need of the path they hang off (forest/cutting.py); slot = position.

  Attributes:
    k, v: [L, B, P, K, H], the trunk's keys and values.
    mtp_k, mtp_v: [K, B, P, K, H], the MTP modules'.
    states: [1 + K, B, P, D], the trunk's and the modules'.
  """

  k: jax.Array
  v: jax.Array
  mtp_k: jax.Array
  mtp_v: jax.Array
  states: jax.Array


def empty_stack(cfg: ModelConfig, rows: int, tokens: int) -> Stack:
  """Zeros for paths of `tokens`."""
  layers, modules = cfg.num_layers, cfg.num_mtp_modules

  def zeros(copies, *shape):
    return jnp.zeros((copies, rows, tokens, *shape), cfg.dtype)

  head = cfg.num_kv_heads, cfg.head_dim
  keys = zeros(layers, *head), zeros(layers, *head)
  mtp_keys = zeros(modules, *head), zeros(modules, *head)
  return Stack(*keys, *mtp_keys, zeros(1 + modules, cfg.embed_dim))


def _key_position(batch: forest_lib.Forest, stack: Stack | None):
  """[B, P + S] position of every key: the stack's slots, then the batch's tokens."""
  own = jnp.asarray(batch.position)
  if stack is None:
    return own
  slots = jnp.arange(stack.k.shape[2], dtype=own.dtype)
  slots = jnp.broadcast_to(slots, (len(own), len(slots)))
  return jnp.concatenate([slots, own], axis=1)


def trunk(
  cfg: ModelConfig,
  variables,
  batch: forest_lib.Forest,
  sharding: Sharding = ONE_DEVICE,
  stack: Stack | None = None,
):
  """Hidden states [B, S, D] after the final norm; Routing and, below a stack, the
  tokens' own k, v [B, S, K, H], stacked over layers.

  Works on shards: with a mesh, call it inside `sharding.shard_map`.
  """
  params = variables['params']
  shape = batch.tokens.shape
  subtree_end = sharding.gather_tokens(batch.subtree_end)
  tables = rope.tables(
    batch.position.reshape(-1), cfg.rotary_dim, cfg.rope_theta, cfg.dtype
  )

  position = None  # of whole rows
  if cfg.window is not None:
    position = sharding.gather_tokens(_key_position(batch, stack))

  def layer_body(window):
    def body(x, layer):
      p, bias, replay, above = layer
      p = sharding.gather_params(p, cfg.dtype)
      attend = functools.partial(
        attention.attend,
        cfg=cfg,
        tables=tables,
        subtree_end=subtree_end,
        sharding=sharding,
        window=window,
        position=position,
        above=above,
      )
      x, own, routing = block.apply(
        x, p, bias, cfg, attend, batch.multiplicity.reshape(-1), replay, sharding
      )
      return x, (routing, None if above is None else own)

    return body

  replay = None
  if batch.experts is not None:  # [B, S, L, k] → [L, T, k]
    replay = batch.experts.reshape(-1, *batch.experts.shape[2:]).swapaxes(0, 1)
  x = _embed(cfg, params, batch.tokens, sharding)
  above = None if stack is None else (stack.k, stack.v)
  stacked = (params['layers'], variables['router']['layers'], replay, above)
  x, (routing, own) = _over_layers(layer_body, x, stacked, cfg, sharding)
  x = rms_norm(x, params['final_norm'], cfg.rms_norm_eps)
  return x.reshape(*shape, -1), routing, own


def head(m2: M2, variables, hidden: jax.Array) -> jax.Array:
  """Logits [..., V] of final-normed hidden [..., D], at least fp32."""
  del m2
  return fp32.matmul(hidden, variables['params']['head'])


def at_parent(
  values: jax.Array,
  batch: forest_lib.Forest,
  sharding: Sharding = ONE_DEVICE,
  above: jax.Array | None = None,
) -> jax.Array:
  """values [B, S, D] gathered at each token's parent; 0 for roots and padding.

  `above` [B, P, D] are the values of the path that the tokens hang off.
  """
  parent = jnp.asarray(batch.parent)
  values = sharding.gather_tokens(values)  # parents are row indices
  if above is not None:
    values = jnp.concatenate([above, values], axis=1)
  gathered = jnp.take_along_axis(values, jnp.maximum(parent, 0)[..., None], axis=1)
  return jnp.where((parent >= 0)[..., None], gathered, 0)


class Outputs(NamedTuple):
  """One pass over a forest.

  Attributes:
    logprob, entropy: [B, S] of each token given its path; 0 at roots and padding.
    mtp_logprob: [K, B, S]; module k scores tokens of position k + 1 and deeper, else 0.
    loads: {'layers': [L, E], 'mtp': [K, E]} fp32 expert assignments.
    experts: [B, S, L, k] ids used by the trunk, as a Forest records them.
  """

  logprob: jax.Array
  entropy: jax.Array
  mtp_logprob: jax.Array
  loads: dict[str, jax.Array]
  experts: jax.Array


def forward(
  cfg: ModelConfig,
  variables,
  batch: forest_lib.Forest,
  *,
  detach_mtp: bool = False,
  sharding: Sharding = ONE_DEVICE,
) -> Outputs:
  """Scores every token of the forest from its parent's state (law 2).

  Args:
    variables, batch: global arrays, best placed by `sharding`'s specs already.
    detach_mtp: stops the MTP loss's gradient at trunk, embedding and head, so that
      only the modules learn from it.
    sharding: the mesh to run on; the result does not depend on it (law 6).
  """
  if sharding.mesh is None:
    return _forward(cfg, detach_mtp, sharding, variables, batch)
  rules = sharding.rules
  token = rules.spec('scores', 'rows', 'tokens')
  stacked = rules.spec('scores', None, 'rows', 'tokens')
  return sharding.shard_map(
    functools.partial(_forward, cfg, detach_mtp, sharding),
    (sharding_lib.param_specs(cfg, rules), sharding_lib.batch_specs(rules)),
    Outputs(token, token, stacked, rules.spec('loads', None), token),
  )(variables, batch)


def forward_below(
  cfg: ModelConfig,
  variables,
  batch: forest_lib.Forest,
  stack: Stack,
  *,
  detach_mtp: bool = False,
) -> tuple[Outputs, Stack]:
  """`forward` of tokens that hang off a path (`forest.Chunk.batch`), on one device.

  Indices in the batch's `parent` and `subtree_end` count the stack's slots first.

  Returns:
    Outputs of the batch's tokens, and their own Stack entries [·, B, C, ·].
  """
  return _forward_below(cfg, detach_mtp, ONE_DEVICE, variables, batch, stack)


def _forward(cfg: ModelConfig, detach_mtp: bool, sharding: Sharding, variables, batch):
  """`forward` on one device's shards."""
  if sharding.size('tokens') > 1:
    fields = {name: getattr(batch, name) for name in forest_lib.TOKEN_FIELDS}
    batch = dataclasses.replace(batch, **jax.tree.map(sharding.deal_tokens, fields))
  out = _forward_below(cfg, detach_mtp, sharding, variables, batch, None)[0]
  if sharding.size('tokens') == 1:
    return out

  def collect(x, axis=1):
    rows = sharding.collect_tokens(x.reshape(-1, *x.shape[axis:]))
    return rows.reshape(x.shape)

  return out._replace(
    logprob=collect(out.logprob),
    entropy=collect(out.entropy),
    mtp_logprob=collect(out.mtp_logprob, axis=2),
    experts=collect(out.experts),
  )


def _forward_below(cfg, detach_mtp, sharding: Sharding, variables, batch, stack):
  """Outputs, and the tokens' own Stack where there is one above them."""
  params = variables['params']
  params = dict(params, **sharding.gather_params({'head': params['head']}, cfg.dtype))
  hidden, routing, own = trunk(cfg, variables, batch, sharding, stack)
  state = at_parent(hidden, batch, sharding, None if stack is None else stack.states[0])
  logprob, entropy = _score(params['head'], state, batch, sharding, depth=1)
  loads = {'layers': routing.load}
  scores = jnp.zeros((0, *logprob.shape), logprob.dtype)
  if cfg.num_mtp_modules:
    shared = params
    if detach_mtp:
      state, shared = jax.lax.stop_gradient((state, params))
    scores, loads['mtp'], mtp_own = _mtp(
      cfg, variables, shared, state, batch, sharding, stack
    )
  loads = sharding.psum(loads, 'rows', 'tokens')
  experts = routing.ids.swapaxes(0, 1).reshape(*logprob.shape, -1, routing.ids.shape[2])
  outputs = Outputs(logprob, entropy, scores, loads, experts)
  if stack is None:
    return outputs, None
  if not cfg.num_mtp_modules:
    empty = empty_stack(cfg, *batch.tokens.shape)
    return outputs, Stack(*own, empty.mtp_k, empty.mtp_v, hidden[None])
  *mtp_keys, states = mtp_own
  return outputs, Stack(*own, *mtp_keys, jnp.concatenate([hidden[None], states]))


def _score(kernel, state, batch, sharding: Sharding, *, depth: int):
  """logprob, entropy [B, S] of tokens at `depth` or deeper from parent states."""
  logprob, entropy = head_logprobs(
    state.reshape(-1, state.shape[-1]),
    kernel,
    batch.tokens.reshape(-1),
    sharding.axes('vocab'),
  )
  live = (batch.position >= depth) & (batch.parent >= 0)
  shape = batch.tokens.shape
  return (jnp.where(live, x.reshape(shape), 0) for x in (logprob, entropy))


def _mtp(
  cfg,
  variables,
  shared,
  state,
  batch: forest_lib.Forest,
  sharding: Sharding,
  stack: Stack | None = None,
):
  """Of the chained modules (layers/mtp.py): logprobs [K, B, S], loads [K, E] and, where
  there is a stack, the tokens' own k, v [K, B, S, K, H] and states [K, B, S, D]."""
  embedding = _embed(cfg, shared, batch.tokens, sharding)
  tables = rope.tables(
    batch.position.reshape(-1), cfg.rotary_dim, cfg.rope_theta, cfg.dtype
  )
  key_position = _key_position(batch, stack)

  def module(state, stacked):
    k, p, bias, above = stacked
    p = sharding.gather_params(p, cfg.dtype)
    live = batch.position >= k
    subtree_end = jnp.where(key_position >= k, batch.subtree_end, 0)
    attend = functools.partial(
      attention.attend,
      cfg=cfg,
      tables=tables,
      subtree_end=sharding.gather_tokens(subtree_end),
      sharding=sharding,
      above=None if above is None else above[:2],
    )
    x = mtp.join(state.reshape(embedding.shape), embedding, p, cfg)
    x, own, routing = block.apply(
      x,
      p['layers'],
      bias,
      cfg,
      attend,
      jnp.where(live, batch.multiplicity, 0).reshape(-1),
      sharding=sharding,
    )
    x = rms_norm(x, shared['final_norm'], cfg.rms_norm_eps).reshape(state.shape)
    state = at_parent(x, batch, sharding, None if above is None else above[2])
    logprob, _ = _score(shared['head'], state, batch, sharding, depth=k + 1)
    kept = None if above is None else (*own, x)
    return state, (logprob, routing.load, kept)

  modules = cfg.num_mtp_modules
  stacked = (
    jnp.arange(1, modules + 1),
    variables['params']['mtp'],
    variables['router']['mtp'],
    None if stack is None else (stack.mtp_k, stack.mtp_v, stack.states[1:]),
  )
  module = _kept(module, cfg.remat, sharding)
  unroll = modules if cfg.unroll_layers else 1
  return jax.lax.scan(module, state, stacked, unroll=unroll)[1]


def token_logprobs(
  m2: M2, variables, batch: forest_lib.Forest, *, sharding: Sharding = ONE_DEVICE
) -> jax.Array:
  """[B, S] at least fp32: log p(token | its path); 0 at roots and padding."""
  cfg = dataclasses.replace(m2.cfg, num_mtp_modules=0)
  trunk_only = {
    kind: {name: leaf for name, leaf in variables[kind].items() if name != 'mtp'}
    for kind in ('params', 'router')
  }
  return forward(cfg, trunk_only, batch, sharding=sharding).logprob
