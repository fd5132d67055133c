"""The pool of pages outside the engine: a tensorstore key-value store, by URL.

Writes are asynchronous: `put` queues a page and returns; a few threads write. So are
reads: `read` starts to read a chain of pages and returns a future. A store that is
slow, full, damaged or unreachable costs pages, which are then computed, but raises no
error and takes no longer than the caller waits. Counters record what happened.

A value is written whole or not at all (tensorstore's file driver renames a finished
file; object stores do so by themselves), and its checksum covers its key (`codec`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
import time
from collections.abc import Sequence

import tensorstore as ts
from absl import logging

from m2jax.rollout.tiers import codec
from m2jax.rollout.tiers.config import KvPoolConfig
from m2jax.rollout.tiers.page_layout import Layout, Page
from m2jax.rollout.tiers.usage import Usage, page_name

COUNTS = (
  'hit_pages',
  'miss_pages',
  'read_bytes',
  'written_pages',
  'written_bytes',
  'dropped_pages',
  'corrupt_pages',
  'errors',
)
_THREADS = 4
_MOST_AT_ONCE = 32  # values of a chain that are asked for together
_CLOSE_S = 10.0

# Stores of memory:// URLs belong to a context; those of one process share it. A crash
# of the machine may cut a value that was not flushed: its checksum would not fit.
_CONTEXT = ts.Context({'file_io_sync': False})


class KvPool:
  """Pages of one layout in a store that others may use, too. Thread-safe."""

  def __init__(self, config: KvPoolConfig, layout: Layout):
    """Opens and lists the store.

    Raises:
      ValueError: the store cannot be opened, or is smaller than a page.
    """
    self.config, self._layout = config, layout
    self._value_bytes = codec.value_bytes(layout)
    if config.bytes < self._value_bytes:
      raise ValueError(
        f'KvPoolConfig.bytes={config.bytes}: must be at least {self._value_bytes}, '
        'the size of a page'
      )
    url = config.url if config.url.endswith('/') else config.url + '/'
    try:
      store = ts.KvStore.open(url, context=_CONTEXT)
      self._store = store.result(config.timeout_s)
      self._usage = Usage(self._store, config.bytes, config.timeout_s)
    except Exception as error:
      raise ValueError(
        f'KvPoolConfig.url={config.url!r}: cannot be opened: {error}'
      ) from error
    self._counts = collections.Counter()
    self._lock = threading.Lock()
    self._closed = False
    pool = concurrent.futures.ThreadPoolExecutor
    self._writers = pool(_THREADS, 'kv_pool_write')
    self._readers = pool(_THREADS, 'kv_pool_read')
    self._writes: set[concurrent.futures.Future] = set()

  def put(self, key: bytes, page: Page) -> bool:
    """Queues a page; False if it was dropped: the queue is full, or closed."""
    with self._lock:
      if self._closed or len(self._writes) >= self.config.queue_pages:
        self._counts['dropped_pages'] += 1
        return False
      write = self._writers.submit(self._write, key, page)
      self._writes.add(write)
    write.add_done_callback(self._forget)
    return True

  def read(self, keys: Sequence[bytes]) -> concurrent.futures.Future[list[Page]]:
    """Starts to read the pages of a chain; gives those before the first missing one."""
    return self._readers.submit(self._read, keys)

  def flush(self, timeout_s: float | None = None) -> bool:
    """Waits until what is queued now has been written; False after the timeout."""
    with self._lock:
      waiting = set(self._writes)
    found = concurrent.futures.wait(waiting, timeout_s)
    with self._lock:
      self._writes -= found.done  # their callbacks may come later
    return not found.not_done

  def stats(self) -> dict[str, int]:
    """The totals of COUNTS, and `bytes`, `pages`, `evicted_pages`, `queued_pages`."""
    with self._lock:
      counts = {name: self._counts[name] for name in COUNTS}
    return counts | {
      'bytes': self._usage.total,
      'pages': len(self._usage),
      'evicted_pages': self._usage.evicted,
      'queued_pages': len(self._writes),
    }

  def close(self, timeout_s: float = _CLOSE_S) -> None:
    """Writes what is queued, within the timeout; afterwards nothing is accepted."""
    with self._lock:
      self._closed = True
    if not self.flush(timeout_s):
      logging.warning('kv_pool: closed with %d pages unwritten', len(self._writes))
    for executor in (self._writers, self._readers):
      executor.shutdown(wait=False, cancel_futures=True)

  # --- In the threads of the pool.

  def _forget(self, write: concurrent.futures.Future) -> None:
    with self._lock:
      self._writes.discard(write)

  def _count(self, **more: int) -> None:
    with self._lock:
      self._counts.update(more)

  def _failed(self, what: str, error: Exception) -> None:
    self._count(errors=1)
    logging.log_every_n(logging.WARNING, 'kv_pool: %s: %s', 100, what, error)

  def _write(self, key: bytes, page: Page) -> None:
    name, stored = page_name(key, self._value_bytes), False
    try:
      if not self._layout.finite(page):
        self._count(dropped_pages=1)
        return
      if not self._usage.begin(name, self._value_bytes):
        return
      try:
        value = codec.encode(key, page)
        self._store.write(name, value).result(self.config.timeout_s)
        stored = True
      finally:
        self._usage.end(name, stored=stored)
      self._count(written_pages=1, written_bytes=len(value))
    except Exception as error:
      self._failed(f'writing {name}', error)

  def _read(self, keys: Sequence[bytes]) -> list[Page]:
    pages, at, size = [], 0, 1
    deadline = time.monotonic() + self.config.timeout_s
    try:
      while at == len(pages) < len(keys):
        # A prefix that nobody has stored costs one request, a long one few turns.
        batch = keys[at : at + size]
        self._read_batch(batch, pages, deadline)
        at, size = at + len(batch), min(2 * size, _MOST_AT_ONCE)
    except Exception as error:
      self._failed('reading', error)
    names = [page_name(key, self._value_bytes) for key in keys[: len(pages)]]
    for name in reversed(names):
      self._usage.used(name, self._value_bytes)
    self._count(
      hit_pages=len(pages),
      miss_pages=len(keys) - len(pages),
      read_bytes=len(pages) * self._value_bytes,
    )
    return pages

  def _read_batch(self, keys: Sequence[bytes], pages: list[Page], deadline) -> None:
    """Appends to `pages` those before the first that is missing or damaged."""
    names = [page_name(key, self._value_bytes) for key in keys]
    # No more than a page is read of a value, however large a stranger has made it.
    part = slice(0, self._value_bytes)
    reads = [self._store.read(name, byte_range=part) for name in names]
    for key, name, read in zip(keys, names, reads, strict=True):
      try:
        result = read.result(max(deadline - time.monotonic(), 0))
        if result.state != 'value':
          self._usage.gone(name)
          return
        pages.append(codec.decode(key, result.value, self._layout))
      except Exception as error:
        if isinstance(error, codec.CorruptPage) or 'OUT_OF_RANGE' in str(error):
          self._remove_corrupt(name)
        else:
          self._failed(f'reading {name}', error)
        return

  def _remove_corrupt(self, name: str) -> None:
    """Counts a damaged value and deletes it, so that it can be written again."""
    self._count(corrupt_pages=1)
    logging.log_every_n(logging.WARNING, 'kv_pool: %s is damaged', 100, name)
    try:
      self._store.write(name, None).result(self.config.timeout_s)
      self._usage.gone(name)
    except Exception as error:
      self._failed(f'deleting {name}', error)
