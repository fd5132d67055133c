"""A request in the scheduler: its prompt, the tokens sampled so far, and its state."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable

import numpy as np

from m2jax.rollout.api import GenerateRequest, GenerateResult, Matcher, NewTokens
from m2jax.rollout.engine.decode_state import Slots
from m2jax.rollout.engine.engine import Engine

# Fields of SamplingParams that Slots has under the same name.
_COPIED = ('temperature', 'min_p', 'top_p')
_COPIED += ('presence_penalty', 'frequency_penalty', 'repetition_penalty')


@dataclasses.dataclass(eq=False)
class Job:
  """A request in progress; slot is -1 while it waits.

  Attributes:
    tokens: the prompt, and what was drawn before the sequence was retracted.
    logprobs, versions: one per token drawn.
    experts: ids recorded before it was retracted, of its first tokens; or None.
    top: the most likely ids and their log-probabilities, one entry per decode call, if
      the request asks for them.
    cached_tokens: tokens of the prompt that were cached when it was first placed.
    matcher: the response's position in the request's grammar, if it has one. It has
      taken all drawn tokens, also while the sequence is retracted.
  """

  prompt: np.ndarray
  request: GenerateRequest
  seed: int
  on_tokens: Callable[[NewTokens], None] | None
  future: concurrent.futures.Future
  slot: int = -1
  tokens: np.ndarray = dataclasses.field(init=False)
  logprobs: np.ndarray = dataclasses.field(init=False)
  versions: np.ndarray = dataclasses.field(init=False)
  experts: np.ndarray | None = None
  cached_tokens: int = 0
  top: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
  matcher: Matcher | None = dataclasses.field(init=False, default=None)

  def __post_init__(self):
    self.tokens = self.prompt
    self.logprobs = np.zeros(0, np.float32)
    self.versions = np.zeros(0, np.int64)
    if self.request and self.request.grammar is not None:
      self.matcher = self.request.grammar.start()

  def fill(self, slots: Slots, row: int, engine: Engine) -> None:
    """Sets a row to how the request draws its next token."""
    config, sampling = engine.config, self.request.sampling
    n, drawn = len(self.tokens), len(self.logprobs)
    slots.length[row], slots.token[row] = n - 1, self.tokens[-1]
    slots.remaining[row] = min(sampling.max_tokens - drawn, config.context_tokens - n)
    slots.sampled[row], slots.prompt[row] = drawn, len(self.prompt)
    slots.confident[row] = _confident(self.logprobs, config.confident_probability)
    slots.seed[row] = (self.seed >> 32) & 0xFFFFFFFF, self.seed & 0xFFFFFFFF
    for field in _COPIED:
      getattr(slots, field)[row] = getattr(sampling, field)
    slots.top_k[row] = min(sampling.top_k, engine.cfg.vocab_size)
    slots.top[row] = sampling.top_logprobs
    slots.stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
    for i, (token, bias) in enumerate(sampling.logit_bias):
      slots.bias_ids[row, i], slots.bias[row, i] = token, bias

  def result(self, reason: str, experts: np.ndarray | None) -> GenerateResult:
    """What was drawn, with GenerateResult's finish_reason and experts."""
    top_ids, top_logprobs = self.likeliest()
    return GenerateResult(
      tokens=self.tokens[len(self.prompt) :],
      logprobs=self.logprobs,
      versions=self.versions,
      finish_reason=reason,
      experts=experts,
      top_ids=top_ids,
      top_logprobs=top_logprobs,
      cached_tokens=self.cached_tokens,
    )

  def likeliest(self) -> tuple[np.ndarray | None, np.ndarray | None]:
    """GenerateResult's top_ids and top_logprobs."""
    count = self.request.sampling.top_logprobs
    if not count:
      return None, None
    none = np.zeros((0, count), np.int32), np.zeros((0, count), np.float32)
    ids, logprobs = zip(none, *self.top, strict=True)
    return np.concatenate(ids), np.concatenate(logprobs)


def _confident(logprobs: np.ndarray, probability: float) -> int:
  """Number of the last tokens that all are likelier than `probability`."""
  unsure = np.flatnonzero(~(logprobs > np.log(probability)))
  return len(logprobs) - (int(unsure[-1]) + 1 if unsure.size else 0)
