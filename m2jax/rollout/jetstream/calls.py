"""The engine with the calls of JetStream's Engine API, 0.2.2: one request or one step.

So a JetStream driver can run it (`adapter` has the types). The calls need a page for
every position of every slot, the default of EngineConfig.pages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from m2jax.rollout.engine.calls import Calls
from m2jax.rollout.engine.decode_state import (
  DecodeState,
  Prefix,
  ResultTokens,
  make_slots,
)
from m2jax.rollout.engine.engine import Engine, Specs


class EngineApi(Engine):
  """An `Engine` that prefills a request, inserts it into a slot, and draws by step."""

  def _make_calls(self, calls: Calls, specs: Specs) -> None:
    super()._make_calls(calls, specs)
    weights, state, prefix = specs.weights, specs.state, specs.prefix
    all_ = PartitionSpec()
    self._prefix = prefix
    self._jit_insert = self._jit(
      calls.insert, (prefix, state, all_, all_), state, donate=1
    )
    self._jit_prefill = self._jit(calls.prefill, (weights, prefix, all_, all_), prefix)
    self._new_prefix = jax.jit(self._empty_prefix, out_shardings=self._named(prefix))

  def _empty_prefix(self) -> Prefix:
    pages = self._empty_pages(1 + self.config.context_pages)
    return Prefix(pages, jnp.int32(-1), jnp.int32(0))

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
      slots = make_slots(1, self.config)
      slots.seed[0] = (0, slot)
    self._check_own_pages()
    return self._jit_insert(prefix, decode_state, np.int32(slot), slots)

  def generate(
    self, params, decode_state: DecodeState
  ) -> tuple[DecodeState, ResultTokens]:
    """One step of every slot. A slot that does not decode has valid = 0."""
    self._check_own_pages()
    return self.generate_step(params, decode_state)

  def get_prefix_destination_sharding(self) -> jax.sharding.Sharding:
    """Sharding of a prefix's arrays; on a mesh a tree like `Prefix`."""
    if self.sharding.mesh is None:
      return self._named(PartitionSpec())
    return self._named(self._prefix)

  @property
  def max_concurrent_decodes(self) -> int:
    return self.groups * self.config.slots

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

  def _check_own_pages(self) -> None:
    config = self.config
    need = 1 + config.slots * config.context_pages
    if config.pages < need:
      raise ValueError(
        f"EngineConfig.pages={config.pages}: JetStream's calls need {need}, a page "
        'for every position of every slot'
      )
