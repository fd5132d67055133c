"""A store of podman's own for these tests, and a small image of local programs."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

from m2jax.sandbox.containers import engines

_PROGRAMS = (
  'bash sh sleep cat ls mkdir rm ln mkfifo head touch id chown chmod kill setsid nohup '
  'stat tail wc'
).split()
_DOCKERFILE = 'FROM scratch\nCOPY root/ /\nENV PATH=/usr/bin:/bin\n'


def _copy(file: pathlib.Path, root: pathlib.Path) -> None:
  target = root / str(file).lstrip('/')
  if not target.exists():
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)


def _fill(root: pathlib.Path) -> None:
  for name in _PROGRAMS:
    program = pathlib.Path('/usr/bin', name)
    if not program.exists():
      pytest.skip(f'the image needs {program}')
    _copy(program, root)
    words = subprocess.run(['ldd', program], capture_output=True, text=True).stdout
    for library in re.findall(r'(/\S+) \(0x', words):
      _copy(pathlib.Path(library), root)
  for name in ('proc', 'sys', 'dev', 'run', 'tmp', 'root', 'app'):
    (root / name).mkdir(exist_ok=True)
  (root / 'tmp').chmod(0o1777)
  (root / 'etc').mkdir(exist_ok=True)
  (root / 'etc/passwd').write_text(
    'root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000::/tmp:/bin/sh\n'
  )


@pytest.fixture(scope='session')
def podman(tmp_path_factory):
  """podman, with a store that nothing else uses; skips without it."""
  if reason := engines.unavailable('podman'):
    pytest.skip(reason)
  place = tmp_path_factory.mktemp('podman')
  conf = place / 'storage.conf'
  conf.write_text(
    f'[storage]\ndriver = "overlay"\ngraphroot = "{place}/store"\n'
    f'runroot = "{place}/run"\n'
  )
  environment = engines.environment()
  environment['CONTAINERS_STORAGE_CONF'] = str(conf)
  yield environment
  command = ['podman', 'rm', '--all', '--force', '--time', '0']
  subprocess.run(command, env=environment, capture_output=True, timeout=60)
  command = ['podman', 'rmi', '--all', '--force']
  subprocess.run(command, env=environment, capture_output=True, timeout=60)
  subprocess.run(['umount', f'{place}/store/overlay'], capture_output=True)
  del environment['CONTAINERS_STORAGE_CONF']


@pytest.fixture(scope='session')
def image(podman, tmp_path_factory) -> str:
  """The name of an image with a shell and the user `agent`."""
  place = tmp_path_factory.mktemp('image')
  _fill(place / 'root')
  (place / 'Dockerfile').write_text(_DOCKERFILE)
  name = 'localhost/m2jax-tests/shell'
  command = ['podman', 'build', '--network', 'none', '--tag', name, str(place)]
  done = subprocess.run(command, env=podman, capture_output=True, timeout=300)
  assert not done.returncode, done.stderr
  return name
