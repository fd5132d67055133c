"""Resources of sandboxes: directories, uids and control groups.

Only uids are reused, once none of their processes is alive: anything else that a
command could write (a file, a lock, a namespace) ends with its sandbox.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import resource
import signal
import socket
import stat

import cgroups as cgroups_lib
import init
import linux
import root as root_lib
from uids import Uids

_WORKSPACE_INODES = 16384
_GVISOR_FACTOR = 16  # threads of gVisor for one process; about 8 were measured
_GVISOR_OWN = 8  # times this factor, for gVisor itself


class Box:
  """A sandbox: its directories, identity, limits and process 1."""

  def __init__(self, number: int, limits: dict, env: dict):
    self.number = number
    self.limits = limits
    self.env = env
    self.root = None  # root_lib.Root; None in the weaker mode
    self.filters = []  # linux.Filter
    self.gvisor = None  # gvisor.Gvisor, if commands run in it
    self.scratch_bytes = limits['workspace_bytes']  # /tmp and /dev/shm together
    self.path = ''  # the workspace
    self.staged = ''  # a workspace that may replace it
    self.uid = None
    self.group = None
    self.rlimits = []
    self.init = None  # the process id of process 1
    self.connection = None  # to it
    self.run = None  # the command in progress
    self.closing = []  # requests to reply to when nothing of it is left
    self.broken = False  # a process of it may never end

  def drop_uid(self) -> None:
    """Gives up root, if this process has it."""
    if self.uid is not None:
      os.setresgid(self.uid, self.uid, self.uid)
      os.setresuid(self.uid, self.uid, self.uid)

  def unlock(self) -> None:
    """Restores the owner's permissions on the workspace directory.

    A command may have removed them. The next command would then not start, and its
    failure would count as the sandbox's, not as the agent's.
    """
    mode = os.stat(self.path, follow_symlinks=False).st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
      os.chmod(self.path, stat.S_IMODE(mode) | stat.S_IRWXU)


class Machine:
  """Prepares this machine and creates sandboxes. `config`: see `client.py`."""

  def __init__(self, config: dict):
    self.isolated = config['backend'] != 'rlimit_only'
    self._runsc = config['runsc']  # '' if gVisor is not used
    self.parallel = config['parallel']
    self.root = os.geteuid() == 0
    self._directory = config['directory']
    self._uids = Uids(*config['uids']) if self.root else None
    self._next_number = 0
    self._root, self._filters = None, []
    self.cgroups = cgroups_lib.Cgroups('none', {}, 'not requested')
    linux.new_session_keyring()
    linux.adopt_orphans()
    if self.isolated:
      linux.enter_private_mounts()
      linux.mount_tmpfs(self._directory, 16 << 20, 65536, 0o711, 0)
      self._root = root_lib.prepare(
        self._directory,
        config['read_only'],
        config['hidden'],
        nested=bool(self._runsc),
      )
      self._filters = [linux.Filter(program) for program in config['filters']]
    else:
      os.chmod(self._directory, 0o711)
    if config['cgroups']:
      self.cgroups = cgroups_lib.detect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    self._shared_processes = linux.threads_of(os.getuid())

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
    box = Box(self._next_number, limits, env)
    self._next_number += 1
    try:
      if self.root:
        box.uid = self._uids.take()
      box.path = self._make_directory(box, 'workspace')
      processes = limits['processes']
      if self.isolated:
        box.root, box.filters = self._root, self._filters
        if self.cgroups.kind != 'none':
          most = processes
          if self._runsc:
            most = _GVISOR_FACTOR * (processes + _GVISOR_OWN)
          box.group = self.cgroups.make(str(box.number), limits['memory_bytes'], most)
      elif not self.root:
        processes = self._shared_processes + processes * self.parallel
      box.rlimits = init.resource_limits(
        cpu_s=limits['cpu_s'],
        file_bytes=limits['file_bytes'],
        address_bytes=None if box.group else limits['memory_bytes'],
        processes=processes,
      )
      if self._runsc:
        import gvisor  # only now: every fork copies loaded modules

        box.gvisor = gvisor.Gvisor(self._runsc, box.rlimits, box.scratch_bytes)
        box.scratch_bytes = gvisor.OWN_BYTES
        box.rlimits = [pair for pair in box.rlimits if pair[0] == resource.RLIMIT_CORE]
      self._start(box)
    except BaseException:
      self.discard(box)
      raise
    return box

  def _start(self, box: Box) -> None:
    """Starts process 1 and waits until it is ready."""
    box.init, box.connection = init.start(box)
    try:
      error, _ = marshal.loads(box.connection.recv(init.MESSAGE_BYTES))
    except (TimeoutError, EOFError) as unready:
      raise OSError('process 1 of a sandbox did not start') from unready
    if error:
      raise OSError(error)
    box.connection.settimeout(None)

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
    if not self.isolated:
      raise OSError('the sandbox has no network of its own')
    network = os.open(f'/proc/{box.init}/ns/net', os.O_RDONLY | os.O_CLOEXEC)
    try:
      return linux.listen_in(network, port)
    finally:
      os.close(network)

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
      workspace = linux.clone_mount(box.path)
      socket.send_fds(box.connection, [marshal.dumps(('workspace',))], [workspace])
      os.close(workspace)
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

  def discard(self, box: Box) -> None:
    """Removes a sandbox without a running command.

    If a process of it may be alive (`Box.broken`), its uid is not used again.
    """
    if box.connection is not None:
      box.connection.close()
    if box.init is not None:
      with contextlib.suppress(ProcessLookupError):
        os.kill(box.init, signal.SIGKILL)
      if not box.broken:
        os.waitpid(box.init, 0)
    if self.isolated:
      self.unstage(box)
      if box.path:
        self._unmake(box.path)
    if box.group is not None:
      self.cgroups.remove(box.group)
    if box.uid is not None and not box.broken:
      self._uids.give_back(box.uid)
      box.uid = None

  def remove(self) -> bool:
    """Removes the directory and the groups. Returns False if groups are still busy."""
    import shutil  # only now: every fork copies loaded modules

    with contextlib.suppress(OSError):
      if self.isolated:
        linux.unmount(self._directory)
    shutil.rmtree(self._directory, ignore_errors=True)
    return self.cgroups.sweep()
