"""The rollout engine: decoding over slots, with the API of JetStream's Engine 0.2.2.

Two sets of calls over the same pure functions (facts/jax-anchors.md §3.2):

- JetStream's: `prefill`, `insert`, `generate`, one request or one step at a time, so
  that a JetStream driver can run the engine (`rollout.jetstream` adapts the types).
- The scheduler's: `prefill_rows` (a chunk of several prompts at once, in place),
  `copy_rows` (a shared prefix), `admit` (a slot starts decoding), `generate_many`
  (several steps in one call; stop tokens, lengths and early end on the device).

Prefill only fills the cache: it consumes all tokens of a prompt except the last, which
the first decode step consumes. Every sampled token therefore comes from one code path,
and a slot's prefix can be reused without logits. A position is written before it is
visible; entries at or beyond a slot's length are undefined, but finite and never read.

All shapes are buckets of EngineConfig: after `warmup` nothing compiles.

Axes: S slots, P rows of a call (a bucket; rows beyond num_rows are padding), C chunk
tokens, N decode steps of a call, M stop ids, V vocabulary, D model.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from m2jax.config import ModelConfig
from m2jax.layers import head
from m2jax.rollout import forward, kv_cache, sampling
from m2jax.rollout.decode_state import (
  LENGTH,
  RUNNING,
  STOP,
  DecodeState,
  Prefix,
  ResultTokens,
  Sampled,
  Slots,
  make_slots,
)
from m2jax.rollout.engine_config import EngineConfig


class Engine:
  """Prefill, insert and generate for one model; its only state is compiled functions.

  Weights are an argument of every call (`variables` of `model.M2(cfg)`), so they may
  change between any two calls; the state is an argument too and is donated.
  """

  def __init__(
    self,
    cfg: ModelConfig,
    config: EngineConfig,
    *,
    mesh: jax.sharding.Mesh | None = None,
  ):
    if config.context_tokens > cfg.max_positions:
      raise ValueError(
        f'EngineConfig.context_tokens={config.context_tokens} exceeds '
        f'ModelConfig.max_positions={cfg.max_positions}'
      )
    self.cfg = cfg
    self.config = config
    self._mesh = mesh or jax.sharding.Mesh(np.array(jax.devices()[:1]), ('data',))
    self._replicated = jax.sharding.NamedSharding(
      self._mesh, jax.sharding.PartitionSpec()
    )
    self._empty_tail = functools.partial(
      kv_cache.empty_tail,
      cfg,
      split=cfg.unroll_layers,
      record_experts=config.record_experts,
    )
    jit = functools.partial(jax.jit, donate_argnames='state')
    context = functools.partial(jit, static_argnames='context')
    self.prefill_rows = context(self._prefill_rows)
    self.copy_rows = context(self._copy_rows)
    self.generate_many = context(self._generate_many)
    self.admit = jit(self._admit)
    self.expert_ids = jax.jit(self._expert_ids, static_argnames='context')
    self._jit_generate = jit(self._generate_one)
    self._jit_insert = jit(self._insert)
    self._jit_prefill = jax.jit(self._prefill)

  def _init_cache(self, slots: int) -> kv_cache.KvCache:
    # Every decode call writes max_steps entries, even for rows that finish earlier.
    positions = self.config.context_tokens + self.config.max_steps
    config = self.config
    return kv_cache.init(
      self.cfg,
      slots,
      positions,
      config.cache_dtype,
      record_experts=config.record_experts,
    )

  def _extend(self, params, cache, rows, tokens, starts, *, context: int):
    """K/V entries, as a Tail, of tokens [P, C] at starts of slots rows [P]."""
    cached = kv_cache.gather(cache, rows, context, split=self.cfg.unroll_layers)
    tail = self._empty_tail(*tokens.shape)
    return forward.extend(self.cfg, params, tokens, cached, starts, tail, 0)[1]

  # --- Calls of the scheduler. Pure; __init__ jits each with `state` donated.

  def _prefill_rows(
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
    tail = self._extend(params, state.cache, rows, tokens, starts, context=context)
    cache = kv_cache.append(state.cache, tail, rows, num_rows, starts)
    return dataclasses.replace(state, cache=cache)

  def _copy_rows(
    self, state: DecodeState, sources, targets, num_rows, *, context: int
  ) -> DecodeState:
    """Copies the first `context` positions of slots sources [S] to targets [S]."""
    cache = kv_cache.copy(state.cache, sources, targets, num_rows, context)
    return dataclasses.replace(state, cache=cache)

  def _admit(self, state: DecodeState, rows, num_rows, slots: Slots) -> DecodeState:
    """Sets the decoding state of slots `rows` [S]; their cache must hold the prefix."""
    return dataclasses.replace(
      state, slots=_scatter(state.slots, slots, rows, num_rows)
    )

  def _generate_many(
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
    starts = slots.length
    cached = kv_cache.gather(state.cache, rows, context, split=self.cfg.unroll_layers)
    tail = self._empty_tail(P, N)
    sampled = Sampled(
      tokens=jnp.zeros((P, N), jnp.int32),
      logprobs=jnp.zeros((P, N), jnp.float32),
      counts=jnp.zeros(P, jnp.int32),
      finish_code=jnp.zeros(P, jnp.int32),
    )

    def unfinished(carry):
      step, _, slots, _ = carry
      return (step < steps) & jnp.any(slots.remaining > 0)

    def one(carry):
      step, tail, slots, sampled = carry
      hidden, tail = forward.extend(
        self.cfg, params, slots.token[:, None], cached, starts, tail, step
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
      return step + 1, tail, slots, sampled

    _, tail, slots, sampled = lax.while_loop(
      unfinished, one, (jnp.int32(0), tail, slots, sampled)
    )
    cache = kv_cache.append(state.cache, tail, rows, num_rows, starts)
    return DecodeState(cache, _scatter(state.slots, slots, rows, num_rows)), sampled

  def _expert_ids(self, state: DecodeState, slot, *, context: int) -> jax.Array:
    """Expert ids [context, L, top_k] int16 of a slot's first positions.

    Entries at or beyond the slot's length are undefined. Requires
    config.record_experts.
    """
    return state.cache.experts[:, slot, :context].swapaxes(0, 1)

  def _sample(self, params, hidden, slots: Slots):
    """Draws each row's next token from hidden [P, D]; finished rows do not change."""
    logits = head.logits(params['params'], hidden)
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

  # --- JetStream's Engine API, 0.2.2.

  def prefill(self, params, *, existing_prefix=None, padded_tokens, true_length):
    """K/V of a prompt, or of the tokens after an existing prefix (which stays valid).

    Args:
      padded_tokens: [n] int32, n at most max_prefill_length for no recompilation.
      true_length: number of tokens without padding, at least 1.
    """
    if existing_prefix is None:
      existing_prefix = Prefix(self._init_cache(1), jnp.int32(-1), jnp.int32(0))
    tokens = jnp.asarray(padded_tokens, jnp.int32)
    return self._jit_prefill(params, existing_prefix, tokens, jnp.int32(true_length))

  def _prefill(self, params, prefix: Prefix, tokens, true_length) -> Prefix:
    # The last token of an existing prefix is not consumed yet, so the chunk starts with
    # it. Without a prefix (length -1) the chunk is the tokens only, from position 0.
    fresh = prefix.length < 0
    lead = jnp.where(fresh, jnp.roll(tokens, -1), tokens)
    first = jnp.where(fresh, tokens[0], prefix.token)
    chunk = jnp.concatenate([first[None], lead])
    starts = jnp.maximum(prefix.length, 0)[None]
    row, context = jnp.zeros(1, jnp.int32), self.config.context_tokens
    tail = self._extend(params, prefix.cache, row, chunk[None], starts, context=context)
    # Padding may exceed the context: write into a longer copy, then crop it.
    longer = kv_cache.pad(prefix.cache, chunk.shape[0])
    longer = kv_cache.append(longer, tail, row, jnp.int32(1), starts)
    positions = context + self.config.max_steps
    return Prefix(
      cache=kv_cache.crop(longer, positions),
      length=prefix.length + true_length,
      token=tokens[true_length - 1],
    )

  def insert(
    self, prefix: Prefix, decode_state: DecodeState, slot: int, *, slots=None
  ) -> DecodeState:
    """Puts a prefix into a slot, which then decodes until its context is full.

    Args:
      slots: sampling of the request as Slots of one row (see make_slots). The prefix
        sets length and token; remaining = 0 means as much as the context allows. The
        default is temperature 1, no stop ids and a stream seeded by the slot.
    """
    if slots is None:
      slots = make_slots(1, self.config.max_stop_ids)
      slots.seed[0] = (0, slot)
    return self._jit_insert(prefix, decode_state, jnp.int32(slot), slots)

  def _insert(self, prefix: Prefix, state: DecodeState, slot, slots: Slots):
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

  def generate(
    self, params, decode_state: DecodeState
  ) -> tuple[DecodeState, ResultTokens]:
    """One step of every slot. A slot that does not decode has valid = 0."""
    return self._jit_generate(params, decode_state)

  def _generate_one(self, params, state: DecodeState):
    S, context = self.config.slots, self.config.context_tokens
    rows, slots = jnp.arange(S), state.slots
    cached = kv_cache.gather(state.cache, rows, context, split=self.cfg.unroll_layers)
    tail = self._empty_tail(S, 1)
    hidden, tail = forward.extend(
      self.cfg, params, slots.token[:, None], cached, slots.length, tail, 0
    )
    # A slot that does not decode writes at its own length, which is never read.
    cache = kv_cache.append(state.cache, tail, rows, jnp.int32(S), slots.length)
    slots, token, logprob, count, _ = self._sample(params, hidden[:, 0], slots)
    result = ResultTokens(
      jnp.stack([token, count, slots.sampled], axis=1), logprob[:, None]
    )
    return DecodeState(cache, slots), result

  def init_decode_state(self) -> DecodeState:
    """All slots empty."""
    config = self.config
    slots = make_slots(config.slots, config.max_stop_ids)
    cache = self._init_cache(config.slots)
    return jax.device_put(DecodeState(cache, slots), self._replicated)

  def load_params(self, params):
    """Places weights on the mesh; leaves those that are on it already.

    Programs are compiled for a placement: every set of weights must pass through here,
    or its first call compiles again.
    """

    def place(x):
      sharding = getattr(x, 'sharding', None)
      on_mesh = isinstance(sharding, jax.sharding.NamedSharding)
      if on_mesh and sharding.mesh == self._mesh:
        return x
      return jax.device_put(x, self._replicated)

    return jax.tree.map(place, params)

  def get_prefix_destination_sharding(self) -> jax.sharding.Sharding:
    return self._replicated

  @property
  def max_concurrent_decodes(self) -> int:
    return self.config.slots

  @property
  def samples_per_slot(self) -> int:
    return 1

  @property
  def max_prefill_length(self) -> int:
    """Longest prompt of one `prefill`: a power of two, like JetStream's buckets."""
    return 1 << (self.config.context_tokens.bit_length() - 1)

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return self._mesh

  @property
  def colocated_cpus(self) -> None:
    return None

  # --- Compilation.

  def warmup(self, params, state: DecodeState) -> DecodeState:
    """Compiles every shape that the scheduler uses; returns an equivalent state.

    All rows are padding, so that no visible entry changes.
    """
    config, none = self.config, np.int32(0)
    rows = lambda n: np.zeros(n, np.int32)
    for context in config.contexts:
      state = self.copy_rows(
        state, rows(config.slots), rows(config.slots), none, context=context
      )
      for n in config.decode_rows:
        state, _ = self.generate_many(
          params, state, rows(n), none, none, context=context
        )
      for n, chunk in config.prefill_shapes:
        tokens = np.zeros((n, chunk), np.int32)
        state = self.prefill_rows(
          params, state, rows(n), none, tokens, rows(n), context=context
        )
      if config.record_experts:
        self.expert_ids(state, none, context=context)
    empty = make_slots(config.slots, config.max_stop_ids)
    state = self.admit(state, rows(config.slots), none, empty)
    return jax.block_until_ready(state)

  def compilations(self) -> int:
    """Number of programs compiled so far for the scheduler's calls."""
    calls = (self.prefill_rows, self.copy_rows, self.generate_many, self.admit)
    return sum(call._cache_size() for call in (*calls, self.expert_ids))


def _scatter(into: Slots, rows_of: Slots, rows, num_rows) -> Slots:
  """Writes rows_of's first num_rows entries to `rows` of `into`."""
  size = into.length.shape[0]
  target = jnp.where(jnp.arange(rows.shape[0]) < num_rows, rows, size)
  return jax.tree.map(lambda x, y: x.at[target].set(y, mode='drop'), into, rows_of)
