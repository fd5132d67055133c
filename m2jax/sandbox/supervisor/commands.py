"""Starts a command: identity, limits, and the bubblewrap command line.

The real uid is always dropped before bubblewrap starts: a sandbox started by root maps
to kernel uid 0, can write the host's /proc/sys and ignores RLIMIT_NPROC
(facts/pipelines.md §1.2).
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import resource
import signal

import linux

STATUS_FD = 3
FILTER_FD = 4
_FREE_FD = 16  # above the fixed numbers for bubblewrap
_SHELL = '/bin/bash'
# The shell inside sets RLIMIT_NPROC, which there counts processes of the sandbox only;
# outside it would count all of the uid. Bash reads $BASH_ENV before the command.
_SHELL_START = """\
ulimit -u "$M2JAX_PROCESSES" || exit 125
unset BASH_ENV M2JAX_PROCESSES
"""
_SHELL_START_PATH = '/etc/m2jax-limits'
_ETC = {
  'passwd': 'root:x:0:0::/:/bin/false\nagent:x:1000:1000::/workspace:/bin/bash\n',
  'group': 'root:x:0:\nagent:x:1000:\n',
  'hosts': '127.0.0.1 localhost\n',
  'nsswitch.conf': 'passwd: files\ngroup: files\nhosts: files\n',
  os.path.basename(_SHELL_START_PATH): _SHELL_START,
}
# LibreOffice's registry is a link into /etc; without it soffice ends at its start.
_ETC_OF_HOST = ('alternatives', 'ld.so.cache', 'fonts', 'libreoffice')
_ROOT_LINKS = ('bin', 'sbin', 'lib', 'lib32', 'lib64', 'libx32')
ROOTS = ('/usr', *(f'/{name}' for name in _ROOT_LINKS))  # of the host, read-only
_MAX_OPEN_FILES = 256
_SCRATCH_INODES = 16384


@dataclasses.dataclass(frozen=True)
class Shared:
  """Files that all sandboxes of a supervisor share.

  Attributes:
    etc: prepared /etc.
    empty, empty_file: an empty directory and file.
    read_only: (source, path in the sandbox) of read-only trees.
    hidden: paths in the sandbox that are empty; those of directories end with '/'.
    filter: file with the system call filter; empty for none.
    workspace, scratch: empty directories, the mount points of a command's own.
    mounts: mount namespace from which commands start.
  """

  etc: str
  empty: str
  empty_file: str
  read_only: tuple[tuple[str, str], ...]
  hidden: tuple[str, ...]
  filter: str
  workspace: str
  scratch: str
  mounts: int


def prepare_etc(directory: str, bind) -> None:
  """Fills `directory` with the sandbox's /etc; `bind(source, target)` mounts."""
  os.mkdir(directory, 0o755)
  for name, text in _ETC.items():
    with open(os.path.join(directory, name), 'w') as f:
      f.write(text)
  for name in _ETC_OF_HOST:
    source, target = os.path.join('/etc', name), os.path.join(directory, name)
    if os.path.isdir(source):
      os.mkdir(target)
    elif os.path.isfile(source):
      open(target, 'w').close()
    else:
      continue
    bind(source, target)


def bubblewrap_argv(
  bwrap: str,
  *,
  shared: Shared,
  processes: int,
  env: dict[str, str],
) -> list[str]:
  """The command line without its last argument, the command.

  Args:
    bwrap: path of bubblewrap.
    shared: files of all sandboxes.
    processes: maximum processes at a time.
    env: the whole environment.
  """
  argv = [bwrap, '--json-status-fd', str(STATUS_FD), '--die-with-parent']
  argv += ['--new-session', '--clearenv', '--cap-drop', 'ALL']
  if shared.filter:
    argv += ['--seccomp', str(FILTER_FD)]
  # --disable-userns requires an explicit --unshare-user.
  argv += ['--unshare-user', '--disable-userns', '--uid', '1000', '--gid', '1000']
  # No --unshare-net: the command starts in the network namespace of its sandbox.
  argv += ['--unshare-pid', '--unshare-ipc', '--unshare-uts']
  argv += ['--unshare-cgroup-try', '--hostname', 'sandbox']
  argv += ['--ro-bind', '/usr', '/usr', '--ro-bind', shared.etc, '/etc']
  for name in _ROOT_LINKS:
    if os.path.islink(f'/{name}'):
      argv += ['--symlink', os.readlink(f'/{name}'), f'/{name}']
    elif os.path.isdir(f'/{name}'):
      argv += ['--ro-bind', f'/{name}', f'/{name}']
  for source, target in shared.read_only:
    argv += ['--ro-bind', source, target]
  for path in shared.hidden:
    empty = shared.empty if path.endswith('/') else shared.empty_file
    argv += ['--ro-bind', empty, path]
  argv += ['--proc', '/proc', '--ro-bind', '/proc/sys', '/proc/sys']
  # Writing to /proc/1/mem would control bubblewrap's init.
  argv += ['--ro-bind', shared.empty, '/proc/1']
  argv += ['--dev', '/dev', '--bind', os.path.join(shared.scratch, 'shm'), '/dev/shm']
  argv += ['--bind', os.path.join(shared.scratch, 'tmp'), '/tmp']
  argv += ['--bind', shared.workspace, '/workspace', '--chdir', '/workspace']
  # /dev and / are bubblewrap's tmpfs without a size limit: not writable.
  argv += ['--remount-ro', '/dev', '--remount-ro', '/']
  inside = dict(env, BASH_ENV=_SHELL_START_PATH, M2JAX_PROCESSES=str(processes))
  for name, value in inside.items():
    argv += ['--setenv', name, value]
  return [*argv, *shell_argv()]


def shell_argv() -> list[str]:
  """The shell; `--` permits commands that start with `-` or `+`."""
  return [_SHELL, '-c', '--']


def resource_limits(
  *, cpu_s: int, file_bytes: int, address_bytes: int | None, processes: int | None
) -> list[tuple[int, tuple[int, int]]]:
  """rlimits of one command as `(resource, (soft, hard))`; None omits one."""
  wanted = [
    # SIGXCPU at the soft limit, SIGKILL a second later.
    (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
    (resource.RLIMIT_FSIZE, file_bytes, file_bytes),
    # With 0 a handler in core_pattern still gets a dump; with 1 it does not (core(5),
    # fs/coredump.c). The system call filter prevents changes.
    (resource.RLIMIT_CORE, 1, 1),
    (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES, _MAX_OPEN_FILES),
  ]
  if address_bytes is not None:
    wanted.append((resource.RLIMIT_AS, address_bytes, address_bytes))
  if processes is not None:
    wanted.append((resource.RLIMIT_NPROC, processes, processes))
  limits = []
  for kind, soft, hard in wanted:
    allowed = resource.getrlimit(kind)[1]
    if allowed != resource.RLIM_INFINITY:
      soft, hard = min(soft, allowed), min(hard, allowed)
    limits.append((kind, (soft, hard)))
  return limits


@dataclasses.dataclass(frozen=True)
class Streams:
  """Write ends of a command's pipes."""

  stdout: int
  stderr: int
  status: int


def start(box, command: bytes, streams: Streams) -> int:
  """Forks and executes a command of a `boxes.Box` in its own session. Returns the pid.

  An error before the exec is written to `streams.status`, as a line that starts with
  `!`.
  """
  parent = os.getpid()
  pid = os.fork()
  if pid:
    return pid
  try:
    os.setsid()
    if box.group is not None:
      for fd in box.group.join_fds:
        os.write(fd, b'0')
    os.chdir(box.path)
    if box.shared is not None:
      _enter_mounts(box)
    linux.new_session_keyring()
    descriptors = _open_descriptors(box, streams)
    for kind, pair in box.rlimits:
      resource.setrlimit(kind, pair)
    if box.network is not None:
      linux.enter_network(box.network)
    if box.uid is not None:
      os.setgroups([])
      os.setresgid(box.uid, box.uid, box.uid)
      os.setresuid(box.uid, box.uid, box.uid)
    if 0 in os.getresuid():
      raise PermissionError('commands do not run as root')
    linux.die_with(parent)
    # Python ignores these signals; the command must not inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    for number, fd in descriptors.items():
      os.dup2(fd, number)
    argv = [*box.argv, command]
    os.execve(argv[0], argv, box.env)
  except BaseException as error:  # noqa: BLE001 - a forked child must never return
    os.write(streams.status, f'!{error}\n'.encode())
  finally:
    os._exit(125)


def _enter_mounts(box) -> None:
  """Enters a mount namespace with this sandbox's workspace and a scratch directory.

  The namespace ends with the command, and with it the files in /tmp and /dev/shm.
  """
  shared = box.shared
  linux.enter_mounts(shared.mounts, {shared.workspace: box.path})
  size = box.limits['workspace_bytes']
  linux.mount_tmpfs(shared.scratch, size, _SCRATCH_INODES, 0o755, 0)
  for name in ('tmp', 'shm'):
    path = os.path.join(shared.scratch, name)
    os.mkdir(path)
    os.chmod(path, 0o1777)


def _open_descriptors(box, streams: Streams) -> dict[int, int]:
  """Returns open descriptors by the number that the program expects.

  Every command opens /dev/null and the filter separately, because processes share the
  state of an open file. Only bubblewrap gets descriptors above 2.
  """
  found = {0: os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)}
  found |= {1: streams.stdout, 2: streams.stderr}
  if box.shared is not None:
    found[STATUS_FD] = streams.status
    if box.shared.filter:
      found[FILTER_FD] = os.open(box.shared.filter, os.O_RDONLY | os.O_CLOEXEC)
  return {
    number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE_FD)
    for number, fd in found.items()
  }
