"""Arithmetic of slices agrees with xpk's table, and with itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import topology
from tests.launch.record import RECORDED

_XPK = json.loads(RECORDED.read_text())['slices']
_SHAPES = [name.removeprefix('v5p-') for name in _XPK if 'x' in name]


@pytest.mark.parametrize('text', ['v5p-8', 'v5p:2x2x1'])
def test_names_count_tensorcores_and_shapes_count_chips(text):
  """v5p-8 is 4 chips on one host, not 8."""
  slice = topology.parse(text)
  assert (slice.chips, slice.hosts, slice.topology) == (4, 1, '2x2x1')
  assert (slice.accelerator_type, str(slice)) == ('v5p-8', 'v5p:2x2x1')


def test_every_slice_is_as_xpk_has_it():
  """Shape, hosts and the meaning of a count are those of the tool that is called."""
  named = 0
  for name, (shape, hosts, chips_per_host) in _XPK.items():
    is_shape = 'x' in name
    if not is_shape and int(name.removeprefix('v5p-')) > 12288:
      continue  # unsupported: see the next test
    slice = topology.parse(name.replace('-', ':') if is_shape else name)
    assert (slice.topology, slice.hosts) == (shape, hosts), name
    assert chips_per_host == topology.CHIPS_PER_HOST
    named += not is_shape
    if not is_shape:
      assert slice.accelerator_type == name
  assert named > 50


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('v5p:4x4x5', 'multiples of 4'),
    ('v5p:8x4x4', 'smallest first'),
    ('v5p:16x24x28', '140 cubes'),
    ('v5p:4x4', 'AxBxC'),
    ('v5p-7', 'no slice is called v5p-7'),
    ('v5p-16384', 'no slice is called'),
    ('v6e-8', 'other generations'),
    ('v6e:4x4x4', 'other generations'),
    ('', 'AxBxC'),
  ],
)
def test_what_is_no_slice_is_refused(text, message):
  """A mistyped topology would wait in a queue for a slice that never comes."""
  with pytest.raises(ValueError, match=message):
    topology.parse(text)


@given(st.sampled_from(_SHAPES))
def test_a_name_that_means_another_shape_is_refused(shape):
  """gcloud gets only a count: v5p-512 is 4x8x8, never 4x4x16."""
  slice = topology.parse(f'v5p:{shape}')
  try:
    name = slice.accelerator_type
  except ValueError as error:
    assert shape in str(error)
  else:
    assert topology.parse(name) == slice
