"""Resources of sandboxes: directories, uids, networks, groups, and their reuse.

Resources of a sandbox are reused only when none of its processes is alive.
"""

from __future__ import annotations

import collections
import contextlib
import os
import resource
import signal
import socket
import stat

import cgroups as cgroups_lib
import commands
import linux
from uids import Uids

_WORKSPACE_INODES = 16384
_BUBBLEWRAP_PROCESSES = 2  # monitor and init


def _is_below(path: str, directory: str) -> bool:
  return os.path.commonpath([path, directory]) == directory


class Box:
  """A sandbox: its directories, identity, limits and prepared command line."""

  def __init__(self, number: int, limits: dict):
    self.number = number
    self.limits = limits
    self.shared = None  # commands.Shared under bubblewrap
    self.path = ''  # the workspace
    self.staged = ''  # a workspace that may replace it
    self.uid = None
    self.network = None
    self.group = None
    self.argv = []
    self.env = {}
    self.rlimits = []
    self.run = None  # the command in progress
    self.closing = []  # requests to reply to when nothing of it is left
    self.broken = False  # a process of it may never end

  def unlock(self) -> None:
    """Restores the owner's permissions on the workspace directory.

    A command may have removed them. The next command would then not start, and its
    failure would count as the sandbox's, not as the agent's.
    """
    mode = os.stat(self.path, follow_symlinks=False).st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
      os.chmod(self.path, stat.S_IMODE(mode) | stat.S_IRWXU)

  def survivors(self) -> list[int]:
    """Processes that are alive in its control group or, without one, under its uid."""
    if self.group is not None:
      return self.group.processes() if self.group.count() else []
    return linux.processes_of(self.uid) if self.uid is not None else []


class Machine:
  """Prepares this machine and creates sandboxes. `config`: see `client.py`."""

  def __init__(self, config: dict):
    self.isolated = config['backend'] == 'bubblewrap'
    self.parallel = config['parallel']
    self.root = os.geteuid() == 0
    self._bwrap = config['bwrap']
    self._directory = config['directory']
    self._uids = Uids(*config['uids'])
    self._next_number = 0
    self._networks = collections.deque()
    self.cgroups = cgroups_lib.Cgroups('none', {}, 'not requested')
    linux.adopt_orphans()
    linux.new_session_keyring()
    if self.isolated:
      linux.enter_private_mounts()
      self._networks.append(linux.new_network())
      linux.mount_tmpfs(self._directory, 16 << 20, 65536, 0o711, 0)
      self._shared = self._prepare(
        config['read_only'], config['hidden'], config['filter']
      )
    else:
      os.chmod(self._directory, 0o711)
    if config['cgroups']:
      self.cgroups = cgroups_lib.detect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    self._shared_processes = linux.threads_of(os.getuid())

  def _prepare(self, read_only, hidden, program: bytes | None) -> commands.Shared:
    own = {
      name: os.path.join(self._directory, name)
      for name in ('etc', 'empty', 'empty_file', 'workspace', 'scratch', 'filter')
    }
    commands.prepare_etc(own['etc'], linux.bind)
    for name in ('empty', 'workspace', 'scratch'):
      os.mkdir(own[name])
    open(own['empty_file'], 'w').close()
    places = []
    for number, (source, target) in enumerate(read_only):
      # Bound to a path that the unprivileged uid can reach.
      place = os.path.join(self._directory, f'read_only_{number}')
      os.mkdir(place)
      linux.bind(source, place)
      places.append((place, target))
    if program:
      with open(own['filter'], 'wb') as f:
        f.write(program)
    return commands.Shared(
      own['etc'],
      own['empty'],
      own['empty_file'],
      tuple(places),
      tuple(hidden),
      own['filter'] if program else '',
      own['workspace'],
      own['scratch'],
      linux.new_mounts(self._is_needed),
    )

  def _is_needed(self, mount_point: str) -> bool:
    """Whether bubblewrap or a command needs this mount."""
    trees = [self._directory, *commands.ROOTS]
    files = ['/proc', '/dev', self._bwrap]
    above = any(_is_below(path, mount_point) for path in (*trees, *files))
    return above or any(_is_below(mount_point, tree) for tree in trees)

  def found(self) -> dict:
    """Facts for the caller's report."""
    return {
      'root': self.root,
      'cgroups': self.cgroups.kind,
      'cgroups_reason': self.cgroups.reason,
      'counts_swap': self.cgroups.counts_swap,
    }

  # Sandboxes ------------------------------------------------------------------------

  def open(self, limits: dict, env: dict) -> Box:
    """Creates a sandbox.

    Raises:
      OSError: this failed; nothing of the sandbox is left.
    """
    box = Box(self._next_number, limits)
    self._next_number += 1
    try:
      if self.root:
        box.uid = self._uids.take()
      box.path = self._make_directory(box, 'workspace')
      processes = None
      if self.isolated:
        self._isolate(box, env)
      else:
        box.argv = commands.shell_argv()
        box.env = dict(env)
        processes = limits['processes']
        if not self.root:
          processes = self._shared_processes + processes * self.parallel
    except OSError:
      self.discard(box)
      raise
    box.rlimits = commands.resource_limits(
      cpu_s=limits['cpu_s'],
      file_bytes=limits['file_bytes'],
      address_bytes=None if box.group else limits['memory_bytes'],
      processes=processes,
    )
    return box

  def _isolate(self, box: Box, env: dict) -> None:
    box.network = self._networks.popleft() if self._networks else linux.new_network()
    if self.cgroups.kind != 'none':
      processes = box.limits['processes'] + _BUBBLEWRAP_PROCESSES
      box.group = self.cgroups.make(
        str(box.number), box.limits['memory_bytes'], processes
      )
    box.shared = self._shared
    box.argv = commands.bubblewrap_argv(
      self._bwrap,
      shared=self._shared,
      processes=box.limits['processes'],
      env=env,
    )

  def _make_directory(self, box: Box, kind: str) -> str:
    """Creates a workspace: a separate file system, if mounts are possible."""
    path = os.path.join(self._directory, f'{kind}_{box.number}')
    os.mkdir(path, 0o700)
    if self.isolated:
      size = box.limits['workspace_bytes']
      linux.mount_tmpfs(path, size, _WORKSPACE_INODES, 0o700, box.uid or 0)
    elif box.uid is not None:
      os.chown(path, box.uid, box.uid)
    return path

  def listen(self, box: Box, port: int) -> socket.socket:
    """Listens on a loopback port of the sandbox's network."""
    if box.network is None:
      raise OSError('the sandbox has no network of its own')
    return linux.listen_in(box.network, port)

  def stage(self, box: Box) -> str:
    """Creates an empty workspace next to the current one. Returns its directory."""
    self.unstage(box)
    box.staged = self._make_directory(box, 'staged')
    return box.staged

  def adopt(self, box: Box) -> None:
    """Replaces the current workspace by the staged one."""
    if not box.staged:
      raise OSError('no workspace was staged')
    old = f'{box.path}.old'
    if self.isolated:
      os.mkdir(old)
      replace = linux.move_mount
    else:
      replace = os.rename
    replace(box.path, old)
    try:
      replace(box.staged, box.path)
    except OSError:
      replace(old, box.path)
      raise
    if self.isolated:
      self._unmake(old)
      os.rmdir(box.staged)
    box.staged = ''

  def unstage(self, box: Box) -> None:
    """Removes a staged workspace; in the weaker mode the caller removes its files."""
    if box.staged and self.isolated:
      self._unmake(box.staged)
    box.staged = ''

  def _unmake(self, path: str) -> None:
    with contextlib.suppress(OSError):
      linux.unmount(path)
    with contextlib.suppress(OSError):
      os.rmdir(path)

  def discard(self, box: Box) -> bool:
    """Removes a sandbox without a running command.

    Returns:
      False if a process is still alive under its uid or in its group. It is killed, and
      uid, group and network are not reused.
    """
    if self.isolated:
      self.unstage(box)
      if box.path:
        self._unmake(box.path)
    alive = set(box.survivors())
    if box.uid is not None and box.group is not None:
      alive.update(linux.processes_of(box.uid))
    for pid in alive:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if box.group is not None:
      self.cgroups.remove(box.group)
    if alive or box.broken:
      return False
    if box.network is not None:
      self._networks.append(box.network)
    if box.uid is not None:
      self._uids.give_back(box.uid)
      box.uid = None
    return True

  def remove(self) -> bool:
    """Removes the directory and the groups. Returns False if groups are still busy."""
    import shutil  # only now: every fork copies loaded modules

    with contextlib.suppress(OSError):
      if self.isolated:
        linux.unmount(self._directory)
    shutil.rmtree(self._directory, ignore_errors=True)
    return self.cgroups.sweep()
