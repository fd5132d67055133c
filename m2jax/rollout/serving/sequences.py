"""The host's record of the sequences in the engine's slots.

Numpy arrays over slots, so that a decode call costs the host a few vector operations,
independent of the number of rows. A slot is idle, prefilling or decoding; its first
pages may be shared with other sequences (`tiers.prefix_cache`), the others are its own.

Axes: S slots of all groups, C context positions, n pages of a sequence.
"""

from __future__ import annotations

import enum

import numpy as np

from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.pages import UNUSED
from m2jax.rollout.tiers.page_journal import PageJournal
from m2jax.rollout.tiers.prefix_cache import Node, PrefixCache

# A call takes as long as its fullest group: what one sequence more costs the others,
# in tokens of prefill. The order of magnitude matters.
ROW_TOKENS = 64
# Decode calls for which a sequence that has ended is expected to go on: an agent's next
# turn. Others must not take its place in the group meanwhile.
EXPECTED_CALLS = 32


class State(enum.IntEnum):
  IDLE = 0
  PREFILL = 1
  DECODE = 2


class Sequences:
  """The sequences of all slots and the pages of their groups.

  Attributes:
    state: [S] State.
    tokens: [S, C] int32, prompt and response.
    logprobs, versions: [S, C], of response tokens.
    held: [S] positions whose K/V are stored.
    target: [S] positions that prefill has to reach.
    version: [S] policy version when the sequence got the slot, the oldest of the K/V
      in its own pages.
    started: [S] when the sequence got the slot; a count.
    tables: [S, n] int32, pages; UNUSED where none is needed yet.
    caches: the pages of each group.
  """

  def __init__(
    self, config: EngineConfig, groups: int, journal: PageJournal | None = None
  ):
    slots, context = config.slots * groups, config.context_tokens
    self.group_slots = config.slots
    self.page_tokens, self._table_sizes = config.page_tokens, config.table_sizes
    self.state = np.full(slots, State.IDLE, np.int8)
    self.tokens = np.zeros((slots, context), np.int32)
    self.logprobs = np.zeros((slots, context), np.float32)
    self.versions = np.zeros((slots, context), np.int64)
    self.held = np.zeros(slots, np.int32)
    self.target = np.zeros(slots, np.int32)
    self.version = np.zeros(slots, np.int64)
    self.started = np.zeros(slots, np.int64)
    self.tables = np.full((slots, config.context_pages), UNUSED, np.int32)
    self.caches = [
      PrefixCache(config.pages, config.page_tokens, journal) for _ in range(groups)
    ]
    self._shared: list[list[Node]] = [[] for _ in range(slots)]
    self._count = np.zeros(slots, np.int32)  # pages in tables
    self._clock = 0
    # Last pages of sequences that may go on, and the call until which; oldest first.
    self._expected: list[dict[Node, int]] = [{} for _ in range(groups)]
    self._calls = 0

  def where(self, state: State) -> np.ndarray:
    return np.flatnonzero(self.state == state)

  def group(self, slot):
    """Group of a slot, or of each slot of an array."""
    return slot // self.group_slots

  def count_rows(self, slots: np.ndarray) -> np.ndarray:
    """Number of `slots` to decode in each group, [g]."""
    self._calls += 1
    for expected in self._expected:
      while expected and next(iter(expected.values())) < self._calls:
        del expected[next(iter(expected))]
    return np.bincount(self.group(slots), minlength=len(self.caches))

  def youngest(self, group: int) -> int:
    """The slot of a group whose sequence started last."""
    first = group * self.group_slots
    slots = np.arange(first, first + self.group_slots)
    busy = slots[self.state[slots] != State.IDLE]
    return int(busy[np.argmax(self.started[busy])])

  def cache(self, slot: int) -> PrefixCache:
    return self.caches[self.group(slot)]

  def shared(self, slot: int) -> list[Node]:
    """The nodes of the slot's first pages, as far as others know them."""
    return self._shared[slot]

  def place(self, tokens: np.ndarray, ahead: int) -> tuple[int, int] | str:
    """Chooses a slot for tokens [n]: (slot, tokens whose K/V are stored).

    There must be pages for the tokens and for `ahead` more.

    The last token is never part of a hit: decoding starts by consuming it. Prefers the
    group with the longest prefix, stored or being computed, less ROW_TOKENS for each
    sequence that it would have, ended ones that may continue included; then the one
    with most pages to give.

    Returns:
      Instead 'full' if no group has a slot and room for the tokens, and 'soon' if
      another sequence of the group is computing a longer prefix of the tokens.
    """
    prefix = tokens[:-1]
    choices = []
    for group, cache in enumerate(self.caches):
      first = group * self.group_slots
      states = self.state[first : first + self.group_slots]
      free = np.flatnonzero(states == State.IDLE)
      nodes = cache.match(prefix)
      taken = sum(node.users == 0 for node in nodes)
      most = min(len(tokens) + ahead, self.tokens.shape[1])
      need = self._pages_of(most) - len(nodes)
      if free.size and need <= cache.available - taken:
        hit, busy = len(nodes) * self.page_tokens, self.group_slots - free.size
        expected = self._expected[group]
        goes_on = any(node in expected for node in nodes)
        rows = busy + len(expected) + (not goes_on)
        coming = self._coming(prefix, group)
        score = max(hit, coming) - ROW_TOKENS * rows
        choices.append((score, cache.available, first + int(free[0]), hit, coming))
    if not choices:
      return 'full'
    _, _, slot, hit, coming = max(choices)
    return 'soon' if coming > hit else (slot, hit)

  def take(self, slot: int, tokens: np.ndarray, version: int) -> int:
    """Gives a slot, as `place` chose it, to a sequence; returns its stored tokens."""
    cache = self.cache(slot)
    nodes = cache.match(tokens[:-1])
    for node in nodes:
      self._expected[self.group(slot)].pop(node, None)
    cache.hold(nodes)
    self._shared[slot] = nodes
    self.tables[slot] = UNUSED
    self.tables[slot, : len(nodes)] = [node.page for node in nodes]
    self._count[slot] = len(nodes)
    self.tokens[slot, : len(tokens)] = tokens
    self.held[slot] = len(nodes) * self.page_tokens
    self.target[slot] = len(tokens) - 1
    self.version[slot] = version
    self.state[slot] = State.PREFILL
    self._clock += 1
    self.started[slot] = self._clock
    if not self.reserve(slot, len(tokens)):
      raise RuntimeError(f'slot {slot} was placed without room for its pages')
    return int(self.held[slot])

  def reserve(self, slot: int, positions: int) -> bool:
    """Adds pages for this many positions; False, and none, if there are too few."""
    have, need = int(self._count[slot]), self._pages_of(positions)
    if need <= have:
      return True
    pages = self.cache(slot).allocate(need - have)
    if pages is None:
      return False
    self.tables[slot, have:need] = pages
    self._count[slot] = need
    return True

  def append(self, slots, counts, tokens, logprobs, version: int) -> None:
    """Appends the tokens of a decode call, counts[p] for row p.

    Args:
      slots: [P]. counts: [P]. tokens, logprobs: [P, N].
    """
    step = np.arange(tokens.shape[1])
    drawn = step < counts[:, None]
    row = np.broadcast_to(slots[:, None], drawn.shape)[drawn]
    position = (self.held[slots][:, None] + 1 + step)[drawn]
    self.tokens[row, position] = tokens[drawn]
    self.logprobs[row, position] = logprobs[drawn]
    self.versions[row, position] = version
    self.held[slots] += counts

  def share(self, slot: int) -> None:
    """Makes the slot's full pages known to later sequences."""
    shared = self._shared[slot]
    for index in range(len(shared), int(self.held[slot]) // self.page_tokens):
      start = index * self.page_tokens
      tokens = self.tokens[slot, start : start + self.page_tokens]
      page = int(self.tables[slot, index])
      node = self.cache(slot).insert(shared, tokens, page, self.version[slot])
      if node is None:
        return
      shared.append(node)
      self.tables[slot, index] = node.page

  def leave(self, slot: int) -> None:
    """Frees the slot; known pages stay cached, the sequence's own are free."""
    shared, cache = self._shared[slot], self.cache(slot)
    if shared:
      expected = self._expected[self.group(slot)]
      expected.pop(shared[-1], None)  # to the end
      expected[shared[-1]] = self._calls + EXPECTED_CALLS
    cache.free(self.tables[slot, len(shared) : self._count[slot]].tolist())
    cache.release(shared)
    self._shared[slot], self._count[slot] = [], 0
    self.tables[slot] = UNUSED
    self.state[slot] = State.IDLE

  def page_tables(self, slots: np.ndarray, positions: int) -> np.ndarray:
    """Page tables of the smallest compiled size that covers the positions."""
    pages = self._pages_of(positions)
    return self.tables[slots, : next(n for n in self._table_sizes if n >= pages)]

  def _pages_of(self, positions: int) -> int:
    return -(-positions // self.page_tokens)

  def _coming(self, prefix: np.ndarray, group: int) -> int:
    """Tokens of the longest prefix, in whole pages, that a group is computing."""
    slots, n = self.where(State.PREFILL), len(prefix)
    slots = slots[self.held[slots] < self.target[slots]]
    slots = slots[self.group(slots) == group]
    if not slots.size or not n:
      return 0
    differs = self.tokens[slots, :n] != prefix
    equal = np.where(differs.any(axis=1), differs.argmax(axis=1), n)
    equal = np.minimum(equal, self.target[slots])
    return int(equal.max()) // self.page_tokens * self.page_tokens
