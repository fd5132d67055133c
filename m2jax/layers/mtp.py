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

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float, Float32, Int
from m2jax.config import ModelConfig
from m2jax.forest import Forest
from m2jax.layers import attention, block, draft_loss, head, loop
from m2jax.layers.embed import embed
from m2jax.layers.norm import rms_norm
from m2jax.sharding import ONE_DEVICE, Sharding


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


def module(
  state: Float[Array, 'T D'],
  embedding: Float[Array, 'Tr D'],
  p,
  bias: Float[Array, 'E'],
  cfg: ModelConfig,
  final_norm: Float[Array, 'D'],
  tables: attention.Tables,
  attend: Callable,
  *,
  multiplicity: Int[Array, 'Tr'] | None = None,
  sharding: Sharding = ONE_DEVICE,
) -> tuple[Float[Array, 'T D'], Any, block.Routing]:
  """A module's states, what `attend` returns besides its output, and the routing.

  Args:
    state: the previous module's state at each token's parent.
    embedding: the tokens' embeddings.
    p, bias: the module's parameters and router bias.
    cfg: the model.
    final_norm: the trunk's final norm.
    tables, attend, multiplicity, sharding: see `block.apply`.
  """
  x = join(sharding.residual_part(state), embedding, p, cfg)
  x, extra, routing = block.apply(
    *(x, p['layers'], bias, cfg, tables, attend),
    multiplicity=multiplicity,
    sharding=sharding,
  )
  x = rms_norm(x, final_norm, cfg.rms_norm_eps)
  return sharding.gather_residual(x), extra, routing


def apply(
  cfg: ModelConfig,
  variables,
  state: Float[Array, 'B S D'],
  batch: Forest,
  keys: attention.ForestKeys,
  sharding: Sharding,
  prefix: Cache | None = None,
  comparison: draft_loss.Comparison | None = None,
) -> Outputs:
  """Chains the modules, each reading the states of the one before.

  Args:
    cfg: the model.
    variables: {'params', 'router'}: the modules', and the parameters of embedding,
      final norm and head, the head gathered.
    state: the trunk's state at each token's parent.
    batch: this device's tokens.
    keys: the trunk's keys; the modules have no windows.
    sharding: the mesh.
    prefix: cached entries of the path that the tokens continue.
    comparison: how the modules are compared with the trunk; None: they are not.
  """
  cfg = cfg.ordinary
  params, teacher = variables['params'], None
  if comparison:
    teacher = draft_loss.best_words(params, state, comparison, sharding)
  embedding = embed(cfg, params, batch.tokens, sharding)

  def states(state, stacked):
    k, p, bias, prefix = stacked
    p = sharding.gather_params(p, cfg.dtype)
    attend = keys.from_position(k).attention(cfg, window=None)
    cached = None if prefix is None else prefix[:2]
    multiplicity = jnp.where(batch.position >= k, batch.multiplicity, 0).reshape(-1)
    x, (_, new_kv), routing = module(
      state.reshape(-1, cfg.embed_dim),
      *(embedding, p, bias, cfg, params['final_norm'], keys.tables),
      functools.partial(attend, carry=None, layer=cached),
      multiplicity=sharding.residual_part(multiplicity),
      sharding=sharding,
    )
    x = x.reshape(state.shape)
    cached_states = None if prefix is None else prefix.states
    state = head.at_parent(x, batch, sharding, cached_states)
    return state, (routing.load, None if prefix is None else Cache(*new_kv, x))

  states = loop.recomputed(states, cfg, sharding)

  def one(state, stacked):
    state, (load, new) = states(state, stacked)
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
  return jax.lax.scan(one, state, stacked, unroll=unroll)[1]
