"""What the host knows of the engine's slots: what lies where, and where to put more.

A slot is idle, prefilling or decoding. An idle slot keeps the sequence that ended there
('parked'): a request whose prompt shares a prefix with it takes the slot over, or
copies the prefix, and prefills the rest only. All bookkeeping is in numpy arrays, so
that a decode call costs the host a few vector operations whatever the number of rows.

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
    source: the slot its prefix is copied from; `slot` when it lies there already.
    hit_tokens: prefix positions whose K/V need not be computed.
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
    held: [S] positions whose K/V is in the cache; tokens[:held] are known.
    target: [S] positions that prefill has to reach.
    kv_version: [S] oldest policy version among the slot's K/V.
    used: [S] when the slot was last of use, for least-recently-used eviction.
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
    """Chooses a slot for a prompt [n], or None: wait for a prefix now being computed.

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
    # A parked sequence that the prompt extends to its end loses nothing to it.
    continued = idle[(ready[idle] == hit) & (self.held[idle] == hit)]
    if hit and continued.size:
      return Placement(int(continued[0]), int(continued[0]), hit)
    oldest = int(idle[np.argmin(self.used[idle])])
    if hit < self._min_copy_tokens:
      return Placement(oldest, oldest, int(ready[oldest]))
    if self.state[source] == State.IDLE:  # of the others, `used` is when they began
      self._touch(source)
    return Placement(oldest, source, hit)

  def take(self, placement: Placement, prompt: np.ndarray, version: int) -> None:
    """Gives the slot to a prompt whose prefix is, or is about to be, in its cache."""
    slot, hit = placement.slot, placement.hit_tokens
    oldest = min(int(self.kv_version[placement.source]), version) if hit else version
    self.kv_version[slot] = oldest
    self.tokens[slot, : len(prompt)] = prompt
    self.held[slot] = hit
    self.target[slot] = len(prompt) - 1
    self.state[slot] = State.PREFILL
    self._touch(slot)

  def park(self, slot: int) -> None:
    """The slot's request ended; its held prefix stays for others."""
    self.state[slot] = State.IDLE
    self._touch(slot)

  def drop(self, slot: int) -> None:
    """The slot's request failed; what it holds is not to be trusted."""
    self.state[slot] = State.IDLE
    self.held[slot] = 0
    self.used[slot] = 0

  def append(self, rows, counts, tokens, logprobs, version: int) -> None:
    """Records what a decode call drew: counts[p] tokens of row p at its sequence's end.

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
    """[S] leading tokens that each slot shares with the prompt, its last one apart."""
    n = len(prompt) - 1
    if not n:
      return np.zeros(len(self.held), np.int32)
    differs = self.tokens[:, :n] != prompt[:n]
    return np.where(differs.any(axis=1), differs.argmax(axis=1), n)

  def _touch(self, slot: int) -> None:
    self._clock += 1
    self.used[slot] = self._clock
