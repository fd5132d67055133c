"""The pool of pages: what is read is what was written under that key, or nothing.

Damaged, cut, missing and foreign values, bounds, sharing, and death while writing.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import uuid

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from m2jax.rollout.engine.pages import Pages
from m2jax.rollout.tiers import codec, page_keys, usage
from m2jax.rollout.tiers.config import KvPoolConfig
from m2jax.rollout.tiers.page_layout import Layout
from m2jax.rollout.tiers.pool import KvPool

TIMEOUT_S = 60
_BLOCK = Pages(
  k=np.zeros((2, 1, 3, 4, 2), np.float32),
  v=np.zeros((2, 1, 3, 4, 2), np.float32),
  tokens=np.zeros((3, 4), np.int32),
  experts=np.zeros((2, 3, 4, 2), np.int16),
)
LAYOUT = Layout.of(_BLOCK)
VALUE = codec.value_bytes(LAYOUT)
ROOT = page_keys.root('test')


def keys(count: int, stem: int = 0) -> list[bytes]:
  pages = (np.full(4, 100 * stem + i, np.int32).tobytes() for i in range(count))
  return page_keys.chain(ROOT, pages)


def page(seed):
  """A page whose arrays all differ."""
  random = np.random.default_rng(seed)
  return tuple(
    random.integers(100, size=shape).astype(dtype)
    for shape, dtype in zip(LAYOUT.shapes, LAYOUT.dtypes, strict=True)
  )


def same(a, b):
  return all(
    np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True)
  )


def opened(url, **fields) -> KvPool:
  return KvPool(KvPoolConfig(str(url), **{'bytes': 1 << 20} | fields), LAYOUT)


def stored(pool, names, seed=0):
  """Stores a page under each key; returns the pages."""
  pages = [page(seed + i) for i in range(len(names))]
  for key, one in zip(names, pages, strict=True):
    assert pool.put(key, one)
  assert pool.flush(TIMEOUT_S)
  return pages


def read(pool, names):
  return pool.read(names).result(TIMEOUT_S)


def files(directory) -> list[pathlib.Path]:
  return sorted(pathlib.Path(directory).glob('*/*.page'))


@pytest.mark.parametrize('scheme', ['file', 'memory'])
def test_pages_are_found_by_another_pool(tmp_path, scheme):
  """By one that opens the same URL later; a chain up to its first missing page."""
  url = f'file://{tmp_path}/' if scheme == 'file' else f'memory://{uuid.uuid4()}/'
  first, names = opened(url), keys(9)
  pages = stored(first, names[:7])
  first.close()
  second = opened(url)
  found = read(second, names)
  assert len(found) == 7 and all(map(same, found, pages))
  assert read(second, keys(3, stem=1)) == [] and len(read(second, names[2:4])) == 2
  stats = second.stats()
  assert stats['hit_pages'] == 9 and stats['miss_pages'] == 2 + 3
  assert stats['pages'] == 7 and stats['bytes'] == 7 * VALUE
  second.close()
  assert not second.put(names[8], pages[0]) and second.stats()['dropped_pages'] == 1


def _cut(path):
  path.write_bytes(path.read_bytes()[: VALUE // 2])


def _empty(path):
  path.write_bytes(b'')


def _flip(path):
  value = bytearray(path.read_bytes())
  value[-3] ^= 1
  path.write_bytes(bytes(value))


def _header(path):
  path.write_bytes(b'somebody' + path.read_bytes()[8:])


def _of_another_key(path):
  path.write_bytes(codec.encode(keys(1, stem=5)[0], page(0)))


def _not_finite(path):
  bad = page(0)
  bad[0][0] = np.nan
  path.write_bytes(codec.encode(keys(3)[1], bad))


@pytest.mark.parametrize(
  'damage', [_cut, _empty, _flip, _header, _of_another_key, _not_finite]
)
def test_damaged_values_are_counted_and_replaced(tmp_path, damage):
  pool, names = opened(f'file://{tmp_path}/'), keys(3)
  pages = stored(pool, names)
  damage(tmp_path / usage.page_name(names[1], VALUE))
  assert len(read(pool, names)) == 1
  stats = pool.stats()
  assert stats['corrupt_pages'] == 1 and stats['errors'] == 0
  assert len(read(pool, names)) == 1  # now it is missing
  assert pool.stats()['corrupt_pages'] == 1
  stored(pool, names)
  assert all(map(same, read(pool, names), pages)) and len(read(pool, names)) == 3


def test_values_that_others_deleted_are_written_again(tmp_path):
  pool, names = opened(f'file://{tmp_path}/'), keys(2)
  stored(pool, names)
  files(tmp_path)[0].unlink()
  read(pool, names), read(pool, names[1:])
  stored(pool, names)
  assert len(read(pool, names)) == 2 and pool.stats()['pages'] == 2


def test_strangers_files_stay(tmp_path):
  """They are not read, not counted and not deleted, whatever they are."""
  (tmp_path / 'aa').mkdir()
  strange = [tmp_path / 'notes.txt', tmp_path / 'aa' / 'x.page', tmp_path / 'aa' / 'y']
  for path in strange:
    path.write_bytes(b'0' * 3 * VALUE)
  names = keys(5)
  huge = tmp_path / usage.page_name(names[1], VALUE)
  huge.parent.mkdir(exist_ok=True)
  os.symlink(strange[0], huge)  # a link in place of a page
  (tmp_path / usage.page_name(names[2], VALUE)).mkdir(parents=True)
  pool = opened(f'file://{tmp_path}/', bytes=2 * VALUE)
  for name in names:
    assert pool.put(name, page(0))
  assert pool.flush(TIMEOUT_S)
  for name in names:
    read(pool, [name])
  assert all(path.stat().st_size == 3 * VALUE for path in strange)
  assert pool.stats()['bytes'] <= 2 * VALUE


def test_the_queue_is_bounded(tmp_path):
  """What does not fit is dropped and counted; the caller never waits."""
  pool = opened(f'file://{tmp_path}/', queue_pages=6)
  go, write = threading.Event(), pool._write
  pool._write = lambda *args: (go.wait(TIMEOUT_S), write(*args))
  assert [pool.put(key, page(0)) for key in keys(8)] == [True] * 6 + [False] * 2
  stats = pool.stats()
  assert stats['dropped_pages'] == 2 and stats['queued_pages'] == 6
  go.set()
  assert pool.flush(TIMEOUT_S) and len(files(tmp_path)) == 6


def test_values_that_are_being_written_count(tmp_path):
  """Several threads together keep to a bound of two pages."""
  pool = opened(f'file://{tmp_path}/', bytes=2 * VALUE)
  for number in range(10):
    for key in keys(8, stem=number):
      assert pool.put(key, page(0))
    assert pool.flush(TIMEOUT_S) and len(files(tmp_path)) == 2
  assert pool.stats()['evicted_pages'] == 78


def test_pages_that_are_not_finite_are_not_written(tmp_path):
  pool, bad = opened(f'file://{tmp_path}/'), page(0)
  bad[1][0] = np.inf
  pool.put(keys(1)[0], bad)
  assert pool.flush(TIMEOUT_S)
  assert pool.stats()['dropped_pages'] == 1 and not files(tmp_path)


def test_a_store_that_fails_costs_pages_only(tmp_path):
  """A directory that cannot be written: counted, and nothing is raised."""
  pool = opened(f'file://{tmp_path}/pool/')
  (tmp_path / 'pool').write_text('a file where the directory was')
  assert pool.put(keys(1)[0], page(0)) and pool.flush(TIMEOUT_S)
  assert read(pool, keys(2)) == []
  stats = pool.stats()
  assert stats['errors'] > 0 and stats['bytes'] == 0


@pytest.mark.parametrize(
  'fields, match',
  [
    (dict(url='/tmp/pool'), 'KvPoolConfig.url'),
    (dict(url='nowhere://x/'), 'KvPoolConfig.url'),
    (dict(url='memory://x/', bytes=VALUE - 1), f'KvPoolConfig.bytes.*{VALUE}'),
    (dict(queue_pages=0), 'KvPoolConfig.queue_pages'),
    (dict(wait_s=-1.0), 'KvPoolConfig.wait_s'),
  ],
)
def test_bad_settings_are_named(fields, match):
  with pytest.raises(ValueError, match=match):
    KvPool(KvPoolConfig(**fields), LAYOUT)


def test_the_least_recently_used_files_go_first_after_a_restart(tmp_path):
  """A page that was read before the restart outlives one that was only written."""
  pool, names = opened(f'file://{tmp_path}/'), keys(4)
  stored(pool, names)
  for at, path in enumerate(tmp_path / usage.page_name(k, VALUE) for k in names):
    os.utime(path, (1000 + at, 1000 + at))
  read(pool, names[:1])
  pool.close()
  pool = opened(f'file://{tmp_path}/', bytes=4 * VALUE)
  stored(pool, keys(2, stem=1))
  assert [len(read(pool, [key])) for key in names] == [1, 0, 0, 1]
  assert pool.stats()['evicted_pages'] == 2


def test_two_pools_keep_one_directory_within_bounds(tmp_path):
  """Each lists it again after a sixteenth of the bound, which is what it may exceed."""
  most, url = 32, f'file://{tmp_path}/'
  pools = [opened(url, bytes=most * VALUE) for _ in range(2)]
  for number in range(120):
    stored(pools[number % 2], keys(1, stem=number))
    assert len(files(tmp_path)) <= most + 2 * (most // 16)
  # Either finds what the other has written.
  assert all(read(pool, keys(1, stem=119)) for pool in pools)
  assert read(pools[0], keys(1, stem=118)) and not read(pools[0], keys(1, stem=0))


_WRITER = """
import itertools, sys
from tests.rollout.tiers import test_pool as t
pool = t.opened(sys.argv[1], bytes=1 << 24)
print('ready', flush=True)
for stem in itertools.count():
  t.stored(pool, t.keys(4, stem), stem)
  print(stem, flush=True)
"""


def test_death_while_writing_leaves_a_readable_pool(tmp_path):
  """Every value that is there is whole; what was not finished is removed in time."""
  url = f'file://{tmp_path}/'
  child = subprocess.Popen(
    [sys.executable, '-c', _WRITER, url], stdout=subprocess.PIPE, text=True
  )
  try:
    for line in child.stdout:
      if line.strip() == '6':
        break
  finally:
    os.kill(child.pid, signal.SIGKILL)
    child.wait(TIMEOUT_S)
  left = files(tmp_path)[0].with_suffix('.page.__lock')  # as of a killed writer
  left.write_bytes(b'')
  os.utime(left, (1000, 1000))
  pool = opened(url)
  assert not left.exists()
  for stem in range(7):
    found = read(pool, keys(4, stem))
    assert len(found) == 4 and all(map(same, found, [page(stem + i) for i in range(4)]))
  assert all(path.stat().st_size == VALUE for path in files(tmp_path))
  assert pool.stats()['corrupt_pages'] == 0
  stored(pool, keys(2, stem=5000))


class Machine(RuleBasedStateMachine):
  """Any order of writing, reading, damage and restarts, in a store of five pages."""

  def __init__(self):
    super().__init__()
    self.url = f'memory://{uuid.uuid4()}/'
    self.pool = opened(self.url, bytes=5 * VALUE)
    self.known = keys(8)

  @rule(at=st.integers(0, 7))
  def write(self, at):
    assert self.pool.put(self.known[at], page(at))
    assert self.pool.flush(TIMEOUT_S)

  @rule(first=st.integers(0, 7), count=st.integers(1, 8))
  def read(self, first, count):
    found = read(self.pool, self.known[first : first + count])
    for at, one in enumerate(found, first):
      assert same(one, page(at))

  @rule(at=st.integers(0, 7), size=st.integers(0, VALUE))
  def damage(self, at, size):
    store = self.pool._store
    name = usage.page_name(self.known[at], VALUE)
    if (value := store.read(name).result()).state == 'value':
      store.write(name, value.value[: size - 1] + b'?' * (size > 0)).result()

  @rule()
  def restart(self):
    self.pool.close()
    self.pool = opened(self.url, bytes=5 * VALUE)

  @invariant()
  def the_store_is_bounded(self):
    assert len(self.pool._store.list().result()) <= 5
    assert self.pool.stats()['bytes'] <= 5 * VALUE
    assert self.pool.stats()['errors'] == 0

  def teardown(self):
    self.pool.close()


TestKvPool = Machine.TestCase
TestKvPool.settings = settings(deadline=None, stateful_step_count=20)


def test_what_was_flushed_is_no_longer_queued(tmp_path, monkeypatch):
  """Though the threads of the pool have not yet forgotten their writes."""
  late = threading.Event()
  forget = KvPool._forget
  monkeypatch.setattr(
    KvPool, '_forget', lambda self, write: late.wait(TIMEOUT_S) and forget(self, write)
  )
  pool = opened(f'file://{tmp_path}/')
  for i, key in enumerate(keys(3)):
    pool.put(key, page(i))
  assert pool.flush(TIMEOUT_S) and pool.stats()['queued_pages'] == 0
  late.set()
  pool.close()
