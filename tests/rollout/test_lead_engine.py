"""Process 0's calls of the engine, made again by a follower from what was sent."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from m2jax import frames
from m2jax.forge.errors import Stopped
from m2jax.forge.processes import lead_engine, lead_weights
from m2jax.rollout.api import EngineLost, GenerateRequest, SamplingParams
from tests.rollout.engine.test_engine import prompt

TIMEOUT_S = 120


class Sent:
  """`forge.processes.commands.Commands` within one process: frames, in order."""

  several = True

  def __init__(self):
    self.frames, self.failure = [], None

  def send(self, do, arrays=None, **fields):
    if self.failure:
      raise self.failure
    self.frames.append(frames.pack(do, arrays, **fields))

  def forget(self):
    pass

  def receive(self):
    return frames.decode(self.frames.pop(0))


class Recorded:
  """An engine, and the tokens that its decode calls return."""

  def __init__(self, engine):
    self._engine = engine
    self.sampled, self.states = [], []

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def generate_many(self, *args, **kwargs):
    state, sampled = self._engine.generate_many(*args, **kwargs)
    self.sampled.append(jax.device_get(sampled))
    self.states.append(jax.device_get(state.slots))
    return state, sampled


def numbered(variables):
  """Numbers of which 0 is these weights."""
  numbers = lead_weights.Numbers()
  numbers.assign(numbers.new(), variables)
  return numbers


def test_a_follower_makes_the_same_calls(engine, variables, serve):
  """A program of a mesh needs all its processes: with other arguments, or in another
  order, they would wait for each other for ever, or draw other tokens."""
  sent = Sent()
  ours, theirs = Recorded(engine), Recorded(engine)
  scheduler = serve(lead_engine.LeadEngine(ours, sent, numbered(variables)))
  # A shared prefix (copied), more requests than slots, greedy and drawn.
  handles = [
    scheduler.submit(
      GenerateRequest(
        prompt(i % 3, 24) + prompt(i, 2 + i),
        SamplingParams(max_tokens=5 + i, temperature=float(i % 2), seed=i, top_k=7),
      )
    )
    for i in range(8)
  ]
  for handle in handles:
    assert len(handle.future.result(TIMEOUT_S).tokens)
  scheduler.stop()
  names = [frames.decode(data).kind for data in sent.frames]
  assert {'load_parts', 'init_decode_state', 'prefill_rows', 'admit'} < set(names)
  sent.send('stop', reason='')
  lead_engine.follow(theirs, [variables].__getitem__, sent)
  assert len(ours.sampled) > 3 and not sent.frames
  for record in ('sampled', 'states'):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(theirs, record), getattr(ours, record)
    )


def test_the_loss_of_a_process_is_final(engine, variables, serve):
  """No retry: whether the other processes have made the call is unknown."""
  sent = Sent()
  leading = lead_engine.LeadEngine(engine, sent, numbered(variables))
  scheduler = serve(leading, max_failures=100)
  sent.failure = Stopped('process 1 stopped: out of memory')
  handle = scheduler.submit(GenerateRequest(prompt(1, 5), SamplingParams(max_tokens=3)))
  with pytest.raises(Exception, match='process 1 stopped: out of memory'):
    handle.future.result(TIMEOUT_S)
  assert leading.lost and not scheduler.alive
  assert 'process 1 stopped' in scheduler.stopped_reason
  with pytest.raises(EngineLost):
    leading.init_decode_state()


def test_new_weights_are_exchanged_in_all_processes(engine, variables, serve):
  """In parts, between the same calls, while a request is in flight: else a call would
  be of different weights on different devices."""
  sent, numbers = Sent(), numbered(variables)
  newer = jax.tree.map(lambda x: np.asarray(x) * np.float32(1.5), variables)
  ours, theirs = Recorded(engine), Recorded(engine)
  leading = lead_engine.LeadEngine(ours, sent, numbers)
  scheduler = serve(leading, weights_part_bytes=20_000)
  numbers.assign(numbers.new(), newer)
  updates = iter([1])

  def update(_):  # with the first tokens
    for version in updates:
      scheduler.update_weights(newer, version)

  request = GenerateRequest(prompt(1, 24), SamplingParams(max_tokens=100, seed=1))
  handle = scheduler.submit(request, update)
  versions = handle.future.result(TIMEOUT_S).versions
  scheduler.stop()
  assert set(versions) == {0, 1}
  calls = [frames.decode(data) for data in sent.frames]
  names = [call.kind for call in calls]
  assert [c.fields['number'] for c in calls if c.kind == 'load_parts'] == [0, 1]
  between = names[names.index('load_parts', 2) :]
  parts = between.count('load_part')
  last = len(between) - 1 - between[::-1].index('load_part')
  assert parts > 2 and 'generate_many' in between[:last]
  sent.send('stop', reason='')
  lead_engine.follow(theirs, [variables, newer].__getitem__, sent)
  for record in ('sampled', 'states'):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(theirs, record), getattr(ours, record)
    )


def test_weights_that_the_others_have_not_are_refused(engine, variables):
  """The other processes would go on with the old ones: an error, not another policy."""
  leading = lead_engine.LeadEngine(engine, Sent(), numbered(variables))
  leading.load_params(variables)
  with pytest.raises(LookupError, match='have not read these weights'):
    leading.load_params(jax.tree.map(np.array, variables))
