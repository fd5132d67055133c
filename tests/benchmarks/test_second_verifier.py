"""The second verifier's opinion of a review does not depend on the answer."""

from __future__ import annotations

import json

import pytest

from benchmarks import second_verifier

_RIGHT = """\
def clamp(value, low, high):
  # The order matters here.
  if value < low:
    return low
  return value


def names(first, /, *more, last=None):
  return [first, *more, last]


def wait(values):
  for value in values:
    if value:
      continue
    return value
"""
CHANGES = {
  'an operator': ('value < low', 'value > low', 3),
  'a name': ('return value\n\n\ndef names', 'return high\n\n\ndef names', 5),
  'a number of statements': ('  return [first', '  first = 1\n  return [first', 9),
  'a keyword': ('last=None', 'last=1', 8),
  'a statement without fields': ('continue', 'break', 15),
}


def _reviewed(tmp_path, changed, line):
  place = tmp_path / 'solution' / 'files'
  place.mkdir(parents=True, exist_ok=True)
  answer = {'path': 'a.py', 'line': line}
  (place / 'review.json').write_text(json.dumps(answer))
  release, after = {'a.py': _RIGHT.encode()}, {'a.py': changed.encode()}
  return second_verifier.reviewed(release, after, {'path': 'a.py'}, tmp_path)


@pytest.mark.parametrize('name', CHANGES)
def test_only_a_line_near_the_change_is_right(tmp_path, name):
  old, new, line = CHANGES[name]
  changed = _RIGHT.replace(old, new)
  assert changed != _RIGHT
  assert _reviewed(tmp_path, changed, line) == ''
  assert 'difference' in _reviewed(tmp_path, changed, line + 40)


def test_a_change_of_comments_alone_is_none(tmp_path):
  assert 'comments' in _reviewed(tmp_path, _RIGHT.replace('order', 'sort'), 2)
