"""What a container may do: the options of the engine, and a check that they hold.

The check reads what the kernel says of the main process, from outside: an engine that
ignores an option, as without a control group for memory, makes no sandbox.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
from pathlib import Path

from m2jax.sandbox import api

UIDS = '0:300000:65536'  # sandboxes have those below
# Of root in the container over its own files, users and processes: packages are
# installed, files given to users, and services started as them. linux/capability.h.
_CAPABILITIES = {
  'CHOWN': 0,
  'DAC_OVERRIDE': 1,
  'FOWNER': 3,
  'FSETID': 4,
  'KILL': 5,
  'SETGID': 6,
  'SETUID': 7,
  'SETPCAP': 8,
  'NET_BIND_SERVICE': 10,
  'SYS_CHROOT': 18,
  'SETFCAP': 31,
}
_MOST_FILES, _MOST_PROCESSES = 4096, 4096  # open files; processes of a uid
_PAGE_BYTES = resource.getpagesize()
_FIX = {
  'podman': 'boot with control groups for memory and pids; use podman 4 with runc',
  'docker': 'set "userns-remap": "default" in /etc/docker/daemon.json and restart it',
}


def options(
  engine: str, limits: api.Limits, network: str, cpus: float | None
) -> list[str]:
  """Options of `run` for a container with limits and few privileges."""
  memory = str(limits.memory_bytes)
  made = ['--memory', memory, '--memory-swap', memory]
  made += ['--pids-limit', str(limits.processes), '--cap-drop', 'ALL']
  made += [f'--cap-add={name}' for name in _CAPABILITIES]
  made += ['--security-opt', 'no-new-privileges', '--pull', 'never']
  made += ['--stop-timeout', '0']
  rlimits = {
    'cpu': (limits.cpu_s, limits.cpu_s + 1),
    'fsize': (limits.file_bytes,) * 2,
    'core': (1, 1),  # with 0 a handler in core_pattern still gets a dump, core(5)
    # pids-limit counts the container's; this one those of a uid of all containers.
    'nofile': (_most(resource.RLIMIT_NOFILE, _MOST_FILES),) * 2,
    'nproc': (_most(resource.RLIMIT_NPROC, _MOST_PROCESSES),) * 2,
  }
  made += [f'--ulimit={name}={s}:{h}' for name, (s, h) in rlimits.items()]
  if network == 'none':
    made += ['--network', 'none']
  if cpus is not None:
    made += ['--cpus', str(cpus)]
  if engine == 'podman':
    made += ['--uidmap', UIDS, '--gidmap', UIDS]
    # Neither variables of this process nor volumes, which a fork would not have.
    made += ['--http-proxy=false', '--image-volume=ignore']
  return made


def _most(kind: int, wanted: int) -> int:
  allowed = resource.getrlimit(kind)[1]
  return wanted if allowed == resource.RLIM_INFINITY else min(wanted, allowed)


@dataclasses.dataclass(frozen=True)
class Group:
  """Control groups of a container, by what they limit; None is unknown."""

  memory: Path | None
  pids: Path | None
  version: int

  @classmethod
  def of(cls, pid: int) -> Group:
    paths = {}
    for line in Path(f'/proc/{pid}/cgroup').read_text().splitlines():
      _, kinds, path = line.split(':', 2)
      for kind in kinds.split(','):
        paths[kind] = path.lstrip('/')
    top = Path('/sys/fs/cgroup')
    if 'memory' in paths:
      return cls(top / 'memory' / paths['memory'], top / 'pids' / paths['pids'], 1)
    both = top / paths['']
    return cls(both, both, 2)

  def memory_bytes(self) -> int | None:
    name = 'memory.limit_in_bytes' if self.version == 1 else 'memory.max'
    return _number(self.memory / name)

  def processes(self) -> int | None:
    return _number(self.pids / 'pids.max')

  def oom_kills(self) -> int:
    """Processes that the kernel has killed for memory; 0 if it does not tell."""
    name = 'memory.oom_control' if self.version == 1 else 'memory.events'
    with contextlib.suppress(OSError):
      for line in (self.memory / name).read_text().splitlines():
        key, _, value = line.partition(' ')
        if key == 'oom_kill':
          return int(value)
    return 0


def _number(path: Path) -> int | None:
  with contextlib.suppress(OSError, ValueError):  # 'max' is no limit
    return int(path.read_text())
  return None


def outside(pid: int, kind: str, number: int) -> int:
  """The uid or gid of this machine that one of a container is.

  Raises:
    SandboxError: it is none.
  """
  for line in Path(f'/proc/{pid}/{kind}_map').read_text().splitlines():
    inner, outer, count = map(int, line.split())
    if inner <= number < inner + count:
      return outer + number - inner
  raise api.SandboxError(f'{kind} {number} of the image is not one of the container')


def check(
  engine: str, pid: int, group: Group, limits: api.Limits, network: str
) -> None:
  """Fails closed.

  Raises:
    SandboxUnavailable: something of `options` does not hold for the main process.
  """
  lines = Path(f'/proc/{pid}/status').read_text().splitlines()
  status = {line.partition(':')[0]: line.partition(':')[2].strip() for line in lines}
  devices = Path(f'/proc/{pid}/net/dev').read_text().splitlines()[2:]
  names = {line.partition(':')[0].strip() for line in devices}
  allowed = sum(1 << bit for bit in _CAPABILITIES.values())
  memory, processes = group.memory_bytes(), group.processes()
  holds = {
    'root in it is root of this machine': outside(pid, 'uid', 0) != 0,
    'it shares processes': status['NSpid'].split()[-1] == '1',
    'it may gain privileges': status['NoNewPrivs'] == '1',
    'it has more capabilities': not int(status['CapBnd'], 16) & ~allowed,
    'it has no filter of system calls': status['Seccomp'] == '2',
    'it has a network': network != 'none' or names == {'lo'},
    'its memory is not limited': memory is not None
    and memory <= limits.memory_bytes + _PAGE_BYTES,
    'its processes are not limited': processes is not None
    and processes <= limits.processes,
  }
  broken = [words for words, held in holds.items() if not held]
  if broken:
    raise api.SandboxUnavailable(f'{engine}: {"; ".join(broken)}', _FIX[engine])
