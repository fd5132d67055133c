"""An engine that takes time instead of computing, under the real `Batcher`.

Queue, page accounting, prefill plan, retraction and delivery are the engine's own
(`serving.batcher`, `serving.sequences`, `tiers.prefix_cache`); only the device calls
are replaced. Each costs the time of `Times`, and responses are those of the trace: a
request's seed is its number there.
"""

from __future__ import annotations

import dataclasses
import types

import numpy as np

from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.decode_state import LENGTH, RUNNING, Sampled
from m2jax.rollout.serving.batcher import Batcher
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.tiers.prefix_cache import PrefixCache


@dataclasses.dataclass(frozen=True)
class Times:
  """Seconds of an engine's work.

  Attributes:
    prefill_call_s: a prefill call's fixed time; prefill_token_s is added per token,
      padding included, prefill_position_s per position that a token attends to.
    decode_call_s: a decode call's fixed time; step_s is added per step, row_s per row
      of a step, position_s per position that a row reads.
  """

  prefill_call_s: float
  prefill_token_s: float
  prefill_position_s: float
  decode_call_s: float
  step_s: float
  row_s: float
  position_s: float

  def prefill(self, padded_tokens: int, positions: int) -> float:
    tokens = padded_tokens * self.prefill_token_s
    return self.prefill_call_s + tokens + positions * self.prefill_position_s

  def decode(self, steps: int, rows: int, positions: int) -> float:
    step = self.step_s + rows * self.row_s + positions * self.position_s
    return self.decode_call_s + steps * step


class SimulatedEngine:
  """`rollout.Engine` for a Batcher, of one group.

  Attributes:
    spent_s: time of its calls since the caller set it to 0.
    responses: [n] int32, by seed.
  """

  groups, keeps_contexts, waits_for_tokens = 1, False, True

  def __init__(self, config: EngineConfig, times: Times, vocabulary: int):
    self.config, self.times = config, times
    self.cfg = types.SimpleNamespace(
      vocab_size=vocabulary, num_layers=1, experts_per_token=1
    )
    self.spent_s = 0.0
    self.responses: dict[int, np.ndarray] = {}
    self._drawn = np.zeros(config.slots, np.int64)
    self._seed = [0] * config.slots

  def init_decode_state(self) -> None:
    return None

  def load_params(self, params):
    return params

  def prefill_rows(self, params, state, tokens, starts, counts, tables):
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    positions = int((counts * (2 * starts + counts + 1) // 2).sum())
    self.spent_s += self.times.prefill(tokens.size, positions)

  def admit(self, state, rows, num_rows, slots):
    for row, slot in enumerate(rows[: int(num_rows[0])].tolist()):
      high, low = slots.seed[row].tolist()
      self._seed[slot] = high << 32 | low
      self._drawn[slot] = slots.sampled[row]

  def generate_many(self, params, state, rows, num_rows, tables, steps):
    P, N, live = len(rows), int(steps), int(num_rows[0])
    tokens, counts = np.zeros((P, N), np.int32), np.zeros(P, np.int32)
    finish = np.full(P, RUNNING, np.int32)
    for row, slot in enumerate(rows[:live].tolist()):
      response, drawn = self.responses[self._seed[slot]], int(self._drawn[slot])
      new = response[drawn : drawn + N]
      tokens[row, : len(new)], counts[row] = new, len(new)
      self._drawn[slot] = drawn + len(new)
      if drawn + len(new) == len(response):
        finish[row] = LENGTH
    pages = tables.shape[1]
    read = int((tables[:live] != 0).sum()) if pages else 0
    positions = read * self.config.page_tokens
    self.spent_s += self.times.decode(int(counts.max()), P, positions)
    none = np.zeros((P, N, 0), np.float32)
    zeros = np.zeros((P, N), np.float32)
    return None, Sampled(tokens, zeros, counts, finish, none.astype(np.int32), none)

  def left(self, slot: int) -> int:
    """Tokens that a slot will still draw."""
    return len(self.responses[self._seed[slot]]) - int(self._drawn[slot])


class SharedCache(PrefixCache):
  """One unbounded cache for all replicas: what one computes, all have."""

  def __init__(self, pages: int, page_tokens: int, replicas: int):
    super().__init__(pages, page_tokens)
    self._replicas, self._clears = replicas, 0

  def clear(self) -> None:
    """Clears once per change of weights, when the first replica makes it."""
    if self._clears % self._replicas == 0:
      super().clear()
    self._clears += 1


def make_batcher(
  engine: SimulatedEngine,
  scheduler: SchedulerConfig,
  shared: SharedCache | None = None,
) -> Batcher:
  batcher = Batcher(engine, None, 0, scheduler)
  if shared is not None:
    batcher.table.caches = [shared]
  return batcher
