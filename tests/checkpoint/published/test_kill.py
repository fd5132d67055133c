"""Wherever a publisher is killed, readers see whole versions; the next one goes on."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import signal
import sys
import threading

import pytest

from m2jax.checkpoint import MissingCheckpoint, published
from tests import processes
from tests.checkpoint.published.publish_loop import FULL_EVERY, check, variables

EVENTS = ('open', 'os.mkdir', 'os.rename', 'os.remove', 'os.rmdir', 'shutil.rmtree')


class Copies:
  """Copies a directory before every operation on its files: what a kill leaves there.

  Python reports the operations as audit events, whose hooks cannot be removed.
  """

  def __init__(self, directory: pathlib.Path, to: pathlib.Path):
    self._directory, self._to, self._active = directory, to, False
    self.count = 0
    self._lock, self._copying = threading.Lock(), threading.local()
    sys.addaudithook(self._hook)

  @contextlib.contextmanager
  def taking(self):
    self._active = True
    try:
      yield
    finally:
      self._active = False

  def _hook(self, event, args):
    if not self._active or event not in EVENTS or str(self._directory) not in str(args):
      return
    if event == 'open' and 'w' not in str(args[1]) and 'a' not in str(args[1]):
      return
    if getattr(self._copying, 'on', False):
      return
    with self._lock:  # other threads' operations wait, and have copies of their own
      self._copying.on = True
      for _ in range(20):  # tensorstore's threads may delete what is being copied
        copy = self._to / str(self.count)
        try:
          shutil.copytree(self._directory, copy)
        except (shutil.Error, OSError):
          shutil.rmtree(copy, ignore_errors=True)
        else:
          self.count += 1
          break
      self._copying.on = False


def test_the_directory_before_every_file_operation(tmp_path):
  """Publishing a difference, and a whole version that makes old ones be deleted."""
  directory = tmp_path / 'w'
  copies = Copies(directory, tmp_path / 'copies')
  committed = []  # by copy, the versions of which it has at least one
  with published.Publisher(directory, full_every=FULL_EVERY, keep_full=1) as one:
    for step in range(1, 4):
      one.publish(variables(step), step)
    with copies.taking():
      for step in (4, 5, 6):
        one.publish(variables(step), step)
        committed += [step - 1] * (copies.count - len(committed))
  assert copies.count > 40
  for number, least in enumerate(committed):
    copy = tmp_path / 'copies' / str(number)
    reader = published.Reader(copy)
    found = reader.latest()
    assert found.step in (least, least + 1), number
    check(reader.load(found), found.step)
    if number % 8:
      continue
    with published.Publisher(copy, full_every=FULL_EVERY) as restarted:
      restarted.publish(variables(9), 9, lineage=1)
    check(reader.load(reader.wait(found, 0)), 9)


def sweep(directory, points):
  """Kills a child at each point while this process reads; the next one goes on."""
  reader, last = published.Reader(directory, poll_s=0.001), None
  for pattern, count in points:
    child = processes.start(
      'tests.checkpoint.published.publish_loop', directory, 8, pattern, count
    )
    try:
      while child.poll() is None:
        found = reader.wait(last, 0.02)
        if found is not None:
          with contextlib.suppress(MissingCheckpoint):
            check(reader.load(found), found.step)
            last = found
    finally:
      child.kill()
    out, err = child.communicate()
    assert child.returncode == -signal.SIGKILL, f'{pattern} was never reached: {err}'
    lines = [line for line in out.splitlines(keepends=True) if line.endswith('\n')]
    done = max((int(line.split()[1]) for line in lines), default=0)
    found = reader.latest()
    if found is None:  # it died in its first version
      assert not done and last is None
      continue
    assert found.step >= done
    check(reader.load(found), found.step)


def test_killed_around_the_announcement(tmp_path):
  """Right before the announcement of a difference and of a whole version, and while old
  versions are deleted."""
  points = [
    (r'os\.rename .*version\.json', 3),
    (r'os\.rename .*version\.json', 4),
    (r'os\.remove .*version\.json', 1),
  ]
  sweep(tmp_path, points)


@pytest.mark.long
@pytest.mark.parametrize(
  'event', ['os.mkdir', 'open .* [wa]', 'os.rename', 'os.remove']
)
def test_killed_at_many_file_operations(tmp_path, event):
  sweep(tmp_path, [(event, count) for count in (11, 7, 5, 3, 2, 1)])
