"""JSON that later stages cannot process is rejected, with its place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.text import strict_json
from tests.text.examples import MANY

SCALARS = (
  st.none()
  | st.booleans()
  | st.integers(-(2**63), 2**64 - 1)
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(max_size=4)
)
VALUES = st.recursive(
  SCALARS,
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3)
  ),
  max_leaves=12,
)


@MANY
@given(VALUES)
def test_reads_what_json_is(value):
  """Whatever is JSON and can be encoded comes through unchanged."""
  assert strict_json.loads(json.dumps(value)) == value
  assert strict_json.loads(json.dumps(value, ensure_ascii=False).encode()) == value


def nested(depth):
  return '{"a":' * depth + '1' + '}' * depth


@pytest.mark.parametrize(
  ('text', 'path'),
  [
    ('{"a": [1, {"b": "\\ud800"}]}', 'a[1].b'),
    ('{"a": {"\\udfff": 1}}', 'a'),
    ('{"a": NaN}', 'a'),
    ('[-Infinity]', '[0]'),
    ('{"a": [0, 1e999]}', 'a[1]'),
    ('{"a": 18446744073709551616}', 'a'),
    ('{"a": [{}, {"b": 1, "c": [2], "b": 3}]}', 'a[1].b'),
    ('{"x": ["\\"{", {"a\\\\": 0}], "t": ' + nested(101) + '}', 't' + '.a' * 7 + '.…'),
    ('{"x": "[{", "t": ' + nested(5000) + '}', 't' + '.a' * 7 + '.…'),
    ('{"x": 1, "t": ' + '[' * 200_000, 't' + '[0]' * 7 + '.…'),
  ],
)
def test_names_the_place(text, path):
  """Whoever wrote the request has to find the fault in it."""
  with pytest.raises(strict_json.JsonFault) as fault:
    strict_json.loads(text)
  assert fault.value.path == path
  assert str(fault.value).isprintable()


@pytest.mark.parametrize(
  'data',
  [b'', b'{', b'\xff', b'\xed\xa0\x80', '"\ud800"', '9' * 5000, '{"a" 1}', '1 2'],
)
def test_refuses_what_is_no_json(data):
  """Bytes that are not UTF-8, and texts that are not JSON."""
  with pytest.raises(strict_json.JsonFault):
    strict_json.loads(data)


def test_depth_is_that_of_objects_and_lists():
  """The limit is exact, and a limit of one's own counts the same way."""
  assert strict_json.loads(nested(100))
  with pytest.raises(strict_json.JsonFault, match='100 objects'):
    strict_json.loads(nested(101))
  assert strict_json.loads(nested(3), max_depth=3)
  with pytest.raises(strict_json.JsonFault):
    strict_json.loads(nested(4), max_depth=3)
