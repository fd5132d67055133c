"""Commands in gVisor (gvisor.dev): `runsc run` in place of the shell.

gVisor is a kernel in user space: system calls of a command reach it, not the machine's
kernel. It runs in the namespaces of the sandbox as its unprivileged uid, so whoever
breaks out of gVisor is there. Each command starts it, and all that it needs ends with
the command.
"""

from __future__ import annotations

import json
import os
import resource

import init

_DIRECTORY = '/tmp/runsc'  # of the sandbox; the command has a /tmp of its own
OWN_BYTES = 16 << 20  # there; the longest command takes about 2 MB
# The only uid that an unprivileged runsc has is 0; this makes it 1000 for the command.
_USER = ('/usr/bin/unshare', '--user', '--map-user=1000', '--map-group=1000', '--')
# gVisor enforces the limit of CPU time only if a process has set it.
_CPU = ('/usr/bin/prlimit', '--cpu={}:{}', '--')
_KINDS = ('AS', 'CORE', 'CPU', 'FSIZE', 'NICE', 'NOFILE', 'NPROC', 'RTPRIO')


class Gvisor:
  """Executes commands of a sandbox with `runsc`, the path of gVisor's program."""

  def __init__(self, runsc: str, rlimits, scratch_bytes: int):
    names = {getattr(resource, f'RLIMIT_{kind}'): f'RLIMIT_{kind}' for kind in _KINDS}
    self._runsc = runsc
    self._start = (_CPU[0], _CPU[1].format(*dict(rlimits)[resource.RLIMIT_CPU]), *_USER)
    self._rlimits = [
      {'type': names[kind], 'soft': soft, 'hard': hard}
      for kind, (soft, hard) in rlimits
    ]
    scratch = {
      'type': 'tmpfs',
      'options': ['mode=1777', f'size={scratch_bytes // 2}'],
    }
    self._mounts = [
      {'destination': '/proc', 'type': 'proc'},
      {'destination': '/workspace', 'type': 'bind', 'source': '/workspace'},
      {'destination': '/tmp', **scratch},
      {'destination': '/dev/shm', **scratch},
    ]

  def execute(self, command: bytes, env: dict, log: int) -> None:
    """Replaces this process; gVisor's own failures are written to `log`.

    Raises:
      OSError: runsc is not there, or has no space for its files.
    """
    os.mkdir(_DIRECTORY, 0o700)
    with open(f'{_DIRECTORY}/config.json', 'w') as f:
      json.dump(self._bundle(command.decode(), env), f)
    with open('/proc/net/tcp') as f:
      listens = len(f.readlines()) > 1  # the caller, since no command is running
    arguments = (
      f'--root={_DIRECTORY}',
      f'--log-fd={log}',
      '--rootless',
      '--ignore-cgroups',  # it is in those of the sandbox
      '--overlay2=none',  # newer ones write a file into the root for this
      # To reach the caller: sockets of the kernel, in the sandbox's network.
      f'--network={"host" if listens else "none"}',
      'run',
      f'--bundle={_DIRECTORY}',
      'command',
    )
    os.set_inheritable(log, True)
    os.execve(self._runsc, ('runsc', *arguments), {})

  def _bundle(self, command: str, env: dict) -> dict:
    """The config.json of an OCI bundle (opencontainers.org, runtime-spec)."""
    return {
      'ociVersion': '1.0.2',
      'process': {
        'user': {'uid': 0, 'gid': 0},
        'args': [*self._start, init.SHELL, '-c', '--', command],
        'env': [f'{name}={value}' for name, value in env.items()],
        'cwd': '/workspace',
        'capabilities': {},
        'noNewPrivileges': True,
        'rlimits': self._rlimits,
      },
      'root': {'path': '/'},  # read-only already
      'hostname': 'sandbox',
      'mounts': self._mounts,
      'linux': {},
    }
