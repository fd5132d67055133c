"""The difference of two arrays restores every bit of the newer one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.checkpoint.published import delta

DTYPES = (np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32)
SHAPES = ((), (0,), (7,), (3, 5), (2, 3, 4), (1, 600))


def patterns(rng, shape, dtype):
  """Any bits: NaNs with payloads, infinities, -0.0 and subnormals among them."""
  words = np.dtype(f'u{np.dtype(dtype).itemsize}')
  out = rng.integers(0, 2 ** (8 * words.itemsize), shape, np.uint64).astype(words)
  return np.asarray(out).view(dtype)


@st.composite
def pairs(draw):
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
  old, new = patterns(rng, shape, dtype), patterns(rng, shape, dtype)
  same = rng.random(shape) < draw(st.sampled_from([0.0, 0.4, 0.6, 0.99, 1.0]))
  return old, np.where(same, delta.bits(old), delta.bits(new)).view(dtype)


@settings(max_examples=200)
@given(pairs())
def test_bits_are_restored(pair):
  """Old bits XOR the decoded difference are the new bits, whatever they mean as
  numbers; nothing is stored exactly if no bit differs; the count is of the values that
  do."""
  old, new = pair
  differ = int(np.sum(delta.bits(old) != delta.bits(new)))
  found = delta.encode(old, new)
  if not differ:
    assert found is None
    return
  payload, changed = found
  assert changed == differ
  xor = delta.decode(payload, old.shape, old.dtype)
  np.testing.assert_array_equal(delta.bits(old) ^ xor, delta.bits(new))


def test_signs_of_zero_and_nans_count_as_changes():
  """-0.0 == 0.0 and NaN != NaN as numbers; as bits it is the other way round."""
  old = np.array([0.0, np.nan, 1.0], np.float32)
  new = np.array([-0.0, np.nan, 1.0], np.float32)
  payload, changed = delta.encode(old, new)
  assert changed == 1
  xor = delta.decode(payload, (3,), np.float32)
  assert xor.tolist() == [1 << 31, 0, 0]


@given(
  st.lists(st.integers(0, 9), max_size=4),
  st.sampled_from([1, 2, 8]),
  st.integers(1, 90),
)
def test_boxes_cover_an_array_once(shape, itemsize, limit):
  """Every value is in one box, and no box needs more memory than allowed."""
  seen = np.zeros(shape, int)
  for box in delta.boxes(shape, itemsize, limit):
    assert seen[box].size * itemsize <= max(limit, itemsize)
    seen[box] += 1
  assert (seen == 1).all()


@given(st.data())
def test_a_difference_of_one_mesh_applies_to_the_parts_of_another(data):
  """Boxes cut as the publisher's shards, applied where they meet a reader's shards."""
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  shape = (6, 4)
  old, new = (rng.integers(0, 3, shape).astype(np.uint16) for _ in range(2))
  cuts = [st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 4])]
  grids = [[data.draw(cut) for cut in cuts] for _ in range(2)]

  def shards(grid):
    steps = [n // parts for n, parts in zip(shape, grid, strict=True)]
    for i in range(grid[0]):
      for j in range(grid[1]):
        yield tuple(
          slice(k * s, (k + 1) * s) for k, s in zip((i, j), steps, strict=True)
        )

  parts = [(box, old[box].copy()) for box in shards(grids[1])]
  for at in shards(grids[0]):
    found = delta.encode(old[at], new[at])
    if found is None:
      continue
    xor = delta.decode(found[0], old[at].shape, old.dtype)
    for box, values in parts:
      common = delta.intersection(at, box)
      if common is not None:
        inside = delta.shifted(common, [s.start for s in box], -1)
        values[inside] ^= xor[delta.shifted(common, [s.start for s in at], -1)]
  for box, values in parts:
    np.testing.assert_array_equal(values, new[box])


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.05, 1.0]))
def test_damaged_payloads_are_errors(seed, share):
  """Whatever bytes arrive: a ValueError, or values of the right shape, which a checksum
  then judges; never another exception, and no array larger than the box."""
  rng = np.random.default_rng(seed)
  old = rng.integers(0, 100, 300).astype(np.uint16)
  new = np.where(rng.random(300) < share, old + 1, old).astype(np.uint16)
  payload = bytearray(delta.encode(old, new)[0])
  if rng.random() < 0.5:
    payload = payload[: rng.integers(0, len(payload))]
  else:
    payload[rng.integers(len(payload))] ^= 1 << rng.integers(8)
  try:
    assert delta.decode(bytes(payload), (300,), np.uint16).shape == (300,)
  except ValueError:
    pass


def test_a_payload_of_another_box_is_an_error():
  big = delta.encode(np.zeros(100, np.uint16), np.ones(100, np.uint16))[0]
  with pytest.raises(ValueError, match='200 bytes, for 50 values of 2'):
    delta.decode(big, (50,), np.uint16)
  with pytest.raises(ValueError, match='100 values instead of 200'):
    delta.decode(big, (200,), np.uint16)
