"""Explains why this machine has no sandbox, and how to fix it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from m2jax.sandbox import api, seccomp

_INSTALL = {
  'apt-get': 'apt-get update -q && apt-get install -y -q bubblewrap libseccomp2',
  'dnf': 'dnf install -y bubblewrap libseccomp',
  'pacman': 'pacman -S --noconfirm bubblewrap libseccomp',
  'apk': 'apk add bubblewrap bash libseccomp',
  'zypper': 'zypper install -y bubblewrap libseccomp2',
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
_WEAKER = 'or choose the weaker backend rlimit_only'


def check_machine(backend: str) -> None:
  """Raises SandboxUnavailable for problems that are visible without a start."""
  if platform.system() != 'Linux':
    raise api.SandboxUnavailable(
      f'sandboxes need Linux, this is {platform.system()}', 'run m2jax on Linux'
    )
  if not os.path.exists('/bin/bash'):
    raise api.SandboxUnavailable('no /bin/bash', 'install bash')
  if backend == 'bubblewrap' and shutil.which('bwrap') is None:
    raise api.SandboxUnavailable('bubblewrap (bwrap) is not installed', _install())


def explained(reason: str) -> api.SandboxUnavailable:
  """Adds the most likely fix to the reason of a failed start."""
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


def install() -> None:
  """Installs missing packages, if the user may do so without a password.

  Without libseccomp there are sandboxes, but no filter of system calls. The report
  shows this, and a failure to install it raises no error.

  Raises:
    SandboxUnavailable: bubblewrap is missing, and the user may not install it or the
      package manager failed.
  """
  needed = shutil.which('bwrap') is None
  if not needed and seccomp.is_installed():
    return
  line = _install_line()
  if line is None:
    return  # the subsequent check explains what to do
  failure = _run_installer(line)
  if failure and needed:
    raise api.SandboxUnavailable(failure, _install())


def _run_installer(line: str) -> str:
  """Returns an error message, or ''."""
  prefix = []
  if os.geteuid() != 0:
    prefix = ['sudo', '-n']
    asked = shutil.which('sudo') and subprocess.run(
      [*prefix, 'true'], capture_output=True, check=False
    )
    if not asked or asked.returncode:
      return 'bubblewrap (bwrap) is not installed'
  print(f'installing packages for sandboxes: {line}', flush=True)
  done = subprocess.run(
    [*prefix, '/bin/sh', '-c', line], capture_output=True, text=True, check=False
  )
  return done.stdout + done.stderr if done.returncode else ''


def _install_line() -> str | None:
  for manager, line in _INSTALL.items():
    if shutil.which(manager):
      return line
  return None


def _install() -> str:
  """The command that installs all packages."""
  line = _install_line()
  if line is None:
    return 'install the package `bubblewrap` with the system package manager'
  return line if os.geteuid() == 0 else f"sudo sh -c '{line}'"
