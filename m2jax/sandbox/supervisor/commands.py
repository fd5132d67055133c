"""How one command is started: identity, limits, and the bubblewrap command line.

The real uid is dropped before bubblewrap starts, always: a sandbox started by root maps
to kernel uid 0, can write the host's /proc/sys and ignores RLIMIT_NPROC
(facts/pipelines.md §1.2).
"""

from __future__ import annotations

import os
import resource
import signal

import linux

STATUS_FD = 3
_SHELL = '/bin/bash'
# RLIMIT_NPROC is set by the shell inside, where the count is the sandbox's own: outside
# it would count every process of the uid. Bash reads $BASH_ENV before the command.
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
_ETC_OF_HOST = ('alternatives', 'ld.so.cache')
_ROOT_LINKS = ('bin', 'sbin', 'lib', 'lib32', 'lib64', 'libx32')
_MAX_OPEN_FILES = 256


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
  etc: str,
  workspace: str,
  read_only: list[tuple[str, str]],
  scratch_bytes: int,
  processes: int,
  env: dict[str, str],
) -> list[str]:
  """Command line up to the shell's `-c`; the command itself is the last argument.

  Args:
    bwrap: path of bubblewrap.
    etc: prepared /etc.
    workspace: directory that becomes /workspace.
    read_only: (source, place in the sandbox) of further read-only trees.
    scratch_bytes: size of /tmp and of /dev/shm.
    processes: most processes at once.
    env: the whole environment.
  """
  argv = [bwrap, '--json-status-fd', str(STATUS_FD), '--die-with-parent']
  argv += ['--new-session', '--clearenv', '--cap-drop', 'ALL']
  # --disable-userns wants --unshare-user to be explicit.
  argv += ['--unshare-user', '--disable-userns', '--uid', '1000', '--gid', '1000']
  # No --unshare-net: the command is started in its sandbox's own network namespace.
  argv += ['--unshare-pid', '--unshare-ipc', '--unshare-uts']
  argv += ['--unshare-cgroup-try', '--hostname', 'sandbox']
  argv += ['--ro-bind', '/usr', '/usr', '--ro-bind', etc, '/etc']
  for name in _ROOT_LINKS:
    if os.path.islink(f'/{name}'):
      argv += ['--symlink', os.readlink(f'/{name}'), f'/{name}']
    elif os.path.isdir(f'/{name}'):
      argv += ['--ro-bind', f'/{name}', f'/{name}']
  for source, target in read_only:
    argv += ['--ro-bind', source, target]
  size = str(scratch_bytes)
  argv += ['--proc', '/proc', '--ro-bind', '/proc/sys', '/proc/sys']
  argv += ['--dev', '/dev', '--size', size, '--tmpfs', '/dev/shm']
  argv += ['--size', size, '--perms', '1777', '--tmpfs', '/tmp']
  argv += ['--bind', workspace, '/workspace', '--chdir', '/workspace']
  # /dev and / are tmpfs of bubblewrap's own, without a size: nobody may write there.
  argv += ['--remount-ro', '/dev', '--remount-ro', '/']
  inside = dict(env, BASH_ENV=_SHELL_START_PATH, M2JAX_PROCESSES=str(processes))
  for name, value in inside.items():
    argv += ['--setenv', name, value]
  return [*argv, _SHELL, '-c']


def shell_argv() -> list[str]:
  """The bare shell of the weaker mode, up to `-c`."""
  return [_SHELL, '-c']


def resource_limits(
  *, cpu_s: int, file_bytes: int, address_bytes: int | None, processes: int | None
) -> list[tuple[int, tuple[int, int]]]:
  """rlimits of one command as `(resource, (soft, hard))`; None leaves one out."""
  wanted = [
    # SIGXCPU at the soft limit, SIGKILL a second later.
    (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
    (resource.RLIMIT_FSIZE, file_bytes, file_bytes),
    (resource.RLIMIT_CORE, 0, 0),
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


def start(
  argv: list[str],
  *,
  env: dict[str, str],
  directory: str,
  uid: int | None,
  network: int | None,
  join_fds: list[int],
  limits: list[tuple[int, tuple[int, int]]],
  stdin: int,
  stdout: int,
  stderr: int,
  status: int,
) -> int:
  """Forks and executes `argv` under `uid`, in its own session. Returns the pid.

  `network` is a namespace's descriptor; None stays in the caller's network. What fails
  before the exec is written to `status` as a line that starts with `!`.
  """
  pid = os.fork()
  if pid:
    return pid
  try:
    os.setsid()
    for fd in join_fds:
      os.write(fd, b'0')
    os.chdir(directory)
    for kind, pair in limits:
      resource.setrlimit(kind, pair)
    if network is not None:
      linux.enter_network(network)
    if uid is not None:
      os.setgroups([])
      os.setresgid(uid, uid, uid)
      os.setresuid(uid, uid, uid)
    if 0 in os.getresuid():
      raise PermissionError('refused to run a command as root')
    # Python ignores these two; the command must not inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    if argv[0] != _SHELL:  # only bubblewrap reports, and keeps it from the command
      if status == STATUS_FD:
        os.set_inheritable(status, True)
      else:
        os.dup2(status, STATUS_FD)
    os.execve(argv[0], argv, env)
  except BaseException as error:  # noqa: BLE001 - a forked child must never return
    os.write(status, f'!{error}\n'.encode())
  finally:
    os._exit(125)
