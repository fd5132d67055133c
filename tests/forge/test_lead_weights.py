"""Published weights that all processes of an engine read, or none serves."""

from __future__ import annotations

import gc
import queue
import weakref

import jax
import numpy as np
import pytest

from m2jax import frames
from m2jax.checkpoint import CheckpointError, published
from m2jax.checkpoint.errors import CorruptCheckpoint, MissingCheckpoint
from m2jax.forge.errors import Stopped
from m2jax.forge.processes import lead_weights

TIMEOUT_S = 60
LIKE = {'w': jax.ShapeDtypeStruct((3,), np.float32)}


class Channel:
  """`forge.processes.commands.Commands` between two threads; is both of its ends."""

  def __init__(self):
    self._commands, self._answers = queue.Queue(), queue.Queue()

  def send(self, do, **fields):
    self._commands.put(frames.Frame(do, fields, {}))

  def receive(self):
    return self._commands.get(timeout=TIMEOUT_S)

  def answer(self, **fields):
    self._answers.put(frames.Frame('answer', fields, {}))

  def answers(self):
    return [self._answers.get(timeout=TIMEOUT_S)]


class Broken:
  """A reader whose loads fail with an error, while there is one."""

  def __init__(self, reader):
    self._reader, self.error = reader, None

  def load(self, version, like):
    if self.error is not None:
      raise self.error
    return self._reader.load(version, like)


@pytest.fixture
def channel():
  channel = Channel()
  yield channel
  channel.send('stop')


@pytest.fixture
def publisher(tmp_path):
  with published.Publisher(tmp_path / 'weights', full_every=2) as publisher:
    yield publisher


def publish(publisher, step):
  variables = {'w': np.full(3, step, np.float32)}
  return publisher.publish(variables, step).version


def both(directory, channel):
  """Process 0's reader, the other's, and what that one reads with."""
  theirs = Broken(published.Reader(directory / 'weights'))
  follower = lead_weights.FollowReader(theirs, channel, LIKE).start()
  lead = lead_weights.LeadReader(directory / 'weights', channel)
  return lead, follower, theirs


def test_both_read_the_version_of_process_0(tmp_path, publisher, channel):
  lead, follower, _ = both(tmp_path, channel)
  for step in range(3):
    publish(publisher, step)
    variables = lead.load(lead.latest(), LIKE)
    theirs = follower.take(lead.numbers.of(variables))
    assert variables['w'][0] == theirs['w'][0] == step
  with pytest.raises(LookupError):
    follower.take(0)


@pytest.mark.parametrize(
  ('error', 'found'),
  [
    (CorruptCheckpoint('CRC-32 differs'), CheckpointError),
    (OSError('the storage is away'), OSError),
    (KeyError('w'), Stopped),
  ],
)
def test_what_one_cannot_read_nobody_serves(tmp_path, publisher, channel, error, found):
  """As the same error at process 0, so that it waits or tries again as alone; the
  version that the other has read does not stay in its memory."""
  lead, follower, theirs = both(tmp_path, channel)
  version = publish(publisher, 1)
  theirs.error = error
  with pytest.raises(found, match=str(error.args[0])):
    lead.load(version, LIKE)
  theirs.error = None
  assert follower.take(lead.numbers.of(lead.load(version, LIKE)))['w'][0] == 1


def test_what_process_0_cannot_read_the_others_drop(tmp_path, publisher, channel):
  lead, follower, _ = both(tmp_path, channel)
  first, second = publish(publisher, 1), publish(publisher, 2)
  lead.load(first, LIKE)
  lead._root, intact = lead._root / 'nothing', lead._root
  with pytest.raises(MissingCheckpoint):
    lead.load(second, LIKE)
  lead._root = intact
  lead.load(second, LIKE)  # so the command to drop has been carried out
  assert sorted(follower._read) == [0, 2]


def test_older_weights_are_dropped(tmp_path, publisher, channel):
  """A version that was overtaken before the engine took it would stay for ever."""
  lead, follower, _ = both(tmp_path, channel)
  kept = [lead.load(publish(publisher, step), LIKE) for step in range(3)]
  follower.take(lead.numbers.of(kept[2]))
  assert not follower._read
  with pytest.raises(LookupError):
    follower.take(1)


def test_numbers_keep_no_weights():
  """The engine has two versions at most; a third would not fit."""
  numbers = lead_weights.Numbers()
  variables = {'w': jax.numpy.ones(3)}
  numbers.assign(numbers.new(), variables)
  assert numbers.of(dict(variables)) == 0
  leaf = weakref.ref(variables['w'])
  del variables
  gc.collect()
  assert leaf() is None
  with pytest.raises(LookupError):
    numbers.of({'w': jax.numpy.ones(3)})
