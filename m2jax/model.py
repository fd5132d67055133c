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
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from m2jax import forest as forest_lib
from m2jax import params as params_lib
from m2jax import sharding as sharding_lib
from m2jax.axes import Array, Float, Float32, Int
from m2jax.config import ModelConfig
from m2jax.forest import Forest
from m2jax.layers import (
  attention,
  block,
  distillation,
  draft_loss,
  head,
  loop,
  mtp,
  prefix_cache,
)
from m2jax.layers.embed import embed
from m2jax.layers.norm import rms_norm
from m2jax.layers.prefix_cache import PrefixCache
from m2jax.layers.taps import tap
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
    keys = attention.forest_keys(cfg, forest_lib.causal(tokens))
    return head.logits(params, trunk(cfg, variables, tokens, keys).hidden)


class Trunk(NamedTuple):
  """The trunk's results for a pass.

  Attributes:
    hidden: states after the final norm.
    routing: ids [L, T, k] and load [L, E].
    carry: the carry of the keys, such as a cache with the tokens' keys and values.
    new_kv: new entries of the keys, [L, …]; None where `carry` has them.
    activation_max: largest |x| that enters each block and the final norm, of the
      tokens of this device's part of the residual stream, without padding; None without
      a multiplicity.
  """

  hidden: Float[Array, 'B S D']
  routing: block.Routing
  carry: Any
  new_kv: Any
  activation_max: Float[Array, 'norms'] | None


def trunk(
  cfg: ModelConfig,
  variables,
  tokens: Int[Array, 'B S'],
  keys: attention.Keys,
  sharding: Sharding = ONE_DEVICE,
  *,
  multiplicity: Int[Array, 'B S'] | None = None,
  replay: Int[Array, 'B S L k'] | None = None,
) -> Trunk:
  """Hidden states of tokens that attend to `keys`: in training and in rollout.

  The variables may have a 'route' [L], which chooses each layer's `cfg.paths`.
  Works on shards: with a mesh, call it inside `sharding.shard_map`.

  Args:
    cfg, variables: the model; layers and biases may be lists over layers where
      `cfg.unroll_layers`.
    tokens: ids of the pass's tokens.
    keys: what the tokens attend to: a forest, a chunk after a prefix, an engine's
      cache.
    sharding: the mesh.
    multiplicity: how often each token counts in loads, and 0 where it has no
      activations; None: neither is measured.
    replay: recorded expert ids, or None.
  """
  params = variables['params']
  if multiplicity is not None:
    multiplicity = sharding.residual_part(multiplicity.reshape(-1))
  if replay is not None:  # [B, S, L, k] → [L, T, k]
    replay = replay.reshape(-1, *replay.shape[2:]).swapaxes(0, 1)

  def largest(x):
    if multiplicity is None:
      return None
    return jnp.max(jnp.where(multiplicity[:, None] > 0, jnp.abs(x), 0))

  def layer_body(cfg, window):
    attend = keys.attention(cfg, window)

    def body(x_and_carry, layer):
      (x, carry), (p, bias, replay, of_keys) = x_and_carry, layer
      entering = largest(x)
      x, (carry, new_kv), routing = block.apply(
        x,
        sharding.gather_params(p, cfg.dtype),
        bias,
        cfg,
        keys.tables,
        functools.partial(attend, carry=carry, layer=of_keys),
        multiplicity=multiplicity,
        replay=jax.tree.map(sharding.residual_part, replay),
        sharding=sharding,
      )
      return (x, carry), (routing, new_kv, entering)

    return body

  stacked: Any = (params['layers'], variables['router']['layers'], replay, keys.stacked)
  body: Any = functools.partial(layer_body, cfg)
  route = variables.get('route')
  if route is not None:
    paths = [dataclasses.replace(cfg, matmuls=path) for path in cfg.paths]
    body = lambda window: loop.routed([layer_body(path, window) for path in paths])
    stacked = (stacked, route)
  x = tap('embedding', embed(cfg, params, tokens, sharding))
  (x, carry), (routing, new_kv, entering) = loop.over_layers(
    body, (x, keys.carry), stacked, cfg, sharding
  )
  activation_max = None
  if multiplicity is not None:
    activation_max = jax.lax.stop_gradient(jnp.append(entering, largest(x)))
  x = rms_norm(x, params['final_norm'], cfg.rms_norm_eps, cfg.invariant)
  x = tap('final norm', x)
  x_BxSxD = sharding.gather_residual(x).reshape(*tokens.shape, -1)
  return Trunk(x_BxSxD, routing, carry, new_kv, activation_max)


BEST = 'words', 'word_logprobs'  # of `Outputs.scores`


class Outputs(NamedTuple):
  """One pass over a forest.

  Attributes:
    logprob, entropy: each token's, given its path; 0 at roots and padding.
    mtp_logprob: module k scores tokens of position k + 1 and deeper.
    loads: expert assignments of 'layers' [L, E] and 'mtp' [mtp, E].
    experts: ids used by the trunk, as a Forest records them.
    rerouted: layers whose router would choose other experts than are replayed; None
      without a replay.
    drafts: each MTP module's distance from the trunk; None if not asked for.
    activation_max: largest |x| that enters a block of the trunk or the final norm.
    new: entries of the tokens for a PrefixCache; None without a prefix.
    teacher_kl: KL from the batch's teacher (`layers.distillation`); None without one.
    value: the value of each token's parent, by the critic's head; 0 at roots and
      padding; None without a value head.
    best: the most likely words of each token and their log-probabilities, [B, S, K]
      each, without a gradient; None if not asked for.
  """

  logprob: Float[Array, 'B S']
  entropy: Float[Array, 'B S']
  mtp_logprob: Float[Array, 'mtp B S']
  loads: dict[str, Float32[Array, '_ E']]
  experts: Int[Array, 'B S L k']
  activation_max: Float[Array, '']
  rerouted: Int[Array, 'B S'] | None = None
  drafts: draft_loss.Drafts | None = None
  new: PrefixCache | None = None
  teacher_kl: Float[Array, 'B S'] | None = None
  best: tuple[Int[Array, 'B S K'], Float[Array, 'B S K']] | None = None
  value: Float[Array, 'B S'] | None = None

  @property
  def scores(self) -> dict[str, Array]:
    """What a pass without a gradient gives of each token: its logprob, and where there
    are these its value, and the most likely BEST."""
    best = {} if self.best is None else dict(zip(BEST, self.best, strict=True))
    value = {} if self.value is None else {'value': self.value}
    return {'logprob': self.logprob, **value, **best}


def forward(
  cfg: ModelConfig,
  variables,
  batch: Forest,
  prefix: PrefixCache | None = None,
  *,
  detach_mtp: bool = False,
  comparison: draft_loss.Comparison | None = None,
  entropy_gradient: bool = False,
  detach_value: bool = False,
  best: int = 0,
  sharding: Sharding = ONE_DEVICE,
) -> Outputs:
  """Scores every token of the forest from its parent's state (law 2).

  Args:
    variables, batch: global arrays, best placed by `sharding`'s specs already. The
      variables may have a 'route' (see `trunk`).
    prefix: cached, of the path that the tokens continue (`forest.Chunk.batch`): indices
      in the batch's `parent` and `subtree_end` count its slots first. A mesh may not
      split a row's tokens then.
    detach_mtp: stop the MTP loss's gradient at trunk, embedding and head: only the
      modules learn from it.
    comparison: how each MTP module is compared with the trunk; None: no `drafts`.
    entropy_gradient: whether the entropy carries a gradient.
    detach_value: stop the values' gradient at the trunk: only their head learns.
    best: K, the number of most likely words of each token in `Outputs.best`.
    sharding: the mesh to run on; the result does not depend on it (law 6).
  """
  rules = sharding.rules
  cache = None if prefix is None else prefix_cache.specs(rules)
  specs = _variable_specs(cfg, variables, rules), sharding_lib.batch_specs(rules), cache
  run = functools.partial(
    _on_shards,
    cfg,
    detach_mtp=detach_mtp,
    comparison=comparison,
    entropy_gradient=entropy_gradient,
    detach_value=detach_value,
    best=best,
    sharding=sharding,
  )
  return sharding.shard_map(run, specs, _output_specs(rules, cache))(
    variables, batch, prefix
  )


def _variable_specs(cfg: ModelConfig, variables, rules: sharding_lib.Rules):
  specs = sharding_lib.param_specs(cfg, rules)
  if 'route' in variables:
    specs = {**specs, 'route': jax.sharding.PartitionSpec()}
  return specs


def _output_specs(rules: sharding_lib.Rules, cache: Any) -> Any:
  token = rules.spec('scores', 'rows', 'tokens')
  stacked = rules.spec('scores', None, 'rows', 'tokens')
  loads = rules.spec('loads', None)
  one = rules.spec('activation_max')
  specs: Any = (token, token, stacked, loads, token, one, token, stacked, cache)
  specs += token, token, token
  return Outputs(*specs)


def token_logprobs(
  m2: M2, variables, batch: Forest, *, sharding: Sharding = ONE_DEVICE
) -> Float[Array, 'B S']:
  """log p(token | its path), at least fp32; 0 at roots and padding."""
  return forward(*without_modules(m2.cfg, variables), batch, sharding=sharding).logprob


def without_modules(cfg: ModelConfig, variables) -> tuple[ModelConfig, dict[str, Any]]:
  """The model without its MTP modules, as config and variables."""
  kept = {
    kind: {name: leaf for name, leaf in variables[kind].items() if name != 'mtp'}
    for kind in ('params', 'router')
  }
  if 'route' in variables:
    kept['route'] = variables['route']
  return dataclasses.replace(cfg, num_mtp_modules=0), kept


def _on_shards(
  cfg: ModelConfig,
  variables,
  batch: Forest,
  prefix: PrefixCache | None,
  *,
  detach_mtp: bool,
  comparison: draft_loss.Comparison | None,
  entropy_gradient: bool,
  detach_value: bool,
  best: int,
  sharding: Sharding,
) -> Outputs:
  """`forward` on one device's shards."""
  fields = {name: getattr(batch, name) for name in forest_lib.TOKEN_FIELDS}
  batch = dataclasses.replace(batch, **jax.tree.map(sharding.to_zigzag, fields))
  params = variables['params']
  heads = {name: params[name] for name in ('head', 'value') if name in params}
  params = dict(params, **sharding.gather_params(heads, cfg.dtype))
  kv = None if prefix is None else (prefix.k, prefix.v)
  keys = attention.forest_keys(cfg, batch, sharding, kv)
  counted = dict(multiplicity=batch.multiplicity, replay=batch.experts)
  out = trunk(cfg, variables, batch.tokens, keys, sharding, **counted)

  cached_states = None if prefix is None else prefix.states[0]
  state = head.at_parent(out.hidden, batch, sharding, cached_states)
  scored = distillation.score if batch.teacher_words is not None else head.score
  logprob, entropy, *teacher_kl = scored(
    *(params, state, batch, sharding),
    depth=1,
    entropy_gradient=entropy_gradient,
    tiled=cfg.invariant,
  )
  value = None
  if cfg.value_head:
    trunk_read = jax.lax.stop_gradient(state) if detach_value else state
    value = head.values(params, trunk_read, batch)
  if detach_mtp:
    modules_read = jax.lax.stop_gradient((state, params))
  else:
    modules_read = state, params
  modules = _modules(cfg, variables, *modules_read, batch, keys, prefix, comparison)

  loads = {'layers': out.routing.load}
  if modules.load is not None:
    loads['mtp'] = modules.load
  everywhere = 'rows', 'tokens', 'residual'
  ids, rerouted = out.routing.ids, out.routing.rerouted
  if rerouted is not None:
    rerouted = jnp.sum(rerouted, axis=0, dtype=jnp.int32).reshape(logprob.shape)
  back = sharding.from_zigzag
  new, activation_max = None, out.activation_max
  assert activation_max is not None  # multiplicity is given
  if prefix is not None:
    k, v = out.new_kv
    new = PrefixCache(k, v, out.hidden[None], modules.new)
  return Outputs(
    logprob=back(logprob),
    entropy=back(entropy),
    mtp_logprob=back(modules.logprob, axis=2),
    loads=sharding.psum(loads, *everywhere),
    experts=back(ids.swapaxes(0, 1).reshape(*logprob.shape, -1, ids.shape[2])),
    activation_max=sharding.pmax(jnp.max(activation_max), *everywhere),
    rerouted=jax.tree.map(back, rerouted),
    drafts=jax.tree.map(lambda x: back(x, axis=2), modules.drafts),
    new=new,
    teacher_kl=back(teacher_kl[0]) if teacher_kl else None,
    best=jax.tree.map(back, head.best(params, state, best, sharding) if best else None),
    value=jax.tree.map(back, value),
  )


def _modules(
  cfg: ModelConfig, variables, state, params, batch, keys, prefix, comparison
) -> mtp.Outputs:
  """The MTP modules' results; empty without modules."""
  cached = None if prefix is None else prefix.mtp
  if cfg.num_mtp_modules:
    own = {'params': {**params, 'mtp': variables['params']['mtp']}}
    own['router'] = variables['router']
    return mtp.apply(
      cfg, own, state, batch, keys, keys.sharding, prefix=cached, comparison=comparison
    )
  shape = (0, *batch.tokens.shape)
  none = jnp.zeros(shape, jnp.promote_types(state.dtype, jnp.float32))
  # no entries, of this device's shapes
  new = jax.tree.map(lambda a: jnp.zeros(shape + a.shape[3:], a.dtype), cached)
  return mtp.Outputs(none, None, new)
