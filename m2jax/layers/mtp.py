"""Multi-token prediction modules (algorithms.md §4.1, law 2).

Module k at node v reads the state of module k-1 at parent(v) (module 0 is the trunk
after its final norm) and the embedding of v, and predicts v's children, one token
further ahead than module k-1. Keys at positions below k have no such state and are
masked. The projection's hidden half comes first (m2-and-forge.md §3); final norm and
head are shared with the trunk.

Axes: B rows, S tokens, T = B·S, P tokens of a cached prefix, D model, E experts, K
key/value heads, H head dim; mtp modules.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float, Float32
from m2jax.config import ModelConfig
from m2jax.forest import Forest
from m2jax.layers import attention, block, draft_loss, head, loop
from m2jax.layers.embed import embed
from m2jax.layers.norm import rms_norm
from m2jax.sharding import Sharding


class Cache(NamedTuple):
  """Keys, values and states of the modules at P tokens: of a prefix, or new ones."""

  k: Float[Array, 'mtp B P K H']
  v: Float[Array, 'mtp B P K H']
  states: Float[Array, 'mtp B P D']


class Outputs(NamedTuple):
  """The modules' results for a batch.

  Attributes:
    logprob: module k scores tokens of position k + 1 and deeper, else 0.
    load: expert assignments of this device's tokens; None without modules.
    new: Cache entries of the tokens; None without a prefix.
    drafts: distance from the trunk; None without a comparison.
  """

  logprob: Float[Array, 'mtp B S']
  load: Float32[Array, 'mtp E'] | None
  new: Cache | None
  drafts: draft_loss.Drafts | None = None


def join(
  parent_state: Float[Array, 'T D'],
  embedding: Float[Array, 'T D'],
  p,
  cfg: ModelConfig,
) -> Float[Array, 'T D']:
  """Module input from the parent's state and the token's embedding."""
  both = jnp.concatenate(
    [
      rms_norm(parent_state, p['hidden_norm'], cfg.rms_norm_eps),
      rms_norm(embedding, p['embed_norm'], cfg.rms_norm_eps),
    ],
    axis=-1,
  )
  return both @ p['proj'].astype(both.dtype)


def _attend(
  k, cfg: ModelConfig, metadata: attention.Metadata, sharding: Sharding, prefix
):
  """Attention of module k, which sees no key of a position below k."""
  visibility = metadata.visibility
  end = jnp.where(visibility.k_position >= k, visibility.subtree_end, 0)
  visible = dataclasses.replace(visibility, subtree_end=end)
  return functools.partial(
    attention.attend,
    cfg=cfg,
    metadata=metadata._replace(visibility=visible),
    sharding=sharding,
    prefix=None if prefix is None else prefix[:2],
  )


def apply(
  cfg: ModelConfig,
  variables,
  state: Float[Array, 'B S D'],
  batch: Forest,
  metadata: attention.Metadata,
  sharding: Sharding,
  prefix: Cache | None = None,
  comparison: draft_loss.Comparison | None = None,
) -> Outputs:
  """Chains the modules, each reading the states of the one before.

  Args:
    cfg: the model.
    variables: {'params', 'router'}: of the modules, and parameters of embedding, final
      norm and head, the head gathered.
    state: of the trunk at each token's parent.
    batch: this device's tokens.
    metadata: of the trunk, with positions; the modules have no windows.
    sharding: the mesh.
    prefix: cached, of the path that the tokens continue.
    comparison: of the modules with the trunk; None: there is none.
  """
  params, teacher = variables['params'], None
  if comparison:
    teacher = draft_loss.best_words(params, state, comparison, sharding)
  embedding = embed(cfg, params, batch.tokens, sharding)

  def block_of_module(state, stacked):
    k, p, bias, prefix = stacked
    p = sharding.gather_params(p, cfg.dtype)
    attend = _attend(k, cfg, metadata, sharding, prefix)
    own = sharding.residual_part(state.reshape(-1, cfg.embed_dim))
    x = join(own, embedding, p, cfg)
    multiplicity = jnp.where(batch.position >= k, batch.multiplicity, 0).reshape(-1)
    multiplicity = sharding.residual_part(multiplicity)
    x, new_kv, routing = block.apply(
      x, p['layers'], bias, cfg, attend, multiplicity, sharding=sharding
    )
    x = rms_norm(x, params['final_norm'], cfg.rms_norm_eps)
    x = sharding.gather_residual(x).reshape(state.shape)
    cached_states = None if prefix is None else prefix.states
    state = head.at_parent(x, batch, sharding, cached_states)
    return state, (routing.load, None if prefix is None else Cache(*new_kv, x))

  block_of_module = loop.recomputed(block_of_module, cfg, sharding)

  def module(state, stacked):
    state, (load, new) = block_of_module(state, stacked)
    # not recomputed: the head saves its inputs and one number a token
    depth, drafts = stacked[0] + 1, None
    if teacher is None:
      logprob, _ = head.score(params, state, batch, sharding, depth=depth)
    else:
      logprob, drafts = draft_loss.score(
        params, state, batch, sharding, depth=depth, teacher=teacher
      )
    return state, Outputs(logprob, load, new, drafts)

  modules = cfg.num_mtp_modules
  stacked = (
    jnp.arange(1, modules + 1),
    params['mtp'],
    variables['router']['mtp'],
    prefix,
  )
  unroll = modules if cfg.unroll_layers else 1
  return jax.lax.scan(module, state, stacked, unroll=unroll)[1]
