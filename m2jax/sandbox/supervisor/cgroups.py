"""Limits of memory and processes by control groups, if the machine allows them.

cgroup v1 (controllers `memory` and `pids`) and v2 are detected; groups are created only
below the group of this process (facts/pipelines.md §1.1), and tested once with a real
process.
"""

from __future__ import annotations

import contextlib
import os

_PREFIX = 'm2jax-'
_V1_TCP = 'memory.kmem.tcp.limit_in_bytes'


class Group:
  """The control groups of a sandbox. Processes join by writing `0` to `join_fds`.

  Raises:
    OSError: their files cannot be opened.
  """

  def __init__(self, directories: dict[str, str], events: str):
    self.directories = directories
    self.join_fds = []
    self._events = []
    try:
      for directory in self._each():
        path = os.path.join(directory, 'cgroup.procs')
        self.join_fds.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
      path = os.path.join(directories['memory'], events)
      self._events.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
      self.close()
      raise

  def _each(self) -> list[str]:
    return sorted(set(self.directories.values()))

  def oom_kills(self) -> int:
    """Number of processes of the group that the kernel has killed for memory."""
    for line in os.pread(self._events[0], 4096, 0).split(b'\n'):
      if line.startswith(b'oom_kill '):
        return int(line.split()[1])
    return 0

  def join(self) -> None:
    """Moves this process into the groups."""
    for fd in self.join_fds:
      os.write(fd, b'0')

  def close(self) -> None:
    """Closes the files; `Cgroups.remove` removes the groups."""
    for fd in (*self.join_fds, *self._events):
      os.close(fd)


class Cgroups:
  """Creates and removes groups. `kind` is 'v1', 'v2' or 'none', with the reason."""

  def __init__(self, kind: str, parents: dict[str, str], reason: str = ''):
    self.kind = kind
    self.reason = reason
    self.counts_swap = False  # set when a group is created
    self._parents = parents  # controller -> directory of this process's group
    self._to_remove: list[str] = []

  def make(self, name: str, memory_bytes: int, processes: int) -> Group:
    """Creates the groups of a sandbox.

    Raises:
      OSError: the machine does not allow it.
    """
    directories = {
      c: os.path.join(parent, f'{_PREFIX}{os.getpid()}-{name}')
      for c, parent in self._parents.items()
    }
    try:
      for directory in set(directories.values()):
        os.mkdir(directory)
      memory, pids = directories['memory'], directories['pids']
      v1 = self.kind == 'v1'
      _write(memory, 'memory.limit_in_bytes' if v1 else 'memory.max', memory_bytes)
      _write(pids, 'pids.max', processes)
      self._limit_swap(memory, memory_bytes)
      if v1 and os.path.exists(os.path.join(memory, _V1_TCP)):
        _write(memory, _V1_TCP, memory_bytes)  # v2 counts buffers as memory
      return Group(directories, 'memory.oom_control' if v1 else 'memory.events')
    except OSError:
      self._to_remove += set(directories.values())
      self.sweep()
      raise

  def _limit_swap(self, memory: str, memory_bytes: int) -> None:
    """Limits memory and swap together, if the machine allows it."""
    name, limit = 'memory.swap.max', 0
    if self.kind == 'v1':
      name, limit = 'memory.memsw.limit_in_bytes', memory_bytes
    self.counts_swap = os.path.exists(os.path.join(memory, name))
    if self.counts_swap:
      _write(memory, name, limit)
    elif self.kind == 'v1':
      _write(memory, 'memory.swappiness', 0)  # rarely swapped, but not counted

  def remove(self, group: Group) -> None:
    """Removes the groups, now or when the last process has left them."""
    group.close()
    self._to_remove += set(group.directories.values())
    self.sweep()

  def sweep(self) -> bool:
    """Tries again to remove busy groups. Returns True if none is left."""
    left = []
    for directory in self._to_remove:
      try:
        os.rmdir(directory)
      except FileNotFoundError:
        pass
      except OSError:
        left.append(directory)
    self._to_remove = left
    return not left

  def sweep_orphaned(self) -> None:
    """Removes empty groups of supervisors that were killed."""
    for parent in set(self._parents.values()):
      for name in os.listdir(parent):
        pid = name.removeprefix(_PREFIX).split('-')[0]
        if name.startswith(_PREFIX) and pid.isdigit() and not _is_running(pid):
          with contextlib.suppress(OSError):
            os.rmdir(os.path.join(parent, name))


def detect() -> Cgroups:
  """Finds usable control groups and tries them; `kind` is 'none' if they fail."""
  try:
    kind, parents = _own_groups()
    if kind == 'none':
      return Cgroups(kind, {}, 'no memory and pids controllers for this process')
    cgroups = Cgroups(kind, parents)
    cgroups.sweep_orphaned()
    group = cgroups.make('probe', 64 << 20, 8)
    try:
      if not _can_join(group):
        return Cgroups('none', {}, 'a process may not be moved into a child group')
    finally:
      cgroups.remove(group)
    return cgroups
  except OSError as error:
    return Cgroups('none', {}, f'{error.strerror}: {error.filename}')


def _own_groups() -> tuple[str, dict[str, str]]:
  """Returns the kind, and this process's group directory by controller."""
  paths = {}  # controller ('' for v2) -> path of this process's group
  with open('/proc/self/cgroup') as f:
    for line in f:
      _, controllers, path = line.rstrip('\n').split(':', 2)
      for controller in controllers.split(','):
        paths[controller] = path
  v1, v2 = {}, None
  with open('/proc/self/mountinfo') as f:
    for line in f:
      fields, _, tail = line.partition(' - ')
      root, point = fields.split()[3:5]
      kind, _, options = tail.split()[:3]
      if kind == 'cgroup':
        for controller in {'memory', 'pids'} & set(options.split(',')):
          v1[controller] = _below(point, root, paths.get(controller))
      elif kind == 'cgroup2':
        v2 = _below(point, root, paths.get(''))
  if v1.get('memory') and v1.get('pids'):
    return 'v1', v1
  if v2:
    with open(os.path.join(v2, 'cgroup.subtree_control')) as f:
      enabled = f.read().split()
    if not {'memory', 'pids'} <= set(enabled):
      # Fails with EBUSY in a group with processes, unless it is the root.
      _write(v2, 'cgroup.subtree_control', '+memory +pids')
    return 'v2', {'memory': v2, 'pids': v2}
  return 'none', {}


def _below(point: str, root: str, path: str | None) -> str | None:
  """Directory of group `path` under mount `point`, whose root is group `root`."""
  if path is None:
    return None
  root = root.rstrip('/')
  if path != root and not path.startswith(root + '/'):
    return None
  return point + path[len(root) :].rstrip('/')


def _write(directory: str, name: str, value: int | str) -> None:
  with open(os.path.join(directory, name), 'w') as f:
    f.write(str(value))


def _is_running(pid: str) -> bool:
  try:
    with open(f'/proc/{pid}/cmdline') as f:
      return bool(f.read())  # empty for a zombie
  except OSError:
    return False


def _can_join(group: Group) -> bool:
  pid = os.fork()
  if not pid:
    try:
      group.join()
      os._exit(0)
    except OSError:
      os._exit(1)
  return os.waitpid(pid, 0)[1] == 0
