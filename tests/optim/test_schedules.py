"""Schedules against hand-computed values and what must hold for all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.optim.schedules import KINDS, ScheduleConfig, multiplier


def values(config, steps):
  return multiplier(config)(np.asarray(steps, np.int32))


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
  v = np.asarray(values(config, range(64)))
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
