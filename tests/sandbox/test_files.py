"""The host's side of a workspace, on its own directory: exactness and path rules."""

from __future__ import annotations

import os
import stat
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.sandbox import api, archive, files

_NAME = st.text('ab.-é ', min_size=1, max_size=4).filter(lambda n: n not in ('.', '..'))
_PATHS = st.dictionaries(
  st.lists(_NAME, min_size=1, max_size=3).map('/'.join),
  st.tuples(st.binary(max_size=2000), st.sampled_from([0o644, 0o755, 0o600])),
  max_size=8,
)


def _without_conflicts(tree: dict) -> dict:
  """Drops files that would be directories of others."""
  return {p: v for p, v in tree.items() if not any(q.startswith(p + '/') for q in tree)}


def _listing(root: str) -> dict:
  found = {}
  for directory, _, names in os.walk(root):
    for name in names:
      path = os.path.join(directory, name)
      with open(path, 'rb') as file:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        found[os.path.relpath(path, root)] = (file.read(), mode)
  return found


@settings(deadline=None, max_examples=30)
@given(_PATHS.map(_without_conflicts), _PATHS.map(_without_conflicts))
def test_snapshot_restores_any_tree(before, after):
  """Whatever happened in between, restore gives back content and modes exactly."""
  with tempfile.TemporaryDirectory() as root:
    fd = os.open(root, os.O_RDONLY)
    try:
      tree = files.Tree(fd, None)
      for path, (data, mode) in before.items():
        tree.write(path, data, mode)
        assert tree.read(path, len(data)) == data
      assert _listing(root) == before
      snapshot = archive.pack(fd, 1 << 20)
      archive.clear(fd)
      assert os.listdir(root) == []
      for path, (data, mode) in after.items():
        tree.write(path, data, mode)
      archive.clear(fd)
      archive.unpack(fd, None, snapshot)
      assert _listing(root) == before
    finally:
      os.close(fd)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(['..', 'a', '.', '', '/']), max_size=5).map('/'.join))
def test_no_path_leaves_the_workspace(path):
  """Any mix of dots and slashes either stays inside or is refused."""
  with tempfile.TemporaryDirectory() as outer:
    root = os.path.join(outer, 'root')
    os.mkdir(root)
    fd = os.open(root, os.O_RDONLY)
    try:
      files.Tree(fd, None).write(path, b'x')
    except api.SandboxPathError:
      pass
    finally:
      os.close(fd)
    assert os.listdir(outer) == ['root']


def test_descriptors_are_not_leaked(tmp_path):
  """Thousands of reads, failing ones included, must not use up descriptors."""
  os.symlink('/etc/passwd', tmp_path / 'link')
  os.mkfifo(tmp_path / 'pipe')
  fd = os.open(tmp_path, os.O_RDONLY)
  tree = files.Tree(fd, None)
  before = len(os.listdir('/proc/self/fd'))
  for _ in range(20):
    tree.write('d/e/f', b'x')
    for path in ('link', 'link/x', 'pipe', 'none', 'd', 'd/e/f/g'):
      with pytest.raises((api.SandboxPathError, FileNotFoundError)):
        tree.read(path, 10)
    snapshot = archive.pack(fd, 1 << 20)
    archive.clear(fd)
    archive.unpack(fd, None, snapshot)
    os.symlink('/etc/passwd', tmp_path / 'unread')
    with pytest.raises(api.SandboxPathError):
      archive.pack(fd, 2000)
    archive.clear(fd)
    archive.unpack(fd, None, snapshot)
    os.mkfifo(tmp_path / 'pipe')
  assert len(os.listdir('/proc/self/fd')) == before
  os.close(fd)
