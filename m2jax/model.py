"""M2: embed → L blocks → final norm → untied head, and K MTP modules.

Design §5; facts/m2-and-forge.md §1.4 and §3. `M2` is a thin Flax module that owns the
parameters; everything it does is a pure function over `variables`:

  params: embed [V, D] · layers {block arrays, leading L} · final_norm [D] · head [D, V]
          · mtp {module arrays, leading K; absent when K = 0}
  router: layers [L, E] · mtp [K, E]: selection biases, state rather than parameters.

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
from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.kernels.token_logprobs import token_logprobs as head_logprobs
from m2jax.layers import attention, block, mtp, rope
from m2jax.layers.norm import rms_norm
from m2jax.sharding import ONE_DEVICE, Sharding

_RESIDUAL_OUTPUTS = ('o', 'down')  # projections that write into the residual stream


def _init_arrays(key, shapes, copies: int, cfg: ModelConfig):
  """Arrays of `shapes` with a leading axis of `copies`: norms 1, kernels normal."""
  leaves, tree = jax.tree.flatten_with_path(shapes, is_leaf=lambda s: type(s) is tuple)
  out = []
  for (path, shape), leaf_key in zip(
    leaves, jax.random.split(key, len(leaves)), strict=True
  ):
    name = path[-1].key
    if len(shape) == 1:
      out.append(jnp.ones((copies, *shape), cfg.param_dtype))
      continue
    std = shape[-2] ** -0.5
    if name in _RESIDUAL_OUTPUTS:
      std *= (2 * cfg.num_layers) ** -0.5
    out.append(std * jax.random.normal(leaf_key, (copies, *shape), cfg.param_dtype))
  return jax.tree.unflatten(tree, out)


class M2(nn.Module):
  """The decoder. `m2.init(key, tokens)` gives `{'params': …, 'router': …}`.

  `m2.apply(variables, tokens)`: [B, S] int32 rows of one causal chain each → logits
  [B, S, V], at least fp32.
  """

  cfg: ModelConfig

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    cfg = self.cfg
    normal = nn.initializers.normal(0.02, cfg.param_dtype)
    params = {
      'embed': self.param('embed', normal, (cfg.vocab_size, cfg.embed_dim)),
      'layers': self.param(
        'layers', _init_arrays, block.shapes(cfg), cfg.num_layers, cfg
      ),
      'final_norm': self.param(
        'final_norm', nn.initializers.ones, (cfg.embed_dim,), cfg.param_dtype
      ),
      'head': self.param('head', normal, (cfg.embed_dim, cfg.vocab_size)),
    }
    biases = {'layers': (cfg.num_layers, cfg.num_experts)}
    if cfg.num_mtp_modules:
      params['mtp'] = self.param(
        'mtp', _init_arrays, mtp.shapes(cfg), cfg.num_mtp_modules, cfg
      )
      biases['mtp'] = (cfg.num_mtp_modules, cfg.num_experts)
    router = {
      name: self.variable('router', name, jnp.zeros, shape, cfg.param_dtype).value
      for name, shape in biases.items()
    }
    variables = {'params': params, 'router': router}
    hidden, _ = trunk(cfg, variables, forest_lib.causal(tokens))
    return head(self, variables, hidden)


def _at(tree, index: int):
  """Every leaf at `index` of its leading axis."""
  return jax.tree.map(lambda a: a[index], tree)


def _over_layers(body, x, stacked, cfg: ModelConfig, sharding: Sharding):
  """x → body(x, layer's slice) for each layer; outputs stacked."""
  if cfg.remat:
    body = jax.checkpoint(body)
  elif sharding.gathers:
    body = jax.checkpoint(body, policy=sharding_lib.keep_all_but_weights)
  if not cfg.unroll_layers:
    return jax.lax.scan(body, x, stacked)
  outs = []
  for layer in range(cfg.num_layers):
    x, out = body(x, _at(stacked, layer))
    outs.append(out)
  return x, jax.tree.map(lambda *a: jnp.stack(a), *outs)


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


def trunk(
  cfg: ModelConfig,
  variables,
  batch: forest_lib.Forest,
  sharding: Sharding = ONE_DEVICE,
):
  """Hidden states [B, S, D] after the final norm, and Routing stacked over layers.

  Works on shards: with a mesh, call it inside `sharding.shard_map`.
  """
  params = variables['params']
  shape = batch.tokens.shape
  subtree_end = sharding.all_gather(batch.subtree_end, 'tokens', axis=1)
  tables = rope.tables(
    batch.position.reshape(-1), cfg.rotary_dim, cfg.rope_theta, cfg.dtype
  )

  def attend(x, p):
    return attention.attend(x, p, cfg, tables, subtree_end, sharding), None

  def body(x, layer):
    p, bias, replay = layer
    p = sharding.gather_params(p, cfg.dtype)
    x, _, routing = block.apply(
      x, p, bias, cfg, attend, batch.multiplicity.reshape(-1), replay, sharding
    )
    return x, routing

  replay = None
  if batch.experts is not None:  # [B, S, L, k] → [L, T, k]
    replay = batch.experts.reshape(-1, *batch.experts.shape[2:]).swapaxes(0, 1)
  x = _embed(cfg, params, batch.tokens, sharding)
  stacked = (params['layers'], variables['router']['layers'], replay)
  x, routing = _over_layers(body, x, stacked, cfg, sharding)
  x = rms_norm(x, params['final_norm'], cfg.rms_norm_eps)
  return x.reshape(*shape, -1), routing


def head(m2: M2, variables, hidden: jax.Array) -> jax.Array:
  """Logits [..., V] of final-normed hidden [..., D], at least fp32."""
  del m2
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)
  return hidden.astype(dtype) @ variables['params']['head'].astype(dtype)


def at_parent(
  values: jax.Array, batch: forest_lib.Forest, sharding: Sharding = ONE_DEVICE
) -> jax.Array:
  """values [B, S, D] gathered at each token's parent; 0 for roots and padding."""
  parent = jnp.asarray(batch.parent)
  values = sharding.all_gather(values, 'tokens', axis=1)  # parents are row indices
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


def _forward(cfg: ModelConfig, detach_mtp: bool, sharding: Sharding, variables, batch):
  """`forward` on one device's shards."""
  params = variables['params']
  params = dict(params, **sharding.gather_params({'head': params['head']}, cfg.dtype))
  hidden, routing = trunk(cfg, variables, batch, sharding)
  state = at_parent(hidden, batch, sharding)
  logprob, entropy = _score(params['head'], state, batch, sharding, depth=1)
  loads = {'layers': routing.load}
  scores = jnp.zeros((0, *logprob.shape), logprob.dtype)
  if cfg.num_mtp_modules:
    shared = params
    if detach_mtp:
      state, shared = jax.lax.stop_gradient((state, params))
    scores, loads['mtp'] = _mtp(cfg, variables, shared, state, batch, sharding)
  loads = sharding.psum(loads, 'rows', 'tokens')
  experts = routing.ids.swapaxes(0, 1).reshape(*logprob.shape, -1, routing.ids.shape[2])
  return Outputs(logprob, entropy, scores, loads, experts)


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


def _mtp(cfg, variables, shared, state, batch: forest_lib.Forest, sharding: Sharding):
  """logprobs [K, B, S] and loads [K, E] of the chained modules (layers/mtp.py)."""
  embedding = _embed(cfg, shared, batch.tokens, sharding)
  tables = rope.tables(
    batch.position.reshape(-1), cfg.rotary_dim, cfg.rope_theta, cfg.dtype
  )
  scores, loads = [], []
  for k in range(1, cfg.num_mtp_modules + 1):
    p = _at(variables['params']['mtp'], k - 1)
    p = sharding.gather_params(p, cfg.dtype)
    live = batch.position >= k
    subtree_end = jnp.where(live, batch.subtree_end, 0)
    subtree_end = sharding.all_gather(subtree_end, 'tokens', axis=1)

    def attend(x, p, subtree_end=subtree_end):
      return attention.attend(x, p, cfg, tables, subtree_end, sharding), None

    x = mtp.join(state.reshape(embedding.shape), embedding, p, cfg)
    x, _, routing = block.apply(
      x,
      p['layers'],
      variables['router']['mtp'][k - 1],
      cfg,
      attend,
      jnp.where(live, batch.multiplicity, 0).reshape(-1),
      sharding=sharding,
    )
    x = rms_norm(x, shared['final_norm'], cfg.rms_norm_eps)
    state = at_parent(x.reshape(*batch.tokens.shape, -1), batch, sharding)
    logprob, _ = _score(shared['head'], state, batch, sharding, depth=k + 1)
    scores.append(logprob)
    loads.append(routing.load)
  return jnp.stack(scores), jnp.stack(loads)


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
