"""The engine's calls as pure functions; on a mesh, of each device's part.

Every device stores all slots and is given all rows of a call. It consumes the tokens of
its own rows (`placement.own_rows`); their new cache entries and tokens are gathered,
so that all devices return the same slots. The other devices of a row have its other
heads, experts, channels and parts of the vocabulary.

Axes: S slots, P rows of a call (a bucket; rows beyond num_rows are padding), C chunk
tokens, N decode steps of a call, M stop ids, V vocabulary, D model.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from m2jax.config import ModelConfig
from m2jax.layers import head
from m2jax.rollout import forward, kv_cache, placement, sampling
from m2jax.rollout.decode_state import (
  LENGTH,
  RUNNING,
  STOP,
  DecodeState,
  Prefix,
  ResultTokens,
  Sampled,
  Slots,
)
from m2jax.rollout.engine_config import EngineConfig
from m2jax.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class Calls:
  """The calls of an engine of these sizes. `sharding` is `placement.serving`'s."""

  cfg: ModelConfig
  config: EngineConfig
  sharding: Sharding

  # --- The scheduler's calls.

  def prefill_rows(
    self, params, state: DecodeState, rows, num_rows, tokens, starts, *, context: int
  ) -> DecodeState:
    """Consumes a chunk of each row: writes its K/V at starts … starts + C - 1.

    Args:
      rows: [P] int32 slots, distinct in the first num_rows. num_rows: int32.
      tokens: [P, C] int32. Padding at the end of a row writes undefined entries, which
        must be at or beyond the slot's length.
      starts: [P] int32, at most context_tokens - C.
      context: static; the cache positions read, at least max(starts).
    """
    tail = self._consume(params, state.cache, rows, tokens, starts, context=context)
    cache = kv_cache.append(state.cache, tail, rows, num_rows, starts)
    return dataclasses.replace(state, cache=cache)

  def copy_rows(
    self, state: DecodeState, sources, targets, num_rows, *, context: int
  ) -> DecodeState:
    """Copies the first `context` positions of slots sources [S] to targets [S]."""
    cache = kv_cache.copy(state.cache, sources, targets, num_rows, context)
    return dataclasses.replace(state, cache=cache)

  def admit(self, state: DecodeState, rows, num_rows, slots: Slots) -> DecodeState:
    """Sets the decoding state of slots `rows` [S]; their cache must hold the prefix."""
    return dataclasses.replace(
      state, slots=_scatter(state.slots, slots, rows, num_rows)
    )

  def generate_many(
    self, params, state: DecodeState, rows, num_rows, steps, *, context: int
  ) -> tuple[DecodeState, Sampled]:
    """Up to `steps` decode steps of slots `rows`; stops early when all have finished.

    Args:
      rows: [P] int32 slots, distinct in the first num_rows. num_rows: int32.
      steps: int32, at most config.max_steps.
      context: static; cache positions read, at least max(length).
    """
    P, N = rows.shape[0], self.config.max_steps
    slots = jax.tree.map(lambda x: x[rows], state.slots)
    live = jnp.arange(P) < num_rows
    slots = dataclasses.replace(
      slots,
      remaining=jnp.where(live, slots.remaining, 0),
      length=jnp.where(live, slots.length, 0),
    )
    all_starts = slots.length
    own, slots = placement.own_rows(self.sharding, (rows, slots))
    cached, tail = self._gather(state.cache, own, N, context)
    tail, slots, sampled = self._decode(params, cached, tail, slots, steps)
    tail = self._all_entries(tail, P)
    slots, sampled = placement.all_rows(self.sharding, (slots, sampled), P)
    cache = kv_cache.append(state.cache, tail, rows, num_rows, all_starts)
    return DecodeState(cache, _scatter(state.slots, slots, rows, num_rows)), sampled

  def _decode(self, params, cached, tail, slots: Slots, steps):
    """The steps of `generate_many` for this device's rows: tail, slots, Sampled."""
    P, N, starts = len(slots.length), self.config.max_steps, slots.length
    sampled = Sampled(
      tokens=jnp.zeros((P, N), jnp.int32),
      logprobs=jnp.zeros((P, N), jnp.float32),
      counts=jnp.zeros(P, jnp.int32),
      finish_code=jnp.zeros(P, jnp.int32),
    )

    def any_left(slots):
      # All devices take the same steps: in each they exchange tokens.
      left = jnp.any(slots.remaining > 0).astype(jnp.int32)
      return self.sharding.psum(left, 'rows') > 0

    def unfinished(carry):
      step, left, *_ = carry
      return (step < steps) & left

    def one(carry):
      step, _, tail, slots, sampled = carry
      hidden, tail = self._extend(
        params, slots.token[:, None], cached, starts, tail, step
      )
      slots, token, logprob, running, code = self._sample(params, hidden[:, 0], slots)
      sampled = Sampled(
        tokens=lax.dynamic_update_slice(sampled.tokens, token[:, None], (0, step)),
        logprobs=lax.dynamic_update_slice(
          sampled.logprobs, logprob[:, None].astype(jnp.float32), (0, step)
        ),
        counts=sampled.counts + running,
        finish_code=jnp.where(running, code, sampled.finish_code),
      )
      return step + 1, any_left(slots), tail, slots, sampled

    begin = jnp.int32(0), any_left(slots), tail, slots, sampled
    return lax.while_loop(unfinished, one, begin)[2:]

  def expert_ids(self, state: DecodeState, slot, *, context: int) -> jax.Array:
    """Expert ids [context, L, top_k] int16 of a slot's first positions.

    Entries at or beyond the slot's length are undefined. Requires
    config.record_experts.
    """
    return state.cache.experts[:, slot, :context].swapaxes(0, 1)

  def _sample(self, params, hidden, slots: Slots):
    """Draws each row's next token from hidden [P, D]; finished rows do not change."""
    logits = head.logits(params['params'], hidden)
    logits = self.sharding.all_gather(logits, 'vocab', axis=1)
    token, logprob = sampling.sample(
      logits,
      slots.seed,
      slots.sampled,
      slots.temperature,
      slots.top_k,
      slots.top_p,
    )
    running = slots.remaining > 0
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
      remaining=jnp.where(running & (code == RUNNING), remaining, 0),
      sampled=slots.sampled + count,
      confident=jnp.where(running, confident, slots.confident),
    )
    return slots, token, logprob, count, code.astype(jnp.int32)

  def _gather(self, cache, rows, tokens: int, context: int):
    """The cached entries of slots `rows` [P], and an empty tail of `tokens`."""
    split = self.cfg.unroll_layers
    tail = kv_cache.empty_tail(
      self.cfg,
      len(rows),
      tokens,
      split=split,
      record_experts=self.config.record_experts,
      head_shards=self.sharding.size('heads'),
    )
    return kv_cache.gather(cache, rows, context, split=split), tail

  def _extend(self, params, tokens, cached, starts, tail, offset):
    """`forward.extend` of this device's rows."""
    return forward.extend(
      *(self.cfg, params, tokens, cached, starts, tail, offset, self.sharding)
    )

  def _consume(self, params, cache, rows, tokens, starts, *, context: int):
    """Entries, as a Tail, of tokens [P, C] at starts of slots `rows` [P]."""
    own = placement.own_rows(self.sharding, (rows, tokens, starts))
    own_rows, own_tokens, own_starts = own
    cached, tail = self._gather(cache, own_rows, tokens.shape[1], context)
    _, tail = self._extend(params, own_tokens, cached, own_starts, tail, 0)
    return self._all_entries(tail, len(rows))

  def _all_entries(self, tail, rows: int) -> kv_cache.Tail:
    """The new entries of all rows, of each device's own."""
    tail = kv_cache.stacked(tail)
    return placement.all_rows(self.sharding, tail, rows, axis=1)

  # --- JetStream's calls.

  def prefill(self, params, prefix: Prefix, tokens, true_length) -> Prefix:
    # The last token of an existing prefix is not consumed yet, so the chunk starts with
    # it. Without a prefix (length -1) the chunk is the tokens only, from position 0.
    fresh = prefix.length < 0
    lead = jnp.where(fresh, jnp.roll(tokens, -1), tokens)
    first = jnp.where(fresh, tokens[0], prefix.token)
    chunk = jnp.concatenate([first[None], lead])
    starts = jnp.maximum(prefix.length, 0)[None]
    row, context = jnp.zeros(1, jnp.int32), self.config.context_tokens
    chunk = chunk[None]
    tail = self._consume(params, prefix.cache, row, chunk, starts, context=context)
    # Padding may exceed the context: write into a longer copy, then crop it.
    longer = kv_cache.pad(prefix.cache, chunk.shape[1])
    longer = kv_cache.append(longer, tail, row, jnp.int32(1), starts)
    positions = context + self.config.max_steps
    return Prefix(
      cache=kv_cache.crop(longer, positions),
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
    )
    rows, one = slot[None], jnp.int32(1)
    cache = kv_cache.insert(state.cache, prefix.cache, slot)
    return DecodeState(cache, _scatter(state.slots, slots, rows, one))

  def generate_one(
    self, params, state: DecodeState
  ) -> tuple[DecodeState, ResultTokens]:
    """One step of every slot."""
    S, context = self.config.slots, self.config.context_tokens
    rows = jnp.arange(S)
    own, slots = placement.own_rows(self.sharding, (rows, state.slots))
    cached, tail = self._gather(state.cache, own, 1, context)
    tokens, starts = slots.token[:, None], slots.length
    hidden, tail = self._extend(params, tokens, cached, starts, tail, 0)
    tail = self._all_entries(tail, S)
    # A slot that does not decode writes at its own length, which is never read.
    cache = kv_cache.append(state.cache, tail, rows, jnp.int32(S), state.slots.length)
    slots, token, logprob, count, _ = self._sample(params, hidden[:, 0], slots)
    slots, token, logprob, count = placement.all_rows(
      self.sharding, (slots, token, logprob, count), S
    )
    result = ResultTokens(
      jnp.stack([token, count, slots.sampled], axis=1), logprob[:, None]
    )
    return DecodeState(cache, slots), result


def _scatter(into: Slots, rows_of: Slots, rows, num_rows) -> Slots:
  """Writes rows_of's first num_rows entries to `rows` of `into`."""
  size = into.length.shape[0]
  target = jnp.where(jnp.arange(rows.shape[0]) < num_rows, rows, size)
  return jax.tree.map(lambda x, y: x.at[target].set(y, mode='drop'), into, rows_of)
