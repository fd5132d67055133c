"""The host's record of the engine's slots, and the placement of requests in them.

A slot is idle, prefilling or decoding. An idle slot keeps its last sequence ('parked'):
a request whose prompt shares a prefix with it takes over the slot, or copies the
prefix, and prefills only the rest. All records are numpy arrays, so that a decode call
costs the host a few vector operations, independent of the number of rows.

Axes: S slots, C context positions.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np


class State(enum.IntEnum):
  IDLE = 0
  PREFILL = 1
  DECODE = 2


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where a request goes.

  Attributes:
    slot: the slot it takes.
    source: the slot that its prefix is copied from; `slot` if it is there already.
    hit_tokens: prefix positions whose K/V are cached.
  """

  slot: int
  source: int
  hit_tokens: int


class SlotTable:
  """Host-side record of all slots.

  Attributes:
    state: [S] State.
    tokens: [S, C] int32, prompt and response.
    logprobs, versions: [S, C], of response tokens.
    held: [S] positions whose K/V are in the cache; tokens[:held] are valid.
    target: [S] positions that prefill has to reach.
    kv_version: [S] oldest policy version among the slot's K/V.
    used: [S] when the slot was last used, for least-recently-used eviction.
  """

  def __init__(self, slots: int, context_tokens: int, *, min_copy_tokens: int):
    self.state = np.full(slots, State.IDLE, np.int8)
    self.tokens = np.zeros((slots, context_tokens), np.int32)
    self.logprobs = np.zeros((slots, context_tokens), np.float32)
    self.versions = np.zeros((slots, context_tokens), np.int64)
    self.held = np.zeros(slots, np.int32)
    self.target = np.zeros(slots, np.int32)
    self.kv_version = np.zeros(slots, np.int64)
    self.used = np.zeros(slots, np.int64)
    self._min_copy_tokens = min_copy_tokens
    self._clock = 0

  def where(self, state: State) -> np.ndarray:
    return np.flatnonzero(self.state == state)

  def place(self, prompt: np.ndarray, usable: np.ndarray) -> Placement | None:
    """Chooses a slot for a prompt [n]; None to wait for a prefix being computed.

    There must be an idle slot. The last prompt token is never part of a hit: decoding
    starts by consuming it.

    Args:
      usable: [S] bool, slots whose K/V may be reused.
    """
    shared = self._shared_prefix(prompt) * usable
    ready = np.minimum(shared, self.held)
    source = int(np.argmax(ready))
    hit = int(ready[source])
    coming = np.minimum(shared, self.target) * (self.state == State.PREFILL)
    if coming.max() >= hit + self._min_copy_tokens:
      return None

    idle = self.where(State.IDLE)
    # Taking over a parked sequence that the prompt extends loses nothing.
    continued = idle[(ready[idle] == hit) & (self.held[idle] == hit)]
    if hit and continued.size:
      return Placement(int(continued[0]), int(continued[0]), hit)
    oldest = int(idle[np.argmin(self.used[idle])])
    if hit < self._min_copy_tokens:
      return Placement(oldest, oldest, int(ready[oldest]))
    if (
      self.state[source] == State.IDLE
    ):  # for other states, `used` is when they started
      self._touch(source)
    return Placement(oldest, source, hit)

  def take(self, placement: Placement, prompt: np.ndarray, version: int) -> None:
    """Assigns the slot to a prompt whose prefix is, or is about to be, in its cache."""
    slot, hit = placement.slot, placement.hit_tokens
    oldest = min(int(self.kv_version[placement.source]), version) if hit else version
    self.kv_version[slot] = oldest
    self.tokens[slot, : len(prompt)] = prompt
    self.held[slot] = hit
    self.target[slot] = len(prompt) - 1
    self.state[slot] = State.PREFILL
    self._touch(slot)

  def park(self, slot: int) -> None:
    """Frees the slot of a finished request; its prefix stays available."""
    self.state[slot] = State.IDLE
    self._touch(slot)

  def drop(self, slot: int) -> None:
    """Frees the slot of a failed request; its cache is not reused."""
    self.state[slot] = State.IDLE
    self.held[slot] = 0
    self.used[slot] = 0

  def append(self, rows, counts, tokens, logprobs, version: int) -> None:
    """Appends the tokens of a decode call, counts[p] for row p.

    Args:
      rows: [P] slots. counts: [P]. tokens, logprobs: [P, N].
    """
    step = np.arange(tokens.shape[1])
    drawn = step < counts[:, None]
    row = np.broadcast_to(rows[:, None], drawn.shape)[drawn]
    position = (self.held[rows][:, None] + 1 + step)[drawn]
    self.tokens[row, position] = tokens[drawn]
    self.logprobs[row, position] = logprobs[drawn]
    self.versions[row, position] = version
    self.held[rows] += counts

  def _shared_prefix(self, prompt: np.ndarray) -> np.ndarray:
    """[S] leading tokens that each slot shares with prompt[:-1]."""
    n = len(prompt) - 1
    if not n:
      return np.zeros(len(self.held), np.int32)
    differs = self.tokens[:, :n] != prompt[:n]
    return np.where(differs.any(axis=1), differs.argmax(axis=1), n)

  def _touch(self, slot: int) -> None:
    self._clock += 1
    self.used[slot] = self._clock
