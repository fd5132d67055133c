"""Arguments and results of the engine's functions: slots, prefixes, sampled tokens.

Axes: S slots, P rows of a call, N decode steps of a call, M stop ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

RUNNING, STOP, LENGTH = 0, 1, 2  # values of Sampled.finish_code


def _pytree(*meta: str):
  def register(cls):
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = [f.name for f in dataclasses.fields(cls)]
    data = [f for f in fields if f not in meta]
    jax.tree_util.register_dataclass(cls, data, list(meta))
    return cls

  return register


@_pytree()
class Slots:
  """Decoding state of S slots (or of P rows); each field is [S] unless noted.

  Attributes:
    length: int32, cached K/V entries: the sequence without its last token.
    token: int32, the last token, not yet consumed.
    remaining: int32, response tokens still allowed; 0 if the slot does not decode.
    sampled: int32, response tokens so far, the index into the slot's random stream.
    confident: int32, number of consecutive latest tokens with probability near 1.
    seed: [S, 2] uint32, the random stream.
    temperature, top_p: float32. top_k: int32. See SamplingParams.
    stop_ids: [S, M] int32, padded with -1.
  """

  length: jax.Array
  token: jax.Array
  remaining: jax.Array
  sampled: jax.Array
  confident: jax.Array
  seed: jax.Array
  temperature: jax.Array
  top_p: jax.Array
  top_k: jax.Array
  stop_ids: jax.Array


def make_slots(rows: int, max_stop_ids: int) -> Slots:
  """Host-side (numpy) Slots that do not decode, to be filled in and admitted."""
  ints = {
    f: np.zeros(rows, np.int32)
    for f in ('length', 'token', 'remaining', 'sampled', 'confident', 'top_k')
  }
  return Slots(
    **ints,
    seed=np.zeros((rows, 2), np.uint32),
    temperature=np.ones(rows, np.float32),
    top_p=np.ones(rows, np.float32),
    stop_ids=np.full((rows, max_stop_ids), -1, np.int32),
  )


@_pytree()
class DecodeState:
  """The pages, and the decoding state of all slots. Every call donates it."""

  pages: Any
  slots: Slots


@_pytree()
class Prefix:
  """A prefilled sequence: pages in order, its number of entries, the last token.

  The first page is unused (see rollout/pages.py).
  """

  pages: Any
  length: jax.Array
  token: jax.Array


@_pytree()
class Sampled:
  """Result of `generate_many`; the first counts[p] entries of row p are valid.

  Attributes:
    tokens: [P, N] int32.
    logprobs: [P, N] float32, of the distribution drawn from (greedy: temperature 1).
    counts: [P] int32.
    finish_code: [P] int32: RUNNING, STOP (a stop id) or LENGTH (max tokens, context, or
      the run of confident tokens).
  """

  tokens: jax.Array
  logprobs: jax.Array
  counts: jax.Array
  finish_code: jax.Array


@_pytree('tokens_idx', 'valid_idx', 'length_idx', 'samples_per_slot')
class ResultTokens:
  """JetStream's ResultTokens, with log-probabilities added.

  `data` [S, 3] int32 holds the columns token, valid, length; `log_prob` is [S, 1].
  """

  data: jax.Array
  log_prob: jax.Array
  tokens_idx: tuple[int, int] = (0, 1)
  valid_idx: tuple[int, int] = (1, 2)
  length_idx: tuple[int, int] = (2, 3)
  samples_per_slot: int = 1

  def copy_to_host_async(self) -> None:
    for x in (self.data, self.log_prob):
      if not isinstance(x, np.ndarray):
        x.copy_to_host_async()

  def convert_to_numpy(self) -> ResultTokens:
    return dataclasses.replace(
      self, data=np.array(self.data), log_prob=np.array(self.log_prob)
    )

  def get_result_at_slot(self, slot: int) -> SlotData:
    row = self.data[slot : slot + 1]
    return SlotData(
      tokens=row[:, slice(*self.tokens_idx)],
      valid=row[:, slice(*self.valid_idx)],
      lengths=row[:, self.length_idx[0]],
      log_prob=self.log_prob[slot : slot + 1],
    )


@_pytree()
class SlotData:
  """One slot's part of ResultTokens: [1, 1] each, lengths [1]."""

  tokens: jax.Array
  valid: jax.Array
  lengths: jax.Array
  log_prob: jax.Array
