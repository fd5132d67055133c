"""What a reader gets of published versions: every bit of one version, or an error."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import model
from m2jax.checkpoint import (
  CheckpointMismatch,
  CorruptCheckpoint,
  MissingCheckpoint,
  published,
)
from tests import quick
from tests.checkpoint.published.publish_loop import FULL_EVERY, bits, check, variables
from tests.rollout import conftest as small


@pytest.fixture
def publisher(tmp_path):
  with published.Publisher(tmp_path / 'w', full_every=FULL_EVERY) as one:
    yield one


@pytest.fixture(scope='module')
def template(tmp_path_factory):
  """A directory with versions 1 to 6; 1 and 4 are whole too."""
  directory = tmp_path_factory.mktemp('published') / 'w'
  with published.Publisher(directory, full_every=FULL_EVERY) as one:
    for step in range(1, 7):
      one.publish(variables(step), step)
  return directory


@pytest.fixture
def directory(template, tmp_path):
  return shutil.copytree(template, tmp_path / 'copy')


def version(reader, step):
  return published.Version(step, 0, step)  # of `template`


def test_readers_get_every_bit(publisher, tmp_path):
  """One that reads every version, one that skips some, and one that starts anew each
  time; arrays of numpy and of jax, among them NaNs with payloads and -0.0."""
  rng = np.random.default_rng(0)
  words = {
    'a': rng.integers(0, 2**16, (40, 30)).astype(np.uint16).view(jnp.bfloat16),
    'b': rng.integers(0, 2**32, 500).astype(np.uint32).view(np.float32),
    'c': np.float32(-0.0).reshape(()),
  }
  every, some = (published.Reader(tmp_path / 'w') for _ in range(2))
  last = None
  for step in range(1, 9):
    changed = rng.random(words['b'].shape) < 0.01 * step
    words['b'] = np.where(changed, -words['b'], words['b'])
    words['a'] = words['a'].copy()
    words['a'].view(np.uint16)[step] ^= rng.integers(0, 2**16, 30).astype(np.uint16)
    tree = {'x': jax.tree.map(jnp.asarray, words), 'n': np.array([step], np.int32)}
    wrote = publisher.publish(tree, step, lineage=2)
    last = every.wait(last, 0)
    assert last == wrote.version == (step, 2, step)
    readers = [every, published.Reader(tmp_path / 'w')] + [some] * (step % 3 == 0)
    for reader in readers:
      assert bits(reader.load(last)) == bits(jax.device_get(tree))
    like = jax.eval_shape(lambda tree: tree, tree)
    found = every.load(last, like)
    assert jax.tree.all(jax.tree.map(lambda x: isinstance(x, jax.Array), found))
    assert bits(jax.device_get(found)) == bits(jax.device_get(tree))


def test_a_difference_is_read_instead_of_the_whole(publisher, tmp_path):
  """Bytes that are read are those that are reported; a version without a change costs
  only its index; arrays that a caller has got do not change afterwards."""
  reader = published.Reader(tmp_path / 'w')
  big = np.random.default_rng(0).normal(size=(500, 400)).astype(np.float32)
  first = publisher.publish({'w': big}, 1)
  got = reader.load(first.version)['w']
  assert reader.read_bytes == first.whole_bytes > 0.8 * big.nbytes
  assert first.raw_bytes == big.nbytes and first.delta_bytes == 0
  changed = big.copy()
  changed[7, 5] += 1
  second = publisher.publish({'w': changed}, 2)
  reader.load(second.version)
  assert second.whole_bytes == 0 and 0 < second.delta_bytes < 1000
  assert reader.read_bytes == first.whole_bytes + second.delta_bytes
  assert second.values['float32'][:2] == [big.size, 1]
  third = publisher.publish({'w': changed}, 3)
  assert third.delta_bytes < 100 and third.values['float32'] == [big.size, 0, 0]
  np.testing.assert_array_equal(got, big)
  with pytest.raises(ValueError, match='read-only'):
    got[0] = 0


def test_the_engine_computes_what_the_learner_would(tmp_path):
  """The published weights give the same logits, bit for bit, as the learner's in fp32:
  only what every layer casts anyway is cast. Router, head and biases keep every bit."""
  cfg = dataclasses.replace(small.CFG, dtype='bfloat16', unroll_layers=False)
  learned = quick.variables(cfg, 0, noise=0.1, bias=0.1)
  with published.Publisher(tmp_path, dtype=cfg.dtype) as one:
    one.publish(learned, 3)
  reader = published.Reader(tmp_path)
  served = reader.load(reader.latest(), published.like(cfg))
  assert bits(served) == bits(published.cast(learned, cfg.dtype))
  narrow = {n for n, x in served['params']['layers'].items() if x.dtype == 'bfloat16'}
  assert narrow == set(served['params']['layers']) - {'router'}
  for tree in (served, learned):
    tree['kept'] = tree['params']['head'], tree['params']['layers']['router']
  assert bits(served.pop('kept')) == bits(learned.pop('kept'))
  assert bits(served['router']) == bits(learned['router'])
  tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
  apply = jax.jit(model.M2(cfg).apply)
  np.testing.assert_array_equal(apply(served, tokens), apply(learned, tokens))


def test_old_versions_are_deleted(publisher, tmp_path):
  """The directory stays bounded; a reader that is overtaken fails, and the newest
  version brings it up to date."""
  reader = published.Reader(tmp_path / 'w')
  publisher.publish(variables(1), 1)
  first = reader.wait(None, 0)
  check(reader.load(first), 1)
  for step in range(2, 12):
    publisher.publish(variables(step), step)
  kept = {p.name for p in (tmp_path / 'w' / 'versions').iterdir()}
  assert kept == {'7', '8', '9', '10', '11'}  # 7 and 10 are whole
  assert {p.name for p in (tmp_path / 'w' / 'whole').iterdir()} == {'7', '10'}
  with pytest.raises(MissingCheckpoint, match=r'version 1 .* versions \[7, 8'):
    published.Reader(tmp_path / 'w').load(first)
  check(reader.load(reader.wait(first, 0)), 11)


def test_a_restarted_learner(publisher, tmp_path):
  """It publishes the step that it has restored again, in another lineage: later than
  the lost steps, and read whole, since nobody has the version before."""
  reader = published.Reader(tmp_path / 'w')
  for step in range(1, 5):
    publisher.publish(variables(step), step)
  lost = reader.wait(None, 0)
  check(reader.load(lost), 4)
  with published.Publisher(tmp_path / 'w', full_every=FULL_EVERY) as second:
    wrote = second.publish(variables(2), 2, lineage=1)
    assert wrote.version == (5, 1, 2) and wrote.whole_bytes and not wrote.delta_bytes
    with pytest.raises(FileExistsError, match='another publisher'):
      publisher.publish(variables(5), 5)  # the old one, if it still runs
    check(reader.load(reader.wait(lost, 0)), 2)
    publisher.publish(variables(5), 5)  # it is not the newest one's difference
    with pytest.raises(FileExistsError):
      second.publish(variables(3), 3, lineage=1)


def test_waiting(publisher, tmp_path):
  """`wait` returns when a version appears, and None when time runs out; the directory
  need not exist."""
  reader = published.Reader(tmp_path / 'later', poll_s=0.01)
  assert reader.latest() is None and reader.wait(None, 0.05) is None
  with pytest.raises(MissingCheckpoint, match='it has versions none'):
    reader.load(published.Version(1, 0, 1))
  reader = published.Reader(tmp_path / 'w', poll_s=0.01)
  found = []
  thread = threading.Thread(target=lambda: found.append(reader.wait(None, 60)))
  thread.start()
  publisher.publish(variables(1), 1)
  thread.join(60)
  assert found == [(1, 0, 1)] and reader.wait(found[0], 0) is None


def test_what_is_asked_for_must_match(directory):
  reader = published.Reader(directory)
  like = variables(0)
  like['params']['layers']['q'] = np.zeros((64, 32), np.float32)
  del like['never']
  with pytest.raises(CheckpointMismatch, match='layers/q: saved bfloat16') as error:
    reader.load(reader.latest(), like)
  assert 'never: saved int32[6], not requested' in str(error.value)
  check(reader.load(reader.latest()), 6)


def test_arguments_are_checked(tmp_path):
  with pytest.raises(ValueError, match='Publisher.full_every=0'):
    published.Publisher(tmp_path, full_every=0)
  with published.Publisher(tmp_path) as one:
    one.publish({'w': np.zeros(3)}, 1)
    with pytest.raises(ValueError, match='w: not in the version before'):
      one.publish({'w': np.zeros(4)}, 2)
    assert one.publish({'w': np.ones(4)}, 3).whole_bytes  # it starts anew


def truncate(path):
  data = path.read_bytes()
  path.write_bytes(data[: len(data) // 2])


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def remove(path):
  path.unlink()


DAMAGES = (truncate, flip, remove)


@pytest.mark.parametrize('damage', DAMAGES)
@pytest.mark.parametrize('name', ['delta.0.bin', 'delta.0.json'])
def test_a_damaged_difference(directory, damage, name):
  """The reader takes the whole version where there is one; else the version cannot be
  reached, which is an error, and costs neither the one that it has nor later ones."""
  reader = published.Reader(directory)
  check(reader.load(version(reader, 3)), 3)
  for step in (4, 5):
    damage(directory / 'versions' / str(step) / name)
  check(reader.load(version(reader, 4)), 4)  # whole
  with pytest.raises(CorruptCheckpoint, match='version 5'):
    reader.load(version(reader, 5))
  with pytest.raises(CorruptCheckpoint, match='version 5'):
    published.Reader(directory).load(version(reader, 6))
  check(reader.load(version(reader, 4)), 4)
  with published.Publisher(directory, full_every=FULL_EVERY) as one:
    one.publish(variables(7), 7)
  check(reader.load(reader.latest()), 7)


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_whole_version(directory, damage):
  """Every file of it in turn: a reader that needs it gets the bits by an older whole
  version and the differences after it."""
  files = [p for p in (directory / 'whole' / '4').rglob('*') if p.is_file()]
  assert len(files) > 3
  for path in files:
    data = path.read_bytes()
    damage(path)
    check(published.Reader(directory).load(version(None, 5)), 5)
    path.write_bytes(data)


def test_a_damaged_announcement(directory):
  """Cut anywhere, or with one bit wrong: the version is passed over, and the one before
  is the latest."""
  path = directory / 'versions' / '6' / 'version.json'
  data, reader = path.read_bytes(), published.Reader(directory)
  for at in range(0, len(data), 29):
    path.write_bytes(data[:at])
    assert reader.latest().step == 5
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert reader.latest().step == 5, data[at - 20 : at + 20]
  with pytest.raises(CorruptCheckpoint, match=r'6.version\.json'):
    reader.load(version(reader, 6))
  check(reader.load(reader.latest()), 5)


def test_a_reader_beside_a_publisher(publisher, tmp_path):
  """While versions come and go at full speed, everything that is loaded is one whole
  version, and versions only increase."""
  stop, seen, errors = threading.Event(), [], []

  def read():
    reader, last = published.Reader(tmp_path / 'w', poll_s=0.001), None
    try:
      while not stop.is_set():
        found = reader.wait(last, 0.01)
        if found is None:
          continue
        try:
          check(reader.load(found), found.step)
        except MissingCheckpoint:  # overtaken
          continue
        last = found
        seen.append(found.step)
        if found.step % 5 == 0:
          reader = published.Reader(tmp_path / 'w', poll_s=0.001)
    except BaseException as error:
      errors.append(error)

  threads = [threading.Thread(target=read) for _ in range(2)]
  for thread in threads:
    thread.start()
  for step in range(1, 31):
    publisher.publish(variables(step), step)
  end_s = time.monotonic() + 60
  while seen.count(30) < 2 and not errors and time.monotonic() < end_s:
    time.sleep(0.01)
  stop.set()
  for thread in threads:
    thread.join()
  assert not errors and seen.count(30) == 2
