"""The prefix cache beyond device memory: host memory, then the pool (`pool`).

A page evicted from the device cache is copied to host memory. When a sequence gets a
slot, pages that continue its cached prefix are copied back into its own pages before it
prefills, so that only the rest is computed. With a pool, every page is also copied to
host memory when it becomes known, and from there to the pool, so that other engines and
later processes find it; and pages that a waiting request needs are read from the pool
into host memory while it waits.

Pages are found by `page_keys`: the version of the weights is part of a key (the bits of
the weights, too, in a pool), and host memory is cleared with the weights. With
`reuse_stale_prefix` the version is not part of the key.

The device copies pages in batches of a few compiled sizes. Reads are dispatched before
the next call that writes pages, and their results are taken later, when they are there:
the device orders the two, and the engine's thread waits for neither.

Everything here but the pool runs in the engine's thread.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import time
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import jax
import numpy as np

from m2jax.rollout.engine.decode_state import DecodeState
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.engine.pages import UNUSED
from m2jax.rollout.tiers import page_keys
from m2jax.rollout.tiers.config import KvPoolConfig
from m2jax.rollout.tiers.host_cache import HostCache
from m2jax.rollout.tiers.page_layout import Layout, Page
from m2jax.rollout.tiers.pool import KvPool
from m2jax.rollout.tiers.prefix_cache import Node, PrefixCache

COUNTS = ('host_hit_tokens', 'pool_hit_tokens', 'host_miss_tokens', 'late_reads')
MIGRATION = ('migrated_tokens', 'migration_s')  # read by `routing.fleet`
_SIZES = (4, 32)  # pages of a copy
_MOST_BLOCKS = 4  # that are on their way to the host
_IDLE_WAIT_S = 0.02


class Request(Protocol):
  """What is read of a request (`serving.jobs.Job`): its slot, -1 while it waits, and
  the tokens of its sequence [n]."""

  slot: int
  tokens: np.ndarray


class SlotTable(Protocol):
  """What is read of the engine's slots, and `held` written (`serving.sequences`)."""

  page_tokens: int
  tokens: np.ndarray
  tables: np.ndarray
  held: np.ndarray
  target: np.ndarray
  caches: list[PrefixCache]

  def group(self, slot: int) -> int: ...

  def shared(self, slot: int) -> list[Node]: ...


@dataclasses.dataclass(eq=False)
class Block:
  """Pages on their way to the host."""

  keys: list[bytes]
  pages: Any  # Pages, on the device


@dataclasses.dataclass(eq=False)
class Reading:
  """Pages on their way from the pool; requests wait until `deadline`."""

  keys: list[bytes]
  future: concurrent.futures.Future[list[Page]]
  deadline: float
  begun_s: float
  ended_s: float = 0.0
  taken: bool = False

  def __post_init__(self):
    self.future.add_done_callback(self._ended)

  def _ended(self, future: concurrent.futures.Future) -> None:
    del future
    self.ended_s = time.monotonic()

  @property
  def waited_for(self) -> bool:
    return not self.taken and time.monotonic() < self.deadline


class Tiers:
  """Host memory and pool of one engine; see `create`."""

  def __init__(
    self,
    engine: Engine,
    host_cache_bytes: int,
    pool: KvPoolConfig,
    *,
    reuse_stale: bool,
  ):
    self._engine, self._stale = engine, reuse_stale
    self._layout = layout = Layout.of(engine.state_shapes().pages)
    pages = host_cache_bytes // layout.page_bytes
    if not pages:
      raise ValueError(
        f'SchedulerConfig.host_cache_bytes={host_cache_bytes}: must be at least '
        f'{layout.page_bytes}, the size of a page'
      )
    self.host = HostCache(pages)
    self.pool = KvPool(pool, layout) if pool.url else None
    most = engine.config.context_pages
    self._sizes = tuple(sorted({min(size, most) for size in _SIZES}))
    self._counts = collections.Counter()
    self._root = page_keys.root('any version')
    self._pending: dict[int, dict[bytes, int]] = {}  # of each group: key → page
    self._blocks: collections.deque[Block] = collections.deque()
    self._moving: set[bytes] = set()  # keys of both
    self._readings: list[Reading] = []
    self._asked: weakref.WeakKeyDictionary[Request, Reading | None]
    self._asked = weakref.WeakKeyDictionary()
    self._table: SlotTable | None = None

  # --- Changes of the engine.

  def attach(self, table: SlotTable) -> None:
    """The device state is new: pages of the old one are not used any more."""
    self._table = table
    self._forget_moving()
    self.host.clear()
    for group, cache in enumerate(table.caches):
      cache.on_evict = lambda node, group=group: self._save(group, node)
      if self.pool is not None:
        cache.on_insert = cache.on_evict

  def use(self, variables: Any, version: int) -> None:
    """The weights are new: pages of older ones are not found any more."""
    if self._stale:
      return
    what = ['version', str(version)]
    if self.pool is not None:
      cfg, config = self._engine.cfg, self._engine.config
      what += ['m2jax pages 1', repr(cfg), self._layout.describe()]
      what += [str(config.page_tokens), page_keys.fingerprint(variables)]
    self._root = page_keys.root(*what)
    self._forget_moving()
    self.host.clear()
    self._readings.clear()
    self._asked.clear()

  def warmup(self, state: DecodeState) -> DecodeState:
    """Compiles the copies; returns an equivalent state."""
    for size in self._sizes:
      table, group = np.full(size, UNUSED, np.int32), np.int32(0)
      block = jax.device_get(self._engine.read_pages(state, group, table))
      state = self._engine.write_pages(state, group, table, block)
    return jax.block_until_ready(state)

  def close(self) -> None:
    """Writes to the pool what is queued, and stops its threads."""
    if self.pool is not None:
      self.pool.close()

  # --- From the device.

  def _save(self, group: int, node: Node) -> None:
    """Queues a known page for host memory, unless it is there."""
    key = self._key(node)
    if key not in self.host and key not in self._moving:
      self._pending.setdefault(group, {})[key] = node.page
      self._moving.add(key)

  def _key(self, node: Node) -> bytes:
    path = []
    while node.parent is not None and not node.name:
      path.append(node)
      node = node.parent
    key = node.name or self._root
    for node in reversed(path):
      node.name = key = page_keys.extend(key, node.key)
    return key

  def read_pages(self, state: DecodeState) -> None:
    """Starts to copy queued pages; needed before every call that writes pages."""
    pending, self._pending = self._pending, {}
    for group, pages in pending.items():
      keys = list(pages)
      while keys:
        size = next((s for s in self._sizes if s >= len(keys)), self._sizes[-1])
        part, keys = keys[:size], keys[size:]
        table = np.full(size, UNUSED, np.int32)
        table[: len(part)] = [pages[key] for key in part]
        block = self._engine.read_pages(state, np.int32(group), table)
        jax.tree.map(lambda x: x.copy_to_host_async(), block)
        self._blocks.append(Block(part, block))
        self._take_blocks(_MOST_BLOCKS)

  def _take_blocks(self, most: int) -> None:
    """Stores what has arrived; waits until at most `most` blocks are under way."""
    while self._blocks:
      block = self._blocks[0]
      ready = all(x.is_ready() for x in jax.tree.leaves(block.pages))
      if not ready and len(self._blocks) <= most:
        return
      self._blocks.popleft()
      pages = self._layout.split(jax.device_get(block.pages), len(block.keys))
      found = list(zip(block.keys, pages, strict=True))
      self.host.put(found)
      if self.pool is not None:
        for key, page in found:
          self.pool.put(key, page)
      self._moving.difference_update(block.keys)

  def _forget_moving(self) -> None:
    self._pending.clear()
    self._blocks.clear()
    self._moving.clear()

  # --- To the device.

  def restore(self, state: DecodeState, job: Request) -> tuple[DecodeState, int]:
    """Continues the cached prefix of a request that has got its slot.

    Returns:
      The state, and the number of tokens whose K/V have been copied from host memory.
    """
    table, slot = self._table, job.slot
    page, first = table.page_tokens, int(table.held[job.slot]) // table.page_tokens
    last = int(table.target[slot]) // page
    reading = self._asked.pop(job, None)
    self._counts['late_reads'] += reading is not None and not reading.taken
    keys = self._keys(table.tokens[slot, : last * page], table.shared(slot))
    if not self._moving.isdisjoint(keys):
      self.read_pages(state)
      self._take_blocks(0)
    entries = self.host.find(keys)
    for entry in entries:
      self._counts['pool_hit_tokens' if entry.read else 'host_hit_tokens'] += page
      entry.read = False
    self._counts['host_miss_tokens'] += (len(keys) - len(entries)) * page
    if entries:
      self.read_pages(state)
    pages, most = [entry.page for entry in entries], self._sizes[-1]
    for at in range(0, len(pages), most):
      part = pages[at : at + most]
      size = next(s for s in self._sizes if s >= len(part))
      targets = np.full(size, UNUSED, np.int32)
      begin = first + at
      targets[: len(part)] = table.tables[slot, begin : begin + len(part)]
      state = self._engine.write_pages(
        state, np.int32(table.group(slot)), targets, self._layout.join(part, size)
      )
    table.held[slot] += len(pages) * page
    return state, len(pages) * page

  def _keys(self, tokens: np.ndarray, nodes: list[Node]) -> list[bytes]:
    """Keys of the whole pages of `tokens` after those of `nodes`."""
    size, tokens = self._table.page_tokens, np.ascontiguousarray(tokens, np.int32)
    starts = range(len(nodes) * size, len(tokens) - size + 1, size)
    begin = self._key(nodes[-1]) if nodes else self._root
    return page_keys.chain(begin, (tokens[s : s + size].tobytes() for s in starts))

  # --- From the pool.

  def read_ahead(self, waiting: Iterable[Request]) -> None:
    """Starts to read what the first waiting requests need; stores what has arrived."""
    self._take_readings()
    if self.pool is not None:
      for job in waiting:
        self.waits(job, most=self.host.pages // 2)

  def waits(self, job: Request, most: int | None = None) -> bool:
    """Whether a request should wait for pages of the pool; asks for them once.

    Args:
      most: pages under way; beyond it the request does not ask yet.
    """
    if self.pool is None:
      return False
    if job in self._asked:
      reading = self._asked[job]
      return reading is not None and reading.waited_for
    keys = self._unknown(job.tokens)
    reading = next((r for r in self._readings if keys and keys[0] in r.keys), None)
    if reading is not None:  # another's; then this one asks for what follows
      return reading.waited_for
    under_way = sum(len(r.keys) for r in self._readings)
    if most is not None and under_way and under_way + len(keys) > most:
      return False
    if keys:
      now = time.monotonic()
      deadline = now + self.pool.config.wait_s
      reading = Reading(keys, self.pool.read(keys), deadline, now)
      self._readings.append(reading)
    self._asked[job] = reading
    return reading is not None

  def _unknown(self, tokens: np.ndarray) -> list[bytes]:
    """Keys of a prompt's pages from the first on that only the pool may have."""
    prefix = tokens[:-1]
    nodes = max((cache.match(prefix) for cache in self._table.caches), key=len)
    keys = self._keys(prefix, nodes)
    here = lambda key: key in self.host or key in self._moving
    return list(itertools.dropwhile(here, keys))

  def _take_readings(self) -> None:
    """Stores pages that have been read."""
    left = []
    for reading in self._readings:
      if not reading.future.done():
        left.append(reading)
        continue
      reading.taken, pages = True, reading.future.result()
      if pages:
        self._counts['migrated_tokens'] += len(pages) * self._table.page_tokens
        self._counts['migration_s'] += reading.ended_s - reading.begun_s
      self.host.put(zip(reading.keys, pages, strict=False), read=True)
    self._readings = left

  # --- Between two ticks.

  @property
  def busy(self) -> bool:
    """Whether pages are on their way to or from host memory."""
    return bool(self._pending or self._blocks or self._readings)

  def settle(self, state: DecodeState, *, idle: bool) -> None:
    """Takes what has arrived; with nothing else to do waits for the rest a little."""
    self.read_pages(state)
    self._take_blocks(0 if idle else _MOST_BLOCKS)
    if idle and self._readings:
      futures = [reading.future for reading in self._readings]
      first = concurrent.futures.FIRST_COMPLETED
      concurrent.futures.wait(futures, _IDLE_WAIT_S, first)
    self._take_readings()

  def stats(self) -> dict[str, float]:
    """Totals of COUNTS, host_pages, host_bytes, host_evicted_pages, moving_pages; with
    a pool those of `KvPool.stats`, with pool_ before them, and MIGRATION: tokens whose
    pages were read from it, and the seconds from asking for them to having them."""
    pool = self.pool.stats() if self.pool is not None else {}
    counts = COUNTS if self.pool is None else COUNTS + MIGRATION
    return {name: self._counts[name] for name in counts} | {
      'host_pages': len(self.host),
      'host_bytes': len(self.host) * self._layout.page_bytes,
      'host_evicted_pages': self.host.evicted,
      'moving_pages': len(self._moving) + sum(len(r.keys) for r in self._readings),
      **{f'pool_{name}': value for name, value in pool.items()},
    }


def create(engine: Any, config: Any) -> Tiers | None:
  """Tiers as a SchedulerConfig asks for them; None if it does not.

  Raises:
    ValueError: the engine runs in several processes, or a field is out of range.
  """
  if not config.host_cache_bytes:
    return None
  if not engine.moves_pages:
    raise ValueError(
      f'SchedulerConfig.host_cache_bytes={config.host_cache_bytes}: must be 0 for an '
      'engine of several processes, none of which has whole pages'
    )
  return Tiers(
    engine,
    config.host_cache_bytes,
    config.kv_pool,
    reuse_stale=config.reuse_stale_prefix,
  )
