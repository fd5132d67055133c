"""The rollout engine: decoding over slots, with the API of JetStream's Engine 0.2.2.

Two sets of calls over the same pure functions (facts/jax-anchors.md §3.2):

- JetStream's: `prefill`, `insert`, `generate`, one request or one step at a time, so
  that a JetStream driver can run the engine (`rollout.jetstream` adapts the types).
- The scheduler's: `prefill_rows` (a chunk of several prompts at once, in place),
  `copy_rows` (a shared prefix), `admit` (a slot starts decoding), `generate_many`
  (several steps in one call; stop tokens, lengths and early end on the device).

The functions are `rollout.calls`; on a mesh each runs as one `shard_map`, placed as
`rollout.placement` says. With several processes all make the same calls, in the same
order and with the same arguments.

Prefill only fills the cache: it consumes all tokens of a prompt except the last, which
the first decode step consumes. Every sampled token therefore comes from one code path,
and a slot's prefix can be reused without logits. A position is written before it is
visible; entries at or beyond a slot's length are undefined, but finite and never read.

All shapes are buckets of EngineConfig: after `warmup` nothing compiles.

Axes: S slots, P rows of a call (a bucket; rows beyond num_rows are padding), C chunk
tokens, N decode steps of a call, M stop ids, V vocabulary, D model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from m2jax import sharding as sharding_lib
from m2jax.config import ModelConfig
from m2jax.rollout import kv_cache, placement
from m2jax.rollout.calls import Calls
from m2jax.rollout.decode_state import DecodeState, Prefix, ResultTokens, make_slots
from m2jax.rollout.engine_config import EngineConfig
from m2jax.sharding import ONE_DEVICE, Sharding

_EVERYWHERE = PartitionSpec()


class Engine:
  """Prefill, insert and generate for one model; its only state is compiled functions.

  Weights are an argument of every call (`variables` of `model.M2(cfg)`), so they may
  change between any two calls; the state is an argument too and is donated.
  """

  def __init__(
    self, cfg: ModelConfig, config: EngineConfig, sharding: Sharding = ONE_DEVICE
  ):
    """Compiles nothing yet.

    Args:
      cfg: the model.
      config: sizes.
      sharding: the mesh; its rules are replaced by `placement.serving`'s.

    Raises:
      ValueError: the context is longer than the model's, or the model does not divide
        over the mesh; names the field.
    """
    if config.context_tokens > cfg.max_positions:
      raise ValueError(
        f'EngineConfig.context_tokens={config.context_tokens} exceeds '
        f'ModelConfig.max_positions={cfg.max_positions}'
      )
    self.cfg = cfg
    self.config = config
    self.sharding = placement.serving(cfg, sharding)
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('data',))
    self._mesh = self.sharding.mesh or one
    rules, records = self.sharding.rules, config.record_experts
    weights = _EVERYWHERE
    if self.sharding.mesh is not None:
      weights = sharding_lib.param_specs(cfg, rules)
    state = placement.state_specs(rules, record_experts=records)
    prefix = placement.prefix_specs(rules, record_experts=records)
    self._weights, self._prefix = weights, prefix
    calls, all_ = Calls(cfg, config, self.sharding), _EVERYWHERE
    self.prefill_rows = self._jit(
      calls.prefill_rows, (weights, state, *[all_] * 4), state, donate=1, context=True
    )
    self.copy_rows = self._jit(
      calls.copy_rows, (state, *[all_] * 3), state, donate=0, context=True
    )
    self.generate_many = self._jit(
      *(calls.generate_many, (weights, state, *[all_] * 3), (state, all_)),
      donate=1,
      context=True,
    )
    self.admit = self._jit(calls.admit, (state, *[all_] * 3), state, donate=0)
    self.expert_ids = self._jit(calls.expert_ids, (state, all_), all_, context=True)
    self._jit_generate = self._jit(
      calls.generate_one, (weights, state), (state, all_), donate=1
    )
    self._jit_insert = self._jit(
      calls.insert, (prefix, state, all_, all_), state, donate=1
    )
    self._jit_prefill = self._jit(calls.prefill, (weights, prefix, all_, all_), prefix)
    self._new_state = jax.jit(self._empty_state, out_shardings=self._named(state))
    self._new_prefix = jax.jit(self._empty_prefix, out_shardings=self._named(prefix))

  def _jit(
    self, f: Callable, arguments, results, *, donate=None, context: bool = False
  ):
    """A function of `Calls`, compiled for the specs of its arguments and results.

    Args:
      donate: position of the state.
      context: whether it has the static argument `context`.
    """

    def call(*args, **static):
      part = functools.partial(f, **static)
      return self.sharding.shard_map(part, arguments, results)(*args)

    call.__name__ = f.__name__
    return jax.jit(
      call,
      donate_argnums=donate,
      static_argnames=('context',) if context else (),
      out_shardings=self._named(results),  # else a second call may compile again
    )

  def _named(self, specs):
    return jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)

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

  def _empty_state(self) -> DecodeState:
    config = self.config
    slots = make_slots(config.slots, config.max_stop_ids)
    return DecodeState(self._init_cache(config.slots), jax.tree.map(jnp.asarray, slots))

  def _empty_prefix(self) -> Prefix:
    return Prefix(self._init_cache(1), jnp.int32(-1), jnp.int32(0))

  # --- JetStream's Engine API, 0.2.2.

  def prefill(self, params, *, existing_prefix=None, padded_tokens, true_length):
    """K/V of a prompt, or of the tokens after an existing prefix (which stays valid).

    Args:
      padded_tokens: [n] int32, n at most max_prefill_length for no recompilation.
      true_length: number of tokens without padding, at least 1.
    """
    if existing_prefix is None:
      existing_prefix = self._new_prefix()
    tokens = np.asarray(padded_tokens, np.int32)
    return self._jit_prefill(params, existing_prefix, tokens, np.int32(true_length))

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
    return self._jit_insert(prefix, decode_state, np.int32(slot), slots)

  def generate(
    self, params, decode_state: DecodeState
  ) -> tuple[DecodeState, ResultTokens]:
    """One step of every slot. A slot that does not decode has valid = 0."""
    return self._jit_generate(params, decode_state)

  def init_decode_state(self) -> DecodeState:
    """All slots empty."""
    return self._new_state()

  def load_params(self, params):
    """Places weights as the calls need them; leaves those that are so placed already.

    Arrays may be placed for another mesh of the same devices, or be of numpy. Programs
    are compiled for a placement: every set of weights must pass through here, or its
    first call compiles again. With several processes all must call it.
    """
    if self.sharding.mesh is not None:
      return self.sharding.place(params, self._weights)
    replicated = self._named(_EVERYWHERE)
    return jax.tree.map(lambda x: jax.device_put(x, replicated), params)

  def get_prefix_destination_sharding(self) -> jax.sharding.Sharding:
    """Of a prefix's arrays; on a mesh a tree of them, which `Prefix` has."""
    if self.sharding.mesh is None:
      return self._named(_EVERYWHERE)
    return self._named(self._prefix)

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
