"""Runs a task directory as Harbor does, in bubblewrap; for tests.

The places and the environment are those of Harbor's containers: /workspace is the
agent's and is judged where it is, /solution has solve.sh, /tests has test.sh, which
writes /logs/verifier/reward.txt, and no variable of ours is set. Packages that the
Dockerfile would install are where pip installs them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from m2jax.tasks import harbor
from m2jax.tasks.harbor import compose

unavailable = '' if shutil.which('bwrap') else 'no bubblewrap'
_SEEN = ('/etc/libreoffice', '/etc/fonts', '/etc/alternatives')


def reward(directory: harbor.Directory, place: Path, *, solve: bool) -> float:
  """The reward after the solution, or after nothing.

  Args:
    directory: the task.
    place: an empty directory for its files.
    solve: whether the solution runs before it is judged.
  """
  (place / 'workspace').mkdir(parents=True)
  compose.write(directory.workspace(), place / 'workspace')
  (place / 'logs' / 'verifier').mkdir(parents=True)
  if script := directory.setup():
    _run(directory, place, script)
  if solve:
    _run(directory, place, 'bash /solution/solve.sh', solution=True)
  _run(directory, place, 'bash /tests/test.sh', tests=True)
  logs = place / 'logs' / 'verifier'
  # Harbor prefers it, and takes nothing but numbers in it; ours have none.
  assert not (logs / 'reward.json').exists()
  return float((logs / 'reward.txt').read_text())


def _run(directory, place, command, *, solution=False, tests=False) -> None:
  metadata = directory.metadata
  site = metadata.verifier_site or metadata.site
  words = ['bwrap', '--unshare-all', '--die-with-parent', '--clearenv']
  words += ['--ro-bind', '/usr', '/usr', '--proc', '/proc', '--dev', '/dev']
  for name in ('bin', 'lib', 'lib64', 'sbin'):
    words += ['--symlink', f'usr/{name}', f'/{name}']
  for name in _SEEN:
    words += ['--ro-bind-try', name, name]
  words += ['--tmpfs', '/tmp', '--dev', '/dev']
  words += ['--ro-bind', sys.base_prefix, sys.base_prefix]
  if site:
    purelib = sysconfig.get_path('purelib', vars={'base': sys.base_prefix})
    words += ['--ro-bind', str(directory.dataset / 'sites' / site), purelib]
  words += ['--bind', str(place / 'workspace'), '/workspace', '--chdir', '/workspace']
  if solution:
    words += ['--ro-bind', str(directory.path / 'solution'), '/solution']
  if tests:
    words += ['--ro-bind', str(directory.path / 'tests'), '/tests']
    words += ['--bind', str(place / 'logs'), '/logs']
  words += ['--setenv', 'PATH', f'{sys.base_prefix}/bin:/usr/bin:/bin']
  words += ['--setenv', 'HOME', '/tmp', 'bash', '-c', command]
  done = subprocess.run(words, capture_output=True, text=True, timeout=300)
  if done.returncode:
    raise RuntimeError(f'{command}: {done.returncode}: {done.stderr[-2000:]}')
