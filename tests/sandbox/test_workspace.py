"""Workspaces as a whole: copied in, saved and restored with any contents."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from pathlib import Path

import pytest

from m2jax import sandbox
from m2jax.sandbox import archive

_MIB = 1 << 20
_BACKENDS = ['namespaces', 'rlimit_only']
_LISTING = 'find . -printf "%p %y %m %s %n %l %T@\\n" | sort; cat f; stat -c %b sparse'
_TREE = """
mkdir -p d/e locked; echo content > f; ln f d/hard; ln -s ../f d/link; ln -s /etc out
chmod 640 f; chmod 500 locked; truncate -s 30M sparse; printf end >> sparse
touch -d @-99999999999 d/e; touch -d @99999999999999 d/hard; mkfifo pipe
touch $'line\\nbreak' $'\\xff'; rm pipe; touch -d @1234567.890123456 .
"""


@pytest.mark.parametrize('backend', _BACKENDS)
def test_restore_gives_everything_back(run, make, backend):
  """Holes, hard links, odd times, modes and names come back; what came later goes."""
  box = make(backend=backend)
  assert run(box.exec(_TREE)).returncode == 0
  before = run(box.exec(_LISTING.replace('find .', 'find . -mindepth 1')))
  snapshot = run(box.snapshot())
  assert len(snapshot) < _MIB
  run(box.exec('chmod -R u+w .; rm -rf * ; mkdir -p new; chmod 0 new; echo 2 > g'))
  run(box.restore(snapshot))
  after = run(box.exec(_LISTING.replace('find .', 'find . -mindepth 1')))
  assert after.stdout == before.stdout and 'hard' in after.stdout
  assert run(box.exec('echo 3 >> f; cat d/hard')).stdout == 'content\n3\n'
  assert run(box.read('f')) == b'content\n3\n'
  assert (box.workspace / 'f').read_bytes() == b'content\n3\n'


_DEEP = """
import os
for _ in range(1200):
  os.mkdir('directory')
  os.chdir('directory')
open('bottom', 'w').close()
"""


@pytest.mark.parametrize('backend', _BACKENDS)
def test_a_deep_tree_is_saved_restored_and_removed(run, make, backend):
  """1,200 directories in each other, in a file name of 12,000 bytes."""
  box = make(backend=backend, contents={'deep.py': _DEEP.encode()})
  assert run(box.exec('python3 deep.py')).returncode == 0
  snapshot = run(box.snapshot())
  run(box.restore(snapshot))
  assert run(box.exec('find . | wc -l')).stdout == '1203\n'
  assert run(box.snapshot()) == snapshot
  directory = box.workspace
  run(box.destroy())
  assert not directory.exists()


def _tar(*entries: tuple[str, bytes]) -> bytes:
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode='w') as tar:
    for name, data in entries:
      entry = tarfile.TarInfo(name)
      entry.size = len(data)
      tar.addfile(entry, io.BytesIO(data))
  return buffer.getvalue()


_FAILURES = [
  'no archive',
  'cut',
  'cut between files',
  'leads out',
  'twice',
  'machine fails',
]


@pytest.mark.parametrize(
  'backend, what',
  [
    ('namespaces', 'too large'),  # the weaker mode has no limit of the workspace
    *((backend, what) for backend in _BACKENDS for what in _FAILURES),
  ],
)
def test_a_failed_restore_keeps_the_workspace(run, make, monkeypatch, backend, what):
  """What was there is there still, exactly, and the sandbox goes on."""
  limits = sandbox.Limits(workspace_bytes=4 * _MIB)
  box = make(backend=backend, limits=limits, contents={'f': b'kept', 'd/g': b'too'})
  archives = {
    'too large': _tar(('a', b'x'), ('b', bytes(6 * _MIB))),
    'no archive': b'x' * 10_000,
    'cut': _tar(('a', b'x'), ('b', b'y' * 5000))[:1600],
    'cut between files': _tar(('a', b'x'), ('b', b'y'))[:1024],
    'leads out': _tar(('a', b'x'), ('../../b', b'x')),
    'twice': _tar(('a', b'x'), ('a', b'x')),
    'machine fails': _tar(('a', b'x')),
  }
  if what == 'machine fails':
    unpack = archive.unpack

    def fail_late(*arguments):
      unpack(*arguments)
      raise OSError('the machine failed')

    monkeypatch.setattr(archive, 'unpack', fail_late)
  with pytest.raises((sandbox.SandboxError, OSError)):
    run(box.restore(archives[what]))
  listing = run(box.exec('find . -type f | sort | xargs tail -n +1; echo more > h'))
  assert listing.stdout == '==> ./d/g <==\ntoo\n==> ./f <==\nkept', listing
  assert run(box.read('h')) == b'more\n'
  assert run(box.snapshot()).count(b'kept') == 1


def test_cancelling_a_restore_leaves_one_workspace_or_the_other(run, make):
  """The work goes on to its end; the next call waits for it."""
  box = make(contents={'f': b'before'})
  snapshot = _tar(*((str(n), b'x' * 1000) for n in range(500)))

  async def use():
    restoring = asyncio.create_task(box.restore(snapshot))
    await asyncio.sleep(0.005)
    restoring.cancel()
    return await box.exec('ls | wc -l; ls | wc -l')

  assert run(use()).stdout in ('1\n1\n', '500\n500\n')


def test_a_snapshot_is_bounded(run, make):
  """Names alone could fill any memory: 8,000 directories, 250 characters each."""
  make_deep = _DEEP.replace('1200', '8000').replace("'directory'", "'n' * 250")
  box = make(contents={'deep.py': make_deep.encode()})
  assert run(box.exec('python3 deep.py')).returncode == 0
  with pytest.raises(sandbox.SandboxPathError, match='larger'):
    run(box.snapshot())
  assert run(box.exec('echo alive')).stdout == 'alive\n'


@pytest.mark.parametrize('backend', _BACKENDS)
def test_links_of_a_copied_directory_are_not_followed(run, make, tmp_path, backend):
  """A task's directory may be untrusted: its links stay links."""
  secret = tmp_path / 'secret'
  secret.mkdir()
  (secret / 'key').write_text('hush')
  task = tmp_path / 'task'
  (task / 'src').mkdir(parents=True)
  (task / 'src' / 'f').write_text('fine')
  os.symlink(secret / 'key', task / 'file')
  os.symlink(secret, task / 'directory')
  os.symlink('src/f', task / 'inside')
  os.mkfifo(task / 'pipe')  # would block who opens it
  os.chmod(secret, 0o700)
  box = make(backend=backend, workspace=task)
  assert b'hush' not in run(box.snapshot())
  assert run(box.exec('cat inside')).stdout == 'fine'
  if backend == 'namespaces':
    assert run(box.exec('cat file directory/key')).returncode != 0
  for path in ('file', 'directory/key'):
    with pytest.raises(sandbox.SandboxPathError):
      run(box.read(path))
  assert sorted(os.listdir(task)) == ['directory', 'file', 'inside', 'pipe', 'src']


def test_a_copied_directory_keeps_what_it_is(run, make, tmp_path):
  """Modes, times, holes and hard links of a task's directory; itself unchanged."""
  (tmp_path / 'run').write_text('#!/bin/sh\necho ran\n')
  (tmp_path / 'run').chmod(0o755)
  os.link(tmp_path / 'run', tmp_path / 'same')
  os.utime(tmp_path / 'run', (1e9, 1e9))
  with open(tmp_path / 'holes', 'wb') as file:
    file.truncate(1 << 34)

  def facts() -> list:
    found = [(path.name, path.lstat()) for path in tmp_path.iterdir()]
    return [(name, s.st_mode, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found]

  before = facts()
  box = make(workspace=tmp_path)
  assert run(box.exec('./same; stat -c "%h %Y" run')).stdout == 'ran\n2 1000000000\n'
  assert facts() == before
  for path in ('run', 'nothing'):
    with pytest.raises(OSError):
      run(sandbox.create(workspace=tmp_path / path))


def test_a_copied_directory_must_fit(run, tmp_path):
  """Too large contents are rejected, and nothing of the sandbox remains."""
  (tmp_path / 'f').write_bytes(os.urandom(3 * _MIB))
  with pytest.raises(OSError, match='space'):
    limits = sandbox.Limits(workspace_bytes=_MIB)
    run(sandbox.create(workspace=tmp_path, limits=limits))


def test_a_cancelled_create_leaves_nothing(run, tmp_path, no_garbage):
  """Cancelled while files are being copied: no process, no open file, no workspace."""
  for number in range(200):
    (tmp_path / str(number)).write_bytes(b'x' * 10_000)

  async def use():
    async with await sandbox.create() as box:
      boxes = Path(box._supervisor._directory)
      root = box._supervisor.root / str(boxes).lstrip('/')
      count = lambda: (len(os.listdir('/proc/self/fd')), len(os.listdir(root)))
      before = count()
      for wait_s in (0, 0.001, 0.003, 0.01, 0.03):
        creating = asyncio.create_task(sandbox.create(workspace=tmp_path))
        await asyncio.sleep(wait_s)
        creating.cancel()
        try:
          await (await creating).destroy()
        except asyncio.CancelledError:
          pass
      await box.exec('true')
      async with asyncio.timeout(10):
        while count() != before:
          await asyncio.sleep(0.01)

  run(use())
