"""The MTP modules over paged sequences: states, keys and values, and drafts.

Module k at position p reads the state of module k-1 at p-1 (module 0 is the trunk) and
the embedding of token p, and predicts token p+1 (`layers.mtp`, law 2). Its keys and
values are layer L + k - 1 of the pages. A page also has

  states  of the trunk and of all modules but the last, after the last token of the page
          that each has consumed: where the next chunk, or another sequence with this
          prefix, continues;
  depth   of each token: modules 1 … depth have stored its keys and values from a state
          that was there. Module k sees keys of depth k or more.

At the start of a sequence depth[p] = min(p, modules), the mask of training. Tokens that
were decoded without drafts have depth 0, and module k starts again after k of them.

Axes: P rows, C tokens of a row, n pages of a table, D model, V vocabulary; mtp modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.config import ModelConfig
from m2jax.layers import mtp
from m2jax.layers.embed import embed
from m2jax.rollout.engine import forward
from m2jax.rollout.engine.contexts import Contexts
from m2jax.rollout.engine.forward import Rows
from m2jax.rollout.engine.pages import Pages
from m2jax.sharding import Sharding


class Start(NamedTuple):
  """What a chunk continues.

  Attributes:
    states: states of the trunk and each module but the last, [P, D] each, before the
      chunk.
    depth: [P], the depth of the token before it; -1 before a sequence's first token.
  """

  states: tuple[jax.Array, ...]
  depth: jax.Array


def start(pages: Pages | Contexts, tables, position, trunk=None) -> Start:
  """Reads what a chunk from position [P] continues, before anything is written.

  Args:
    trunk: [P], if the trunk's state is asked for at another position than before that.
  """
  before = position - 1
  states = tuple(
    pages.read_states(k, tables, before if k or trunk is None else trunk)
    for k in range(pages.states.shape[0])
  )
  depth = pages.read_depth(tables)
  last = jnp.clip(before, 0, depth.shape[1] - 1)
  depth = jnp.take_along_axis(depth, last[:, None], axis=1)[:, 0].astype(jnp.int32)
  return Start(states, jnp.where(before < 0, -1, depth))


def store_states(pages, module: int, rows: Rows, states) -> Pages | Contexts:
  """Stores states [P, C, D] after the last token of each page that the rows reach."""
  position, page_tokens = rows.position, pages.page_tokens
  last = jnp.arange(position.shape[1]) == rows.counts[:, None] - 1
  last |= position % page_tokens == page_tokens - 1
  at = pages.places(rows.tables, position, rows.live & last)
  return pages.write_states(module, at, states)


def forget(pages, rows: Rows) -> Pages | Contexts:
  """Records that no module has consumed the tokens."""
  depth = jnp.zeros(rows.tokens.shape, jnp.int32)
  return pages.write_depth(rows.places(pages), depth)


def prefill(
  cfg: ModelConfig, variables, pages, rows: Rows, hidden, begin: Start, sharding
) -> Pages | Contexts:
  """All modules consume the tokens of which the trunk's states are hidden [P, C, D]."""
  states = jnp.concatenate([begin.states[0][:, None], hidden[:, :-1]], axis=1)
  modules = len(begin.states)
  return _consume(cfg, variables, pages, rows, states, begin, modules, None, sharding)[
    0
  ]


def draft(
  cfg: ModelConfig,
  variables,
  pages,
  rows: Rows,
  states,
  begin: Start,
  modules: int,
  draw: Callable,
  sharding: Sharding,
) -> tuple[Pages | Contexts, jax.Array]:
  """The first modules consume tokens and draft the next; pages and [P, modules] tokens.

  Args:
    rows: the tokens; the last of each row is the one that drafts follow.
    states: [P, C, D] of the trunk, each one position before its token.
    draw: (draft's number from 0, state [P, D], pages) → token [P].
  """
  return _consume(cfg, variables, pages, rows, states, begin, modules, draw, sharding)


def _consume(cfg, variables, pages, rows, states, begin, modules, draw, sharding):
  """See `draft`; without `draw` there are no drafts."""
  ahead = modules - 1 if draw else 0
  pages = _store_depth(pages, rows, begin, modules, ahead)
  counts, drafts = rows.counts, []
  for k in range(1, modules + 1):
    pages = pages.write_tokens(rows.places(pages), rows.tokens)
    states, pages = _module(cfg, variables, pages, k, rows, states, sharding)
    if k < len(begin.states):
      whole = rows._replace(counts=counts)
      pages = store_states(pages, k, whole, states)
    if draw:
      last = jnp.maximum(rows.counts - 1, 0)
      state = jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0]
      drafts.append(draw(k - 1, state, pages))
    if k == modules:
      break
    if draw:
      rows = _append(rows, drafts[-1])
    else:
      states = states[:, :-1]
    states = jnp.concatenate([begin.states[k][:, None], states], axis=1)
  return pages, jnp.stack(drafts, axis=1) if drafts else None


def _module(cfg: ModelConfig, variables, pages, k: int, rows: Rows, states, sharding):
  """States [P, C, D] of module k, given those before its tokens, and the pages."""
  cfg, params, router = cfg.ordinary, variables['params'], variables['router']
  visible = pages.read_depth(rows.tables) >= k
  keys = forward.cached_keys(cfg, rows, pages)._replace(visible=visible)
  attend = keys.attention(cfg, window=None)
  x, (pages, _), _ = mtp.module(
    states.reshape(-1, states.shape[-1]),
    embed(cfg, params, rows.tokens, sharding),
    *(_of_module(params['mtp'], k), _of_module(router['mtp'], k)),
    *(cfg, params['final_norm'], keys.tables),
    functools.partial(attend, carry=pages, layer=cfg.num_layers + k - 1),
    sharding=sharding,
  )
  return x.reshape(states.shape), pages


def _of_module(stacked, k: int):
  if isinstance(stacked, list):  # `forward.split_layers`
    return stacked[k - 1]
  return jax.tree.map(lambda x: x[k - 1], stacked)


def _store_depth(pages, rows: Rows, begin: Start, modules: int, ahead: int):
  """Stores the depth of the tokens, and of `ahead` drafts after them."""
  P, C = rows.tokens.shape
  counts = jnp.where(rows.counts > 0, rows.counts + ahead, 0)
  wide = rows._replace(tokens=jnp.zeros((P, C + ahead), jnp.int32), counts=counts)
  depth = begin.depth[:, None] + 1 + jnp.arange(C + ahead)
  return pages.write_depth(wide.places(pages), jnp.minimum(depth, modules))


def _append(rows: Rows, tokens) -> Rows:
  """One token [P] more in each row that has any."""
  P, C = rows.tokens.shape
  wide = jnp.pad(rows.tokens, ((0, 0), (0, 1)))
  wide = wide.at[jnp.arange(P), rows.counts].set(tokens)
  return rows._replace(
    tokens=wide, counts=jnp.where(rows.counts > 0, rows.counts + 1, 0)
  )
