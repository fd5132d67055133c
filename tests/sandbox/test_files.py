"""The host's side of a workspace, on its own directory: exactness and path rules."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
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


@given(st.lists(st.sampled_from(['..', 'a', '.', '', '/']), max_size=5).map('/'.join))
def test_no_path_leaves_the_workspace(path):
  """Any mix of dots and slashes either stays inside or is rejected."""
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


def _round_trip(source: Path, target: Path, max_bytes: int = 1 << 24) -> bytes:
  fds = [os.open(place, os.O_RDONLY) for place in (source, target)]
  try:
    packed = archive.pack(fds[0], max_bytes)
    archive.unpack(fds[1], None, packed)
    return packed
  finally:
    for fd in fds:
      os.close(fd)


@pytest.fixture
def places(tmp_path):
  """A directory to pack and an empty one to unpack into."""
  for name in ('from', 'to'):
    (tmp_path / name).mkdir()
  return tmp_path / 'from', tmp_path / 'to'


def test_holes_stay_holes(places):
  """A terabyte of holes costs neither an archive nor a workspace its size."""
  source, target = places
  size = 1 << 40
  with open(source / 'f', 'wb') as file:
    file.truncate(size)
    for offset, data in ((0, b'first'), (1 << 30, b'middle'), (size - 4, b'last')):
      file.seek(offset)
      file.write(data)
  (source / 'empty').write_bytes(b'')
  with open(source / 'hole', 'wb') as file:
    file.truncate(12345)
  packed = _round_trip(source, target)
  assert len(packed) < 1 << 17
  info = os.stat(target / 'f')
  assert info.st_size == size and info.st_blocks * 512 < 1 << 17
  with open(target / 'f', 'rb') as file:
    for offset, data in ((0, b'first'), (1 << 30, b'middle'), (size - 4, b'last')):
      file.seek(offset)
      assert file.read(len(data)) == data
    file.seek(1 << 20)
    assert file.read(8) == bytes(8)
  assert (target / 'hole').read_bytes() == bytes(12345)
  assert (target / 'empty').read_bytes() == b''


def test_packed_holes_are_what_tar_reads(places):
  """The archive is a tar: GNU tar gives the same files, where it is installed."""
  source, target = places
  with open(source / 'f', 'wb') as file:
    file.write(b'x' * 5000)
    file.seek(1 << 22)
    file.write(b'y' * 5000)
  (source / ('n' * 200)).write_bytes(b'long name')
  fd = os.open(source, os.O_RDONLY)
  packed = archive.pack(fd, 1 << 20)
  os.close(fd)
  if not shutil.which('tar'):
    pytest.skip('no tar')
  subprocess.run(['tar', 'x', '-C', target], input=packed, check=True)
  assert _listing(target) == _listing(source)


def test_hard_links_stay_one_file(places):
  """Names of one file are names of one file afterwards, across directories too."""
  source, target = places
  (source / 'a').mkdir()
  (source / 'a' / 'x').write_bytes(b'1')
  (source / 'b').mkdir()
  os.link(source / 'a' / 'x', source / 'b' / 'y')
  os.link(source / 'a' / 'x', source / 'z')
  _round_trip(source, target)
  numbers = {(target / path).stat().st_ino for path in ('a/x', 'b/y', 'z')}
  assert len(numbers) == 1 and (target / 'a/x').stat().st_nlink == 3


def test_depth(places):
  """Deeper than Python recurses, than descriptors last, than a path may be long."""
  source, target = places
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  depth = 1200

  def descend(place: Path, make: bool) -> int:
    fd = os.open(place, os.O_RDONLY)
    for _ in range(depth):
      if make:
        os.mkdir('directory', dir_fd=fd)
      inner = os.open('directory', os.O_RDONLY, dir_fd=fd)
      os.close(fd)
      fd = inner
    return fd

  bottom = descend(source, True)
  os.close(os.open('f', os.O_CREAT | os.O_WRONLY, 0o640, dir_fd=bottom))
  os.close(bottom)
  resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
  try:
    _round_trip(source, target)
    bottom = descend(target, False)
    assert stat.S_IMODE(os.stat('f', dir_fd=bottom).st_mode) == 0o640
    os.close(bottom)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for place in places:  # pytest cannot
      fd = os.open(place, os.O_RDONLY)
      archive.clear(fd)
      os.close(fd)
      assert not os.listdir(place)


_NS = 10**9


@pytest.mark.parametrize(
  'time_ns', [0, 1, -1, -5 * _NS + 7, 4 * 10**9 * _NS + 3, 2**62, -(2**40) * _NS]
)
def test_times(places, time_ns):
  """Any time that the file system takes, before 1970 and to the nanosecond."""
  source, target = places
  for name in ('file', 'directory/inner'):
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(b'x')
  for name in ('file', 'directory'):
    os.utime(source / name, ns=(time_ns, time_ns))
  _round_trip(source, target)
  for name in ('file', 'directory'):
    assert (target / name).stat().st_mtime_ns == (source / name).stat().st_mtime_ns


def test_size_is_bounded(places):
  """Data, and the names of a deep tree, count; nothing larger is ever held."""
  source, target = places
  for number in range(8):
    (source / str(number)).write_bytes(bytes(range(256)) * 256)
  with pytest.raises(api.SandboxPathError, match='larger'):
    _round_trip(source, target, 1 << 18)
  for number in range(8):
    (source / str(number)).unlink()
  place = source
  for _ in range(12):
    place = place / ('n' * 250)
    place.mkdir()
  with pytest.raises(api.SandboxPathError, match='larger'):
    _round_trip(source, target, 1 << 14)


def test_odd_names(places):
  """Bytes that are no text, line breaks, leading dashes: names like any other."""
  source, target = places
  names = [b'-x', b'a\nb', b'\xff\xfe', b' ', b'~', b'...', 'é'.encode(), b'\x01']
  for name in names:
    with open(os.path.join(os.fsencode(source), name), 'wb') as file:
      file.write(name)
  _round_trip(source, target)
  assert sorted(os.listdir(os.fsencode(target))) == sorted(names)


def test_descriptors_are_not_leaked(tmp_path, no_garbage):
  """Reads, failing ones included, must not use up descriptors."""
  os.symlink('/etc/passwd', tmp_path / 'link')
  os.mkfifo(tmp_path / 'pipe')
  fd = os.open(tmp_path, os.O_RDONLY)
  tree = files.Tree(fd, None)
  before = len(os.listdir('/proc/self/fd'))
  for _ in range(5):
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
