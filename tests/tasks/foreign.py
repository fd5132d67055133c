"""Task directories as other tools write them, on an image of this machine's shell."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import tarfile

from m2jax.sandbox import containers
from m2jax.tasks import harbor

PROGRAMS = (
  'bash sh cat sleep grep env ln head mkdir rm chmod touch id ls cp mv true false'
).split()
TOML = """\
version = "1.0"
[metadata]
author_name = "x"
category = "files"
[verifier]
timeout_sec = 60.0
[agent]
timeout_sec = 60.0
[environment]
build_timeout_sec = 300.0
cpus = 1
memory_mb = 256
"""
TEST = """\
#!/bin/bash
mkdir -p /logs/verifier
grep -qx right /app/out.txt && r=1 || r=0
echo "checked $r"
echo $r > /logs/verifier/reward.txt
"""
SOLVE = '#!/bin/bash\necho right > /app/out.txt\n'
BASE = 'ubuntu:24.04'


def write(
  path: pathlib.Path,
  toml: str = TOML,
  test: str = TEST,
  dockerfile: str = f'FROM {BASE}\nWORKDIR /app\n',
  files: dict[str, str] | None = None,
) -> pathlib.Path:
  """Writes a task; `files` are further ones, or others than usual."""
  usual = {
    'task.toml': toml,
    'instruction.md': 'Write right into /app/out.txt.',
    'environment/Dockerfile': dockerfile,
    'tests/test.sh': test,
    'solution/solve.sh': SOLVE,
  }
  for name, text in {**usual, **(files or {})}.items():
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(text)
  return path


def base(place: pathlib.Path) -> str:
  """Builds the image that the tests have in place of `BASE`."""
  files = set()
  for name in PROGRAMS:
    program = shutil.which(name, path='/usr/bin:/bin')
    if program is None:
      continue
    done = subprocess.run(['ldd', program], capture_output=True, text=True)
    files |= {program, *re.findall(r'(/\S+) \(0x', done.stdout)}
  for file in files:
    target = place / 'root' / file.lstrip('/').removeprefix('usr/')
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)
  etc = place / 'root' / 'etc'
  etc.mkdir()
  users = 'root:x:0:0:root:/root:/bin/bash\nworker:x:1000:1000::/tmp:/bin/bash\n'
  (etc / 'passwd').write_text(users)
  (etc / 'group').write_text('root:x:0:\nworker:x:1000:\n')
  for name in ('tmp', 'proc', 'sys', 'dev', 'run', 'root'):
    (place / 'root' / name).mkdir(exist_ok=True)
  (place / 'root' / 'tmp').chmod(0o777)
  name, archive = 'localhost/m2jax/test-shell', place / 'root.tar'
  with tarfile.open(archive, 'w') as tar:
    tar.add(place / 'root', '.')
  command = ['podman', 'import', '--change=ENV PATH=/bin', str(archive), name]
  env = containers.engines.environment()
  subprocess.run(command, env=env, check=True, capture_output=True)
  return name


def task(path: pathlib.Path, image: str = '', **settings) -> harbor.HarborTask:
  """The task of a directory, with the image in place of `BASE`."""
  replace = {BASE: image} if image else {}
  job = harbor.Containers(replace=replace, **settings)
  return harbor.of_directory(harbor.read(path), containers=job)


def unavailable() -> str:
  """Why there is no podman here, or ''."""
  return containers.engines.unavailable('podman')
