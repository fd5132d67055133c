"""A task in containers of its own Dockerfile; skipped without podman."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from m2jax.tasks import harbor
from m2jax.tasks.harbor import podman

_REASON = podman.unavailable()
pytestmark = [
  pytest.mark.long,
  pytest.mark.skipif(bool(_REASON), reason=_REASON or 'podman is here'),
]
_TEST = """\
grep -q right "$M2JAX_TREE/out.txt" && r=1 || r=0
echo changed > "$M2JAX_TREE/out.txt" && r=0
echo $r > "$M2JAX_LOGS/reward.txt"
"""


@pytest.fixture(scope='module')
def task(tmp_path_factory):
  """A task whose image has this machine's shell: no registry is needed."""
  root = tmp_path_factory.mktemp('podman')
  draft = harbor.Draft(
    f'podman-{root.name}',
    'x',
    harbor.Metadata('test', 'test', collect=('out.txt',)),
    tests={'test.sh': _TEST.encode()},
    solution={'solve.sh': b'echo right > out.txt'},
  )
  path = harbor.write(draft, root / 'tasks' / 'train')
  environment, files = path / 'environment', set()
  for name in ('bash', 'sh', 'cat', 'sleep', 'grep', 'env', 'ln', 'head'):
    program = shutil.which(name)
    libraries = subprocess.run(['ldd', program], capture_output=True, text=True).stdout
    files |= {program, *re.findall(r'(/\S+) \(0x', libraries)}
  for file in files:
    target = environment / 'root' / file.lstrip('/').removeprefix('usr/')
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)
  dockerfile = 'FROM scratch\nCOPY root/ /\nENV PATH=/bin\nWORKDIR /workspace\n'
  (environment / 'Dockerfile').write_text(dockerfile)
  yield harbor.read(path)
  image = f'localhost/m2jax/{draft.name}'
  subprocess.run(['podman', 'rmi', '--force', image], capture_output=True)


def test_the_solution_passes(task):
  verdict = podman.attempt(task, network='none')
  assert verdict.outcome == harbor.PASSED, verdict


@pytest.mark.parametrize(
  'script',
  [
    ':',
    'ln -s /verifier/tests/test.sh out.txt',
    'echo 1 > reward.txt; echo 1 > /logs/verifier/reward.txt',
    'head -c 60000000 /dev/zero > out.txt',
  ],
)
def test_an_attempt_to_game_it_fails(task, script):
  verdict = podman.attempt(task, script, network='none')
  assert verdict.outcome == harbor.FAILED, verdict


def test_an_image_that_cannot_be_built_is_invalid(task):
  dockerfile = task.path / 'environment' / 'Dockerfile'
  right = dockerfile.read_text()
  dockerfile.write_text('FROM localhost/m2jax/absent:none\n')
  try:
    verdict = podman.attempt(task, network='none')
  finally:
    dockerfile.write_text(right)
  assert verdict.outcome == harbor.INVALID and 'podman build' in verdict.reason
