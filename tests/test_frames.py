"""Frames: what is packed is what is read, and other bytes are `Malformed`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import frames

DTYPES = ('bool', 'int8', 'int64', 'uint32', 'float32', 'bfloat16', 'float8_e4m3fn')
FIELDS = dict(number=2**53, name='é', none=None, more=[1, {'a': 0.5}])
ARRAYS = {
  'scalar': np.float32(3.0),
  'empty': np.zeros((0, 3), np.int16),
  'turned': np.arange(6, dtype=np.int32).reshape(2, 3).T,
  **{name: np.arange(5).astype(jnp.dtype(name)) for name in DTYPES},
}


def test_what_is_packed_is_read():
  frame = frames.decode(frames.pack('all', ARRAYS, **FIELDS))
  assert (frame.kind, frame.fields, list(frame.arrays)) == ('all', FIELDS, list(ARRAYS))
  for name, array in ARRAYS.items():
    assert frame.arrays[name].dtype == array.dtype, name
    np.testing.assert_array_equal(frame.arrays[name], array)


@given(st.integers(0, 10**6), st.integers(0, 255), st.integers(0, 10**6))
def test_damaged_bytes_are_a_frame_or_malformed(at, value, cut):
  data = bytearray(frames.pack('all', ARRAYS, **FIELDS))
  data[at % len(data)] = value
  for found in (data, data[: cut % len(data)]):
    try:
      assert isinstance(frames.decode(found), frames.Frame)
    except frames.Malformed:
      pass


def test_what_a_reader_expects():
  frame = frames.decode(frames.pack('ask', dict(x=np.zeros((2, 3))), n=7, b=True))
  assert frame.integer('n', most=7) == 7
  assert frame.array('x', np.float64, (None, 3)).shape == (2, 3)
  assert frame.array('y', np.float64, (), optional=True) is None
  for field in ('b', 'missing'):
    with pytest.raises(frames.Malformed, match=f'ask: {field} must be'):
      frame.integer(field)
  for dtype, shape in ((np.float32, (2, 3)), (np.float64, (2,)), (np.float64, (3, 3))):
    with pytest.raises(frames.Malformed, match='ask: x must be an array'):
      frame.array('x', dtype, shape)
  with pytest.raises(frames.Malformed, match='y'):
    frame.array('y', np.float64, ())


def test_bounds_of_the_sender():
  """Sending raises at once for what no receiver would take."""
  with pytest.raises(ValueError, match='a header of'):
    frames.pack('all', text='x' * frames.MAX_HEADER_BYTES)
