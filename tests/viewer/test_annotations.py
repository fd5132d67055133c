"""The file of annotations: writes that are cut off cost their own note and no other."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from m2jax.viewer.annotations import FILE, Annotations

_TEXTS = st.text(min_size=1, max_size=30).filter(str.strip)


def texts(path, session='s'):
  """The notes that a reader finds, and one that begins now."""
  return [n['text'] for n in Annotations(path).of(session)]


@settings(deadline=None, max_examples=6)
@given(st.lists(_TEXTS, min_size=1, max_size=3), _TEXTS)
@example(['{"', 'a\nb'], '"session":"s"}')
def test_a_torn_note_costs_no_other(tmp_path_factory, before, torn):
  """A process killed in its write leaves a part of a line without its end: whatever the
  part, every note before and after it is found, by those who read meanwhile too."""
  path = tmp_path_factory.mktemp('torn') / FILE
  writer = Annotations(path)
  for text in before:
    writer.note('s', text)
  whole = path.read_bytes()
  writer.note('s', torn)
  line = path.read_bytes()[len(whole) :]
  for cut in range(1, len(line)):
    path.write_bytes(whole + line[:cut])
    reader = Annotations(path)
    assert [n['text'] for n in reader.of('s')] == before
    Annotations(path).note('s', 'after')
    Annotations(path).note('other', 'last')
    # A line that lacks only its end is a whole note.
    kept = [torn] if cut == len(line) - 1 else []
    found = [n['text'] for n in reader.of('s')]
    assert found == texts(path) == [*before, *kept, 'after'], cut
    assert texts(path, 'other') == ['last']


@pytest.mark.parametrize('how', ['short', 'full'])
def test_a_failed_note_leaves_nothing(tmp_path, monkeypatch, how):
  """Who was told that the disk is full may write the note again: it is there once."""
  path, write = tmp_path / FILE, os.write
  annotations = Annotations(path)
  annotations.note('s', 'before')
  writes = []

  def fail(fd, data):
    writes.append(data)
    if len(writes) == 1 and how == 'short':
      return write(fd, data[:-1])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch:
    patch.setattr(os, 'write', fail)
    with pytest.raises(OSError, match='No space'):
      annotations.note('s', 'again')
  assert writes and texts(path) == ['before']
  annotations.note('s', 'again')
  assert texts(path) == ['before', 'again']


def test_flags_of_strangers(tmp_path, monkeypatch):
  """Lines with unknown flags, or without one, are skipped; the number is bounded, and a
  flag can still be removed."""
  path = tmp_path / FILE
  annotations = Annotations(path)
  annotations.flag('s', 'hacked', True)
  with open(path, 'a') as file:
    for record in ('{"flag": "<b>", "on": true}', '{"flag": {}}', '{}', '[]'):
      file.write(record.replace('{', '{"session": "t", "kind": "flag",', 1) + '\n')
    file.write('{"session": "t", "kind": "flag", "flag": "look", "on": true}\n')
  assert annotations.flagged() == {'s': ['hacked'], 't': ['look']}
  monkeypatch.setattr('m2jax.viewer.annotations.MAX_FLAGGED', 2)
  with pytest.raises(ValueError, match='trajectories have one'):
    annotations.flag('u', 'look', True)
  annotations.flag('t', 'hacked', True)
  annotations.flag('s', 'hacked', False)
  annotations.flag('u', 'look', True)
  assert Annotations(path).flagged() == {'t': ['hacked', 'look'], 'u': ['look']}
