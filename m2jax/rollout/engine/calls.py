"""The engine's calls as pure functions; on a mesh, of each device's part.

A device has the slots and pages of its group (`placement`) and is given its
rows of a call. The other devices of a group have other heads, experts, channels and
parts of the vocabulary. All groups take the same steps, because they exchange tokens
with each other's experts.

Axes: S slots, P rows of a call (a bucket; rows beyond num_rows [1] are padding), n
pages of a table, C chunk tokens, N decode steps of a call, M stop ids, V vocabulary, D
model, W words of a mask.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from m2jax.config import ModelConfig
from m2jax.layers import head
from m2jax.rollout.engine import contexts, forward, modules, sampling
from m2jax.rollout.engine import pages as pages_lib
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.decode_state import (
  LENGTH,
  NO_DRAFT,
  RUNNING,
  STOP,
  DecodeState,
  Prefix,
  ResultTokens,
  Sampled,
  Slots,
)
from m2jax.sharding import Sharding


class Drawn(NamedTuple):
  """One step's result of P rows; see `decode_state.Sampled`. count: 1 if running."""

  token: jax.Array
  logprob: jax.Array
  count: jax.Array
  code: jax.Array
  top_ids: jax.Array
  top_logprobs: jax.Array


@dataclasses.dataclass(frozen=True)
class Calls:
  """The calls of an engine of these sizes.

  Attributes:
    sharding: `placement.serving`'s.
    contexts: decoding works on copies of its rows' pages; see contexts.py.
  """

  cfg: ModelConfig
  config: EngineConfig
  sharding: Sharding
  contexts: bool = False

  # --- The scheduler's calls.

  def prefill_rows(
    self, params, state: DecodeState, tokens, starts, counts, tables
  ) -> DecodeState:
    """Stores the keys and values of a chunk of each row.

    Args:
      tokens: [P, C] int32. starts, counts, tables: see `forward.Rows`; a row of
        padding has count 0.
    """
    rows = forward.Rows(tokens, starts, counts, tables)
    if not self.config.draft_tokens:
      return dataclasses.replace(state, pages=self.extend(params, state.pages, rows)[1])
    begin = modules.start(state.pages, tables, starts)
    hidden, pages = self.extend(params, state.pages, rows)
    pages = modules.store_states(pages, 0, rows, hidden)
    pages = modules.prefill(self.cfg, params, pages, rows, hidden, begin, self.sharding)
    return dataclasses.replace(state, pages=pages)

  def admit(self, state: DecodeState, rows, num_rows, slots: Slots) -> DecodeState:
    """Sets the decoding state of slots `rows` [S]; their prefix must be stored."""
    return dataclasses.replace(
      state, slots=scatter(state.slots, slots, rows, num_rows[0])
    )

  def generate_many(
    self, params, state: DecodeState, rows, num_rows, tables, steps, mask=None
  ) -> tuple[DecodeState, Sampled]:
    """Up to `steps` decode steps of slots `rows`; stops early when all have finished.

    Args:
      rows: [P] int32 slots, distinct in the first num_rows.
      tables: [P, n] int32, pages of at least length + steps positions each.
      steps: int32, at most config.max_steps; 1 with a mask.
      mask: [P, W] int32, the tokens that may be drawn (`sampling.constrain`).
    """
    cached = state.pages
    if self.contexts:
      cached = contexts.take(cached, tables, self.cfg.num_layers)
    state, sampled, _ = self._generate(
      params, state, cached, rows, num_rows, tables, steps, mask
    )
    return state, sampled

  def generate_kept(
    self, params, state, kept, rows, num_rows, tables, steps, stale, mask=None
  ) -> tuple[DecodeState, Sampled, contexts.Contexts]:
    """`generate_many` on the Contexts of an earlier call with the same rows and pages.

    Args:
      kept: the earlier call's Contexts, which have the pages of each row that is not
        stale.
      stale: [P] bool, rows to take out of the pages.
    """
    kept = contexts.refresh(kept, state.pages, tables, stale)
    return self._generate(params, state, kept, rows, num_rows, tables, steps, mask)

  def _generate(self, params, state, cached, rows, num_rows, tables, steps, mask):
    """The state, Sampled, and `cached`: the state's pages or Contexts of the rows."""
    N = self.config.max_steps
    slots, sampled = self.begin(state, rows, num_rows, N)

    def unfinished(carry):
      step, left, *_ = carry
      return (step < steps) & left

    def one(carry):
      step, _, pages, slots, sampled = carry
      pages, slots, drawn = self._step(params, pages, slots, tables, mask)
      at = lambda into, new: lax.dynamic_update_index_in_dim(
        into, new.astype(into.dtype), step, 1
      )
      sampled = Sampled(
        tokens=at(sampled.tokens, drawn.token),
        logprobs=at(sampled.logprobs, drawn.logprob),
        counts=sampled.counts + drawn.count,
        finish_code=jnp.where(drawn.count > 0, drawn.code, sampled.finish_code),
        top_ids=at(sampled.top_ids, drawn.top_ids),
        top_logprobs=at(sampled.top_logprobs, drawn.top_logprobs),
      )
      return step + 1, self.any_left(slots), pages, slots, sampled

    starts = slots.length
    begin = jnp.int32(0), self.any_left(slots), cached, slots, sampled
    _, _, cached, slots, sampled = lax.while_loop(unfinished, one, begin)
    pages = cached
    if self.contexts:
      new = slots.length - starts
      pages = contexts.put_back(state.pages, cached, tables, starts, new, N)
    slots = scatter(state.slots, slots, rows, num_rows[0])
    return DecodeState(pages, slots), sampled, cached

  def begin(
    self, state: DecodeState, rows, num_rows, most: int
  ) -> tuple[Slots, Sampled]:
    """Slots `rows` [P], the first num_rows of which decode, with no tokens sampled yet.

    Args:
      most: tokens that a row can draw.
    """
    P, top = rows.shape[0], self.config.max_top_logprobs
    slots = jax.tree.map(lambda x: x[rows], state.slots)
    live = jnp.arange(P) < num_rows[0]
    slots = dataclasses.replace(slots, remaining=jnp.where(live, slots.remaining, 0))
    return slots, Sampled(
      tokens=jnp.zeros((P, most), jnp.int32),
      logprobs=jnp.zeros((P, most), jnp.float32),
      counts=jnp.zeros(P, jnp.int32),
      finish_code=jnp.zeros(P, jnp.int32),
      top_ids=jnp.zeros((P, most, top), jnp.int32),
      top_logprobs=jnp.zeros((P, most, top), jnp.float32),
    )

  def expert_ids(self, state: DecodeState, group, table) -> jax.Array:
    """Expert ids [n·page, L, top_k] int16 of the pages `table` [n] of a group.

    Requires config.record_experts.
    """
    ids = pages_lib.expert_ids(state.pages, table)
    mine = self.sharding.index('rows') == group
    return self.sharding.psum(jnp.where(mine, ids, 0), 'rows')

  def read_pages(self, state: DecodeState, group, table) -> pages_lib.Pages:
    """The pages `table` [n] of a group, n in place of all pages."""
    take = lambda axis, x: jnp.take(x, table, axis=axis)
    found = jax.tree.map(take, pages_lib.axes(state.pages), state.pages)
    mine = self.sharding.index('rows') == group
    total = lambda x: self.sharding.psum(jnp.where(mine, x, 0), 'rows')
    return jax.tree.map(total, found)

  def write_pages(
    self, state: DecodeState, group, table, new: pages_lib.Pages
  ) -> DecodeState:
    """Stores what `read_pages` gave in the pages `table` [n] of a group."""
    mine = self.sharding.index('rows') == group
    targets = jnp.where(mine, table, pages_lib.UNUSED)
    pages = pages_lib.copy(state.pages, targets, new, jnp.arange(len(table)))
    return dataclasses.replace(state, pages=pages)

  def _step(self, params, pages, slots: Slots, tables, mask=None):
    """One token of each running row: pages, slots, Drawn."""
    running = (slots.remaining > 0).astype(jnp.int32)
    rows = forward.Rows(slots.token[:, None], slots.length, running, tables)
    hidden, pages = self.extend(params, pages, rows)
    if self.config.draft_tokens:
      pages = modules.forget(modules.store_states(pages, 0, rows, hidden), rows)
      none = jnp.full_like(slots.drafts, NO_DRAFT)
      slots = dataclasses.replace(slots, drafts=none)
    with jax.named_scope('sampling'):
      logits = adjusted(self.logits(params, hidden[:, 0]), slots, pages, tables)
      if mask is not None:
        logits = sampling.constrain(logits, mask)
      slots, drawn = self._sample(logits, slots)
    return pages, slots, drawn

  def logits(self, params, hidden):
    """[P, V] of hidden [P, D]."""
    logits = head.logits(params['params'], hidden, self.cfg.invariant)
    return self.sharding.all_gather(logits, 'vocab', axis=1)

  def any_left(self, slots: Slots):
    left = jnp.any(slots.remaining > 0).astype(jnp.int32)
    return self.sharding.psum(left, 'rows') > 0

  def _sample(self, logits, slots: Slots):
    """Draws each row's next token; finished rows do not change."""
    token, logprob, logprobs = sampling.sample(logits, draws(slots), self.cfg.invariant)
    running = slots.remaining > 0
    slots, code = self.take(slots, token, logprob, running)
    top = self.top(logprobs, slots)
    return slots, Drawn(token, logprob, running.astype(jnp.int32), code, *top)

  def take(self, slots: Slots, token, logprob, running) -> tuple[Slots, jax.Array]:
    """Appends a token to the rows that are `running` [P]; slots and finish_code."""
    count = running.astype(jnp.int32)
    near_one = logprob > np.log(self.config.confident_probability)
    confident = jnp.where(near_one, slots.confident + 1, 0)
    stopped = jnp.any(token[:, None] == slots.stop_ids, axis=1)
    remaining = slots.remaining - 1
    exhausted = (remaining <= 0) | (confident >= self.config.confident_tokens)
    code = jnp.where(stopped, STOP, jnp.where(exhausted, LENGTH, RUNNING))
    slots = dataclasses.replace(
      slots,
      length=slots.length + count,
      token=jnp.where(running, token, slots.token),
      remaining=jnp.where(
        running, jnp.where(code == RUNNING, remaining, 0), slots.remaining
      ),
      sampled=slots.sampled + count,
      confident=jnp.where(running, confident, slots.confident),
    )
    return slots, code.astype(jnp.int32)

  def top(self, logprobs, slots: Slots):
    """The most likely tokens and their log-probabilities, if a row asks for them."""
    count = self.config.max_top_logprobs
    shape = len(logprobs), count
    none = lambda _: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))

    def find(logprobs):
      values, ids = lax.top_k(logprobs, count)
      return ids.astype(jnp.int32), values.astype(jnp.float32)

    if not count:
      return none(logprobs)
    return lax.cond(jnp.any(slots.top > 0), find, none, logprobs)

  def extend(self, params, pages, rows: forward.Rows):
    return forward.extend(self.cfg, params, pages, rows, self.sharding)

  # --- JetStream's calls: slot s has pages of its own, one after the other.

  def _table(self, slot):
    n = self.config.context_pages
    return 1 + slot * n + jnp.arange(n)

  def prefill(self, params, prefix: Prefix, tokens, true_length) -> Prefix:
    # The last token of an existing prefix is not consumed yet, so the chunk starts with
    # it. Without a prefix (length -1) the chunk is the tokens only, from position 0.
    fresh = prefix.length < 0
    lead = jnp.where(fresh, jnp.roll(tokens, -1), tokens)
    first = jnp.where(fresh, tokens[0], prefix.token)
    rows = forward.Rows(
      tokens=jnp.concatenate([first[None], lead])[None],
      starts=jnp.maximum(prefix.length, 0)[None],
      counts=jnp.where(fresh, true_length - 1, true_length)[None],
      tables=self._table(0)[None],
    )
    hidden, pages = self.extend(params, prefix.pages, rows)
    if self.config.draft_tokens:  # by JetStream's calls nothing is drafted
      pages = modules.forget(modules.store_states(pages, 0, rows, hidden), rows)
    return Prefix(
      pages=pages,
      length=prefix.length + true_length,
      token=tokens[true_length - 1],
    )

  def insert(self, prefix: Prefix, state: DecodeState, slot, slots: Slots):
    most = self.config.context_tokens - 1 - prefix.length
    limit = jnp.where(slots.remaining > 0, slots.remaining, most)
    slots = dataclasses.replace(
      slots,
      length=prefix.length[None],
      token=prefix.token[None],
      remaining=jnp.clip(limit, 0, most),
      prompt=prefix.length[None] + 1,
    )
    slot -= self.sharding.index('rows') * self.config.slots
    mine = (slot >= 0) & (slot < self.config.slots)
    targets = jnp.where(mine, self._table(slot), pages_lib.UNUSED)
    pages = pages_lib.copy(state.pages, targets, prefix.pages, self._table(0))
    one = mine.astype(jnp.int32)
    return DecodeState(pages, scatter(state.slots, slots, slot[None], one))

  def generate_one(
    self, params, state: DecodeState
  ) -> tuple[DecodeState, ResultTokens]:
    """One step of every slot."""
    tables = jax.vmap(self._table)(jnp.arange(self.config.slots))
    pages, slots, drawn = self._step(params, state.pages, state.slots, tables)
    data = jnp.stack([drawn.token, drawn.count, slots.sampled], axis=1)
    result = ResultTokens(data, drawn.logprob[:, None])
    return DecodeState(pages, slots), result


def draws(slots: Slots) -> sampling.Draws:
  """How each row draws its next token."""
  return sampling.Draws(
    slots.seed,
    slots.sampled,
    slots.temperature,
    slots.min_p,
    slots.top_k,
    slots.top_p,
  )


def adjusted(logits, slots: Slots, pages, tables, ahead: int = 0):
  """The logits with the penalties and biases of rows that have any.

  Args:
    ahead: stored tokens after the last one of each row that count, too.
  """
  how = sampling.Penalties(
    slots.presence_penalty,
    slots.frequency_penalty,
    slots.repetition_penalty,
    slots.bias_ids,
    slots.bias,
  )

  def penalize(logits):
    tokens = pages.read_tokens(tables)
    position = jnp.arange(tokens.shape[1])
    stored = position <= slots.length[:, None] + ahead  # the last token, too
    prompt = position < slots.prompt[:, None]
    return sampling.penalize(logits, how, tokens, stored & prompt, stored & ~prompt)

  off = (how.presence == 0) & (how.frequency == 0) & (how.repetition == 1)
  off &= jnp.all(how.bias == 0, axis=1)
  return lax.cond(jnp.all(off), lambda x: x, penalize, logits)


def scatter(into: Slots, rows_of: Slots, rows, num_rows) -> Slots:
  """Writes rows_of's first num_rows entries to `rows` of `into`."""
  size = into.length.shape[0]
  target = jnp.where(jnp.arange(rows.shape[0]) < num_rows, rows, size)
  return jax.tree.map(lambda x, y: x.at[target].set(y, mode='drop'), into, rows_of)
