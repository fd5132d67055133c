"""M2: embed → L blocks → final norm → untied head, and MTP modules.

Design §5; facts/m2-and-forge.md §1.4 and §3. `M2` is a thin Flax module that owns the
parameters (params.py); everything it does is a pure function over `variables`.

With a mesh (`sharding`) `forward` and `token_logprobs` take and return global arrays;
what they call runs on each device, over its own shard of B, S, V and of the layers'
axes.

Axes: B rows, S tokens, T = B·S, D model, V vocabulary, L layers, E experts, k experts
of a token, K key/value heads, H head dim; mtp modules.
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
from m2jax.axes import Array, Float, Float32, Int
from m2jax.config import ModelConfig
from m2jax.forest import Forest
from m2jax.layers import attention, block, draft_loss, head, loop, mtp, prefix_cache
from m2jax.layers.embed import embed
from m2jax.layers.norm import rms_norm
from m2jax.layers.prefix_cache import PrefixCache
from m2jax.sharding import ONE_DEVICE, Sharding


class M2(nn.Module):
  """The decoder. `m2.init(key, tokens)` gives `{'params': …, 'router': …}`.

  `m2.apply(variables, tokens)`: rows of one causal chain each → logits, at least fp32.
  """

  cfg: ModelConfig

  @nn.compact
  def __call__(self, tokens: Int[Array, 'B S']) -> Float[Array, 'B S V']:
    cfg = self.cfg
    params = {
      name: self.param(name, params_lib.initialize, part)
      for name, part in params_lib.initializers(cfg).items()
    }
    router = {
      name: self.variable('router', name, jnp.zeros, like.shape, like.dtype).value
      for name, like in params_lib.shapes(cfg)['router'].items()
    }
    variables = {'params': params, 'router': router}
    return head.logits(params, trunk(cfg, variables, forest_lib.causal(tokens)).hidden)


class Trunk(NamedTuple):
  """The trunk's results for a batch.

  Attributes:
    hidden: after the final norm.
    routing: ids [L, T, k] and load [L, E].
    new_kv: keys and values of the tokens; None without a prefix.
    activation_max: largest |x| that enters each block and the final norm, of the
      tokens of this device's part of the residual stream, without padding.
  """

  hidden: Float[Array, 'B S D']
  routing: block.Routing
  new_kv: tuple[Float[Array, 'L B S K H'], Float[Array, 'L B S K H']] | None
  activation_max: Float[Array, 'norms']


def trunk(
  cfg: ModelConfig,
  variables,
  batch: Forest,
  sharding: Sharding = ONE_DEVICE,
  prefix: PrefixCache | None = None,
  metadata: attention.Metadata | None = None,
) -> Trunk:
  """Hidden states of a forest's tokens, which may continue a cached prefix.

  The variables may have a 'route' [L], which chooses each layer's `cfg.paths`.
  Works on shards: with a mesh, call it inside `sharding.shard_map`.
  """
  metadata = metadata or attention.metadata(
    cfg, batch, sharding, prefix_cache.slots(prefix)
  )
  params = variables['params']
  multiplicity = sharding.residual_part(batch.multiplicity.reshape(-1))

  def largest(x):
    return jnp.max(jnp.where(multiplicity[:, None] > 0, jnp.abs(x), 0))

  def layer_body(cfg, window):
    of_layer = attention.of_layer(metadata, cfg, window)

    def body(x, layer):
      p, bias, replay, prefix_kv = layer
      entering = largest(x)
      replay = jax.tree.map(sharding.residual_part, replay)
      p = sharding.gather_params(p, cfg.dtype)
      attend = functools.partial(
        attention.attend,
        cfg=cfg,
        metadata=of_layer,
        sharding=sharding,
        prefix=prefix_kv,
      )
      x, new_kv, routing = block.apply(
        x, p, bias, cfg, attend, multiplicity, replay, sharding
      )
      return x, (routing, None if prefix_kv is None else new_kv, entering)

    return body

  replay = None
  if batch.experts is not None:  # [B, S, L, k] → [L, T, k]
    replay = batch.experts.reshape(-1, *batch.experts.shape[2:]).swapaxes(0, 1)
  prefix_kv = None if prefix is None else (prefix.k, prefix.v)
  stacked = (params['layers'], variables['router']['layers'], replay, prefix_kv)
  body, route = functools.partial(layer_body, cfg), variables.get('route')
  if route is not None:
    paths = [dataclasses.replace(cfg, matmuls=path) for path in cfg.paths]
    body = lambda window: loop.routed([layer_body(path, window) for path in paths])
    stacked = (stacked, route)
  x = embed(cfg, params, batch.tokens, sharding)
  x, (routing, new_kv, entering) = loop.over_layers(body, x, stacked, cfg, sharding)
  activation_max = jax.lax.stop_gradient(jnp.append(entering, largest(x)))
  x = rms_norm(x, params['final_norm'], cfg.rms_norm_eps)
  x = sharding.gather_residual(x)
  return Trunk(x.reshape(*batch.tokens.shape, -1), routing, new_kv, activation_max)


class Outputs(NamedTuple):
  """One pass over a forest.

  Attributes:
    logprob, entropy: of each token given its path; 0 at roots and padding.
    mtp_logprob: module k scores tokens of position k + 1 and deeper.
    loads: expert assignments of 'layers' [L, E] and 'mtp' [mtp, E].
    experts: ids used by the trunk, as a Forest records them.
    rerouted: layers whose router would choose other experts than are replayed; None
      without a replay.
    drafts: of each MTP module, its distance from the trunk; None if not asked for.
    activation_max: largest |x| that enters a block of the trunk or the final norm.
  """

  logprob: Float[Array, 'B S']
  entropy: Float[Array, 'B S']
  mtp_logprob: Float[Array, 'mtp B S']
  loads: dict[str, Float32[Array, '_ E']]
  experts: Int[Array, 'B S L k']
  activation_max: Float[Array, '']
  rerouted: Int[Array, 'B S'] | None = None
  drafts: draft_loss.Drafts | None = None


def forward(
  cfg: ModelConfig,
  variables,
  batch: Forest,
  *,
  detach_mtp: bool = False,
  comparison: draft_loss.Comparison | None = None,
  sharding: Sharding = ONE_DEVICE,
) -> Outputs:
  """Scores every token of the forest from its parent's state (law 2).

  Args:
    variables, batch: global arrays, best placed by `sharding`'s specs already. The
      variables may have a 'route' (see `trunk`).
    detach_mtp: stop the MTP loss's gradient at trunk, embedding and head: only the
      modules learn from it.
    comparison: of each MTP module with the trunk; None: no `drafts`.
    sharding: the mesh to run on; the result does not depend on it (law 6).
  """
  options = dict(detach_mtp=detach_mtp, comparison=comparison, sharding=sharding)
  run = functools.partial(_forward, cfg, **options)
  if sharding.mesh is None:
    return run(variables, batch)
  rules = sharding.rules
  specs = _variable_specs(cfg, variables, rules), sharding_lib.batch_specs(rules)
  return sharding.shard_map(run, specs, _output_specs(rules))(variables, batch)


def forward_with_prefix(
  cfg: ModelConfig,
  variables,
  batch: Forest,
  prefix: PrefixCache,
  *,
  detach_mtp: bool = False,
  comparison: draft_loss.Comparison | None = None,
  sharding: Sharding = ONE_DEVICE,
) -> tuple[Outputs, PrefixCache]:
  """`forward` of tokens that continue a path (`forest.Chunk.batch`).

  Indices in the batch's `parent` and `subtree_end` count the prefix's slots first. A
  mesh may not split a row's tokens.

  Returns:
    Outputs of the batch's tokens, and their new entries of a PrefixCache.
  """
  options = dict(detach_mtp=detach_mtp, comparison=comparison, sharding=sharding)
  run = functools.partial(_forward_with_prefix, cfg, **options)
  if sharding.mesh is None:
    return run(variables, batch, prefix)
  rules = sharding.rules
  cache = prefix_cache.specs(rules)
  return sharding.shard_map(
    run,
    (_variable_specs(cfg, variables, rules), sharding_lib.batch_specs(rules), cache),
    (_output_specs(rules), cache),
  )(variables, batch, prefix)


def _variable_specs(cfg: ModelConfig, variables, rules: sharding_lib.Rules):
  specs = sharding_lib.param_specs(cfg, rules)
  if 'route' in variables:
    specs = {**specs, 'route': jax.sharding.PartitionSpec()}
  return specs


def _output_specs(rules: sharding_lib.Rules) -> Outputs:
  token = rules.spec('scores', 'rows', 'tokens')
  stacked = rules.spec('scores', None, 'rows', 'tokens')
  loads = rules.spec('loads', None)
  one = rules.spec('activation_max')
  return Outputs(token, token, stacked, loads, token, one, token, stacked)


def token_logprobs(
  m2: M2, variables, batch: Forest, *, sharding: Sharding = ONE_DEVICE
) -> Float[Array, 'B S']:
  """log p(token | its path), at least fp32; 0 at roots and padding."""
  cfg = dataclasses.replace(m2.cfg, num_mtp_modules=0)
  trunk_only = {
    kind: {name: leaf for name, leaf in variables[kind].items() if name != 'mtp'}
    for kind in ('params', 'router')
  }
  return forward(cfg, trunk_only, batch, sharding=sharding).logprob


def _forward(cfg: ModelConfig, variables, batch, *, sharding: Sharding, **options):
  """`forward` on one device's shards."""
  fields = {name: getattr(batch, name) for name in forest_lib.TOKEN_FIELDS}
  batch = dataclasses.replace(batch, **jax.tree.map(sharding.to_zigzag, fields))
  out, _ = _forward_with_prefix(
    cfg, variables, batch, None, sharding=sharding, **options
  )
  return out._replace(
    logprob=sharding.from_zigzag(out.logprob),
    entropy=sharding.from_zigzag(out.entropy),
    mtp_logprob=sharding.from_zigzag(out.mtp_logprob, axis=2),
    experts=sharding.from_zigzag(out.experts),
    rerouted=jax.tree.map(sharding.from_zigzag, out.rerouted),
    drafts=jax.tree.map(lambda x: sharding.from_zigzag(x, axis=2), out.drafts),
  )


def _forward_with_prefix(
  cfg: ModelConfig,
  variables,
  batch,
  prefix: PrefixCache | None,
  *,
  detach_mtp: bool,
  comparison: draft_loss.Comparison | None,
  sharding: Sharding,
):
  """Outputs, and the tokens' new PrefixCache entries; None without a prefix."""
  params = variables['params']
  params = dict(params, **sharding.gather_params({'head': params['head']}, cfg.dtype))
  metadata = attention.metadata(cfg, batch, sharding, prefix_cache.slots(prefix))
  hidden, routing, new_kv, activation_max = trunk(
    cfg, variables, batch, sharding, prefix, metadata
  )
  cached_states = None if prefix is None else prefix.states[0]
  state = head.at_parent(hidden, batch, sharding, cached_states)
  logprob, entropy = head.score(params, state, batch, sharding, depth=1)
  loads = {'layers': routing.load}
  if cfg.num_mtp_modules:
    own = params['mtp']
    if detach_mtp:
      state, params = jax.lax.stop_gradient((state, params))
    modules = mtp.apply(
      cfg,
      {'params': {**params, 'mtp': own}, 'router': variables['router']},
      state,
      batch,
      metadata,
      sharding,
      prefix=None if prefix is None else prefix.mtp,
      comparison=comparison,
    )
    loads['mtp'] = modules.load
  else:
    none = jnp.zeros((0, *logprob.shape), logprob.dtype)
    new = None
    if prefix is not None:  # no entries, of this device's shapes
      shape = (0, *batch.tokens.shape)
      new = jax.tree.map(lambda a: jnp.zeros(shape + a.shape[3:], a.dtype), prefix.mtp)
    modules = mtp.Outputs(none, None, new)
  loads = sharding.psum(loads, 'rows', 'tokens', 'residual')
  experts = routing.ids.swapaxes(0, 1).reshape(*logprob.shape, -1, routing.ids.shape[2])
  rerouted = None
  if routing.rerouted is not None:
    rerouted = jnp.sum(routing.rerouted, axis=0, dtype=jnp.int32)
    rerouted = rerouted.reshape(logprob.shape)
  scores = logprob, entropy, modules.logprob
  activation_max = sharding.pmax(jnp.max(activation_max), 'rows', 'tokens', 'residual')
  outputs = Outputs(*scores, loads, experts, activation_max, rerouted, modules.drafts)
  if prefix is None:
    return outputs, None
  return outputs, PrefixCache(*new_kv, hidden[None], modules.new)
