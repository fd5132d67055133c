"""Explains why this machine has no sandbox, and how to fix it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from m2jax.sandbox import api, seccomp

_INSTALL = {
  'apt-get': 'apt-get update -q && apt-get install -y -q libseccomp2',
  'dnf': 'dnf install -y libseccomp',
  'pacman': 'pacman -S --noconfirm libseccomp',
  'apk': 'apk add bash libseccomp',
  'zypper': 'zypper install -y libseccomp2',
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
  if backend == 'gvisor' and not runsc():
    raise api.SandboxUnavailable(
      "no runsc, gVisor's program, in a bin directory of /usr",
      f'{_sudo()}apt-get install -y runsc',
    )


def runsc() -> str:
  """The path of gVisor's program, which sandboxes see too; '' without one."""
  return shutil.which('runsc', path='/usr/local/bin:/usr/bin:/usr/sbin') or ''


def _sudo() -> str:
  return '' if os.geteuid() == 0 else 'sudo '


def explained(reason: str) -> api.SandboxUnavailable:
  """Adds the most likely fix to the reason of a failed start."""
  return api.SandboxUnavailable(reason, _fix())


def _fix() -> str:
  for name, forbids, setting in _SWITCHES:
    path = Path(name)
    if path.exists() and path.read_text().strip() == forbids:
      return f'{_sudo()}sysctl -w {setting}'
  if os.path.exists('/.dockerenv') or os.path.exists('/run/.containerenv'):
    return f'{_CONTAINER}, {_WEAKER}'
  return f'allow user namespaces and mounts to this user, {_WEAKER}'


def install() -> None:
  """Installs libseccomp if it is missing and the user may do so without a password.

  Without it there are sandboxes, but no filter of system calls. The report shows this,
  so that a failure to install it raises no error.
  """
  lines = [line for manager, line in _INSTALL.items() if shutil.which(manager)]
  if seccomp.is_installed() or not lines:
    return
  prefix = []
  if os.geteuid() != 0:
    prefix = ['sudo', '-n']
    asked = shutil.which('sudo') and subprocess.run(
      [*prefix, 'true'], capture_output=True, check=False
    )
    if not asked or asked.returncode:
      return
  print(f'installing packages for sandboxes: {lines[0]}', flush=True)
  subprocess.run([*prefix, '/bin/sh', '-c', lines[0]], capture_output=True, check=False)
