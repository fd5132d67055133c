"""Schedules against hand-computed values and what must hold for all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.optim.schedules import (
  KINDS,
  Clock,
  ScheduleConfig,
  multiplier,
  piecewise,
)


def values(config, steps):
  """Of up to 64 steps, always computed in one shape."""
  steps = np.asarray(steps, np.int32)
  found = np.asarray(multiplier(config)(np.resize(steps, 64)))
  return found[: steps.size].reshape(steps.shape)


def test_hand_computed_values():
  """One known point of each part of each shape."""
  np.testing.assert_allclose(values(ScheduleConfig(), [0, 10**6]), 1)
  warm = ScheduleConfig('constant', warmup_steps=4)
  np.testing.assert_allclose(values(warm, range(6)), [0.25, 0.5, 0.75, 1, 1, 1])
  linear = ScheduleConfig('linear', 2, total_steps=12, final_fraction=0.2)
  np.testing.assert_allclose(
    values(linear, [0, 1, 2, 7, 12, 99]), [0.5, 1, 1, 0.6, 0.2, 0.2], rtol=1e-6
  )
  cosine = ScheduleConfig('cosine', total_steps=8)
  np.testing.assert_allclose(
    values(cosine, [0, 2, 4, 8]), [1, (2 + 2**0.5) / 4, 0.5, 0], atol=1e-6
  )
  wsd = ScheduleConfig('wsd', 2, total_steps=20, decay_steps=8, final_fraction=0.1)
  np.testing.assert_allclose(
    values(wsd, [0, 2, 12, 16, 20]), [0.5, 1, 1, 0.55, 0.1], rtol=1e-6
  )


@settings(deadline=None, max_examples=25)
@given(
  kind=st.sampled_from(KINDS),
  warmup=st.integers(0, 10),
  length=st.integers(2, 40),
  decay=st.integers(1, 40),
  final=st.floats(0, 1),
)
def test_rises_then_falls_within_bounds(kind, warmup, length, decay, final):
  """No schedule leaves (0, 1], jumps at the end, rises after the warm-up, or starts at
  a rate of 0 (a wasted update)."""
  total = warmup + length
  config = ScheduleConfig(kind, warmup, total, min(decay, length), final)
  v = values(config, range(64))
  assert np.all(v >= 0) and np.all(v <= 1 + 1e-6) and v[0] > 0
  assert np.all(np.diff(v[: warmup + 1]) >= -1e-6)
  assert np.all(np.diff(v[warmup:]) <= 1e-6)
  end = 1.0 if kind == 'constant' else final
  np.testing.assert_allclose(v[total:], end, atol=1e-6)


@pytest.mark.parametrize(
  ('fields', 'name'),
  [
    ({'kind': 'exp'}, 'kind'),
    ({'warmup_steps': -1}, 'warmup_steps'),
    ({'kind': 'cosine'}, 'total_steps'),
    ({'kind': 'wsd', 'total_steps': 5, 'decay_steps': 6}, 'decay_steps'),
    ({'final_fraction': 2.0}, 'final_fraction'),
  ],
)
def test_bad_fields_are_named(fields, name):
  """A broken config says which field and what it should be (law 9)."""
  with pytest.raises(ValueError, match=f'ScheduleConfig.{name}='):
    ScheduleConfig(**fields)


segments = st.lists(
  st.tuples(st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=4
).map(tuple)


@given(segments, st.integers(0, 60), st.integers(0, 2000))
def test_clock_counts_tokens(segments, step, tokens):
  """Against adding up update by update; and `step` is the first update that at least
  this number of tokens was consumed before."""
  sizes = [size for number, size in segments for _ in range(number)]
  sizes += [segments[-1][1]] * (2100 - len(sizes))
  clock = Clock(segments)
  assert clock.tokens(step) == sum(sizes[:step])
  first = clock.step(tokens)
  assert clock.tokens(first) >= tokens
  assert first == 0 or clock.tokens(first - 1) < tokens


def test_clock_of_trillions():
  """M2's 29.2T tokens, to the token: more than float32 or int32 hold."""
  size = 1536 * 8192
  clock = Clock(((2_000_000, size), (1, size + 1)))
  assert clock.tokens(2_000_003) == 2_000_003 * size + 3
  assert clock.step(2_000_000 * size + 1) == 2_000_001


@settings(deadline=None, max_examples=40)
@given(segments, st.integers(0, 5), st.integers(1, 30), st.data())
def test_tokens_drive_the_schedule(segments, warmup, length, data):
  """With segments, warm-up and decay advance with the tokens of the updates: by the
  definition over sums of tokens; alike batches give the plain schedule."""
  decay = data.draw(st.integers(1, length))
  total = warmup + length
  config = ScheduleConfig('wsd', warmup, total, decay, 0.25, segments)
  clock = Clock(segments)
  start, end = clock.tokens(total - decay), clock.tokens(total)
  for step in range(total + 3):
    warm = min(1.0, clock.tokens(step + 1) / max(clock.tokens(warmup), 1))
    done = min(max((clock.tokens(step) - start) / (end - start), 0.0), 1.0)
    want = warm * (0.25 + 0.75 * (1 - done))
    assert values(config, step) == pytest.approx(want, rel=1e-5)
  alike = tuple((number, 7) for number, _ in segments)
  plain = ScheduleConfig('wsd', warmup, total, decay, 0.25)
  tokens = ScheduleConfig('wsd', warmup, total, decay, 0.25, alike)
  steps = range(40)
  np.testing.assert_allclose(values(tokens, steps), values(plain, steps), rtol=1e-5)


def test_piecewise():
  """A value holds from its point on, until the next."""
  points = [(0, 0.3), (100, 0.1), (150, 0.0)]
  found = [piecewise(points, tokens) for tokens in (0, 99, 100, 149, 150, 10**14)]
  assert found == [0.3, 0.3, 0.1, 0.1, 0.0, 0.0]


@pytest.mark.parametrize('bad', [(), ((3, 0),), ((-1, 4),)])
def test_bad_segments_are_named(bad):
  """They would count no tokens, or count backwards."""
  with pytest.raises(ValueError, match='segments='):
    Clock(bad)
