"""Arguments and results of the engine's functions: slots, prefixes, sampled tokens.

Axes: S slots, P rows of a call, N decode steps of a call, M stop ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from m2jax.rollout.engine.config import EngineConfig

RUNNING, STOP, LENGTH = 0, 1, 2  # values of Sampled.finish_code
NO_TOKEN = np.iinfo(np.int32).max
NO_DRAFT = -1


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
    temperature, min_p, top_p, presence_penalty, frequency_penalty,
      repetition_penalty: float32. top_k: int32. See SamplingParams.
    prompt: int32, tokens of the prompt: those after it are the response's.
    top: int32, most likely tokens that are asked for.
    stop_ids: [S, M] int32, padded with -1.
    drafts: [S, mtp] int32, of the tokens after the last one; -1 where there is none.
      The modules have consumed the last token if and only if there is a first draft.
    bias_ids: [S, b] int32, padded with the largest int32. bias: [S, b] float32.
  """

  length: jax.Array
  token: jax.Array
  remaining: jax.Array
  sampled: jax.Array
  confident: jax.Array
  seed: jax.Array
  temperature: jax.Array
  min_p: jax.Array
  top_p: jax.Array
  top_k: jax.Array
  presence_penalty: jax.Array
  frequency_penalty: jax.Array
  repetition_penalty: jax.Array
  prompt: jax.Array
  top: jax.Array
  stop_ids: jax.Array
  drafts: jax.Array
  bias_ids: jax.Array
  bias: jax.Array


def make_slots(rows: int, config: EngineConfig) -> Slots:
  """Host-side (numpy) Slots that do not decode, to be filled in and admitted."""
  int32 = lambda *shape, value=0: np.full((rows, *shape), value, np.int32)
  float32 = lambda value=0.0: np.full(rows, value, np.float32)
  return Slots(
    length=int32(),
    token=int32(),
    remaining=int32(),
    sampled=int32(),
    confident=int32(),
    seed=np.zeros((rows, 2), np.uint32),
    temperature=float32(1),
    min_p=float32(),
    top_p=float32(1),
    top_k=int32(),
    presence_penalty=float32(),
    frequency_penalty=float32(),
    repetition_penalty=float32(1),
    prompt=int32(),
    top=int32(),
    stop_ids=int32(config.max_stop_ids, value=-1),
    drafts=int32(config.draft_tokens, value=NO_DRAFT),
    bias_ids=int32(config.max_logit_bias, value=NO_TOKEN),
    bias=np.zeros((rows, config.max_logit_bias), np.float32),
  )


@_pytree()
class DecodeState:
  """The pages, and the decoding state of all slots. Every call donates it."""

  pages: Any
  slots: Slots


@_pytree()
class Prefix:
  """A prefilled sequence: pages in order, its number of entries, the last token.

  The first page is unused (see pages.py).
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
    top_ids, top_logprobs: [P, N, top] int32 and float32, the most likely tokens; not
      set if no row asks for them.
  """

  tokens: jax.Array
  logprobs: jax.Array
  counts: jax.Array
  finish_code: jax.Array
  top_ids: jax.Array
  top_logprobs: jax.Array


@_pytree()
class Drafted:
  """Results of the drafts of `speculative.generate_many`; K drafts per token.

  Attributes:
    verified: [P] int32, verifications by the main model.
    tested: [P, K] int32, drafts that were compared: those before them were accepted.
    accepted: [P, K] int32, drafts that matched the main model's token.
    finite: [P] bool, whether the modules' logits were finite.
  """

  verified: jax.Array
  tested: jax.Array
  accepted: jax.Array
  finite: jax.Array


@_pytree('tokens_idx', 'valid_idx', 'length_idx', 'samples_per_slot')
class ResultTokens:
  """JetStream's ResultTokens, with log-probabilities added.

  `data` [S, 3] int32 has the columns token, valid, length; `log_prob` is [S, 1].
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
