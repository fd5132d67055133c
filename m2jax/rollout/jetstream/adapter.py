"""Runs the engine in google-jetstream 0.2.2 (extra `jetstream`).

JetStream's driver requires subclasses of its abstract types and calls `jax.tree_map`,
which JAX has since removed (facts/jax-anchors.md §0.3, §3.2). This module imports
JetStream, and with it TensorFlow: nothing else in the project imports this module.
"""

from __future__ import annotations

from typing import Any

import jax
from jetstream.engine import engine_api

from m2jax.rollout.engine.decode_state import ResultTokens
from m2jax.rollout.jetstream.calls import EngineApi

if not hasattr(jax, 'tree_map'):
  jax.tree_map = jax.tree.map
engine_api.ResultTokens.register(ResultTokens)


class JetStreamEngine(engine_api.Engine):
  """The engine as JetStream's type, with the weights and the tokenizer that it needs.

  Args:
    variables: weights, returned by `load_params`.
    tokenizer: an object of JetStream's tokenizer_api.Tokenizer.
  """

  def __init__(self, engine: EngineApi, variables: Any, tokenizer: Any):
    self._engine = engine
    self._variables = variables
    self._tokenizer = tokenizer

  def load_params(self, *args, **kwargs):
    del args, kwargs
    return self._engine.load_params(self._variables)

  def get_tokenizer(self):
    return None

  def build_tokenizer(self, metadata):
    del metadata
    return self._tokenizer

  def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length):
    return self._engine.prefill(
      params,
      existing_prefix=existing_prefix,
      padded_tokens=padded_tokens,
      true_length=true_length,
    )

  def insert(self, prefix, decode_state, slot):
    return self._engine.insert(prefix, decode_state, slot)

  def generate(self, params, decode_state):
    return self._engine.generate(params, decode_state)

  def init_decode_state(self, *args, **kwargs):
    del args, kwargs
    return self._engine.init_decode_state()

  def get_prefix_destination_sharding(self):
    return self._engine.get_prefix_destination_sharding()

  max_concurrent_decodes = property(lambda self: self._engine.max_concurrent_decodes)
  samples_per_slot = property(lambda self: self._engine.samples_per_slot)
  max_prefill_length = property(lambda self: self._engine.max_prefill_length)
  mesh = property(lambda self: self._engine.mesh)
  colocated_cpus = property(lambda self: self._engine.colocated_cpus)
