"""Why this machine gives no sandbox, and the one line that changes it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from m2jax.sandbox import api

_INSTALL = {
  'apt-get': 'apt-get update -q && apt-get install -y -q bubblewrap',
  'dnf': 'dnf install -y bubblewrap',
  'pacman': 'pacman -S --noconfirm bubblewrap',
  'apk': 'apk add bubblewrap bash',
  'zypper': 'zypper install -y bubblewrap',
}
_SWITCHES = (  # (file, value that forbids, setting that allows)
  (
    '/proc/sys/kernel/apparmor_restrict_unprivileged_userns',
    '1',
    'kernel.apparmor_restrict_unprivileged_userns=0',
  ),
  (
    '/proc/sys/kernel/unprivileged_userns_clone',
    '0',
    'kernel.unprivileged_userns_clone=1',
  ),
  ('/proc/sys/user/max_user_namespaces', '0', 'user.max_user_namespaces=15000'),
)
_CONTAINER = (
  'start the container with `--security-opt seccomp=unconfined '
  '--security-opt apparmor=unconfined --cap-add SYS_ADMIN`'
)
_WEAKER = 'or choose the weaker backend rlimit_only by name'


def check_machine(backend: str) -> None:
  """Raises SandboxUnavailable for what can be seen without starting anything."""
  if platform.system() != 'Linux':
    raise api.SandboxUnavailable(
      f'sandboxes need Linux, this is {platform.system()}', 'run m2jax on Linux'
    )
  if not os.path.exists('/bin/bash'):
    raise api.SandboxUnavailable('no /bin/bash', 'install bash')
  if backend == 'bubblewrap' and shutil.which('bwrap') is None:
    raise api.SandboxUnavailable('bubblewrap (bwrap) is not installed', _install())


def explained(reason: str) -> api.SandboxUnavailable:
  """Adds to a failed start the line that would most likely have prevented it."""
  return api.SandboxUnavailable(reason, _fix())


def _fix() -> str:
  sudo = '' if os.geteuid() == 0 else 'sudo '
  for name, forbids, setting in _SWITCHES:
    path = Path(name)
    if path.exists() and path.read_text().strip() == forbids:
      return f'{sudo}sysctl -w {setting}'
  if os.path.exists('/.dockerenv') or os.path.exists('/run/.containerenv'):
    return f'{_CONTAINER}, {_WEAKER}'
  return f'allow user namespaces and mounts to this user, {_WEAKER}'


def install_bubblewrap() -> None:
  """Installs bubblewrap where it is missing and this user may without a password.

  Raises:
    SandboxUnavailable: not allowed, or the package manager failed.
  """
  if shutil.which('bwrap'):
    return
  line = _install_line()
  if line is None:
    return  # the check that follows says what to do
  prefix = []
  if os.geteuid() != 0:
    prefix = ['sudo', '-n']
    asked = shutil.which('sudo') and subprocess.run(
      [*prefix, 'true'], capture_output=True, check=False
    )
    if not asked or asked.returncode:
      raise api.SandboxUnavailable('bubblewrap (bwrap) is not installed', _install())
  print(f'installing bubblewrap: {line}', flush=True)
  done = subprocess.run(
    [*prefix, '/bin/sh', '-c', line], capture_output=True, text=True, check=False
  )
  if done.returncode:
    raise api.SandboxUnavailable(done.stdout + done.stderr, _install())


def _install_line() -> str | None:
  for manager, line in _INSTALL.items():
    if shutil.which(manager):
      return line
  return None


def _install() -> str:
  line = _install_line()
  if line is None:
    return 'install the package `bubblewrap` with the system package manager'
  return line if os.geteuid() == 0 else f"sudo sh -c '{line}'"
