"""A sandbox in a container: the methods of `Sandbox`, in the file system of an image.

The container's main process sleeps and reaps; every command is an `exec` of the engine.
This process reads and writes the container's files through a descriptor of its root,
without following links, and enters its process and network namespaces through
descriptors too (`inside`), which never become those of another container.

A wrapper reports a command's start and its status on stderr, between words that only
it knows, so that the engine's failures (SandboxError, law 5) are never a command's
status. What a command can cause, such as the end of the main process, no shell, or no
process left to start one, is the command's failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import io
import os
import re
import secrets
import socket
import stat
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path, PurePosixPath

from m2jax.sandbox import api, archive, files
from m2jax.sandbox.containers import enforcement, engines, owners, snapshots

_INSIDE = Path(__file__).with_name('inside.py')
_ARCHIVE_OVERHEAD_BYTES = 64 << 20  # headers, long names
_FLOOD = 64  # times `output_bytes`: the command is killed
_TAIL_BYTES = 4096
_MAX_ACCOUNTS_BYTES = 1 << 20
_KILLS, _KILL_S = 20, 1.0  # attempts to end a command, and time for each
NETWORKS = ('none', 'public')
_NOT_FILES = ('proc', 'sys', 'dev')  # of the kernel
# Reaps orphans. Without sleep it ends, rather than loop.
_MAIN = 'while :; do sleep 86400 & wait $!; [ $? = 127 ] && exit; done'
# $1: the word; $2: the command; $3: its directory. Some images have no bash.
_WRAPPER = """\
printf %s "$1" >&2
cd -- "$3" || { printf %s126. "$1" >&2; exit 126; }
if command -v bash >/dev/null 2>&1; then bash -c -- "$2"; else sh -c -- "$2"; fi
code=$?
printf %s%d. "$1" "$code" >&2
exit "$code"
"""
# Needs nothing but a shell.
_WHO = """\
while read -r name id _; do case $name in Uid:|Gid:) echo "$id";; esac; done \
< /proc/self/status
"""


@dataclasses.dataclass(frozen=True)
class Container:
  """What a container needs beyond `Limits`.

  Attributes:
    image: name of an image that this machine has; it is never pulled.
    network: 'none', or 'public': the engine's default network, which reaches whatever
      this machine's routes reach.
    cpus: processors; None is all.
    workdir: overrides the image's WORKDIR; made if missing.
    user: user of the commands; None is the image's.
    read_only: (directory on the host, path in the container).
  """

  image: str
  network: str = 'none'
  cpus: float | None = None
  workdir: str | None = None
  user: str | None = None
  read_only: tuple[tuple[str, str], ...] = ()

  def __post_init__(self):
    if not self.image or self.image.startswith('-'):
      raise ValueError(f'Container.image={self.image!r}: must be the name of an image')
    if self.network not in NETWORKS:
      raise ValueError(
        f"Container.network={self.network!r}: must be 'none' or 'public'"
      )
    if self.cpus is not None and not self.cpus > 0:
      raise ValueError(f'Container.cpus={self.cpus!r}: must be a positive number')
    if self.workdir is not None and not self.workdir.startswith('/'):
      raise ValueError(f'Container.workdir={self.workdir!r}: must be an absolute path')
    for source, target in self.read_only:
      if (
        not os.path.isdir(source)
        or not target.startswith('/')
        or ',' in source + target
      ):
        raise ValueError(
          f'Container.read_only: {(source, target)} must be (directory, absolute '
          'path), without commas'
        )


@dataclasses.dataclass(frozen=True)
class Live:
  """A running container.

  Attributes:
    name, pid: the container's name and the pid of its main process.
    root, processes, network: descriptors of its root and of two of its namespaces.
    group: its control groups.
    tree: its files.
    workdir, user: absolute path, and user of the commands.
  """

  name: str
  pid: int
  root: int
  processes: int
  network: int
  group: enforcement.Group
  tree: files.Tree
  workdir: str
  user: str

  def close(self) -> None:
    for fd in (self.root, self.processes, self.network):
      os.close(fd)


class ContainerSandbox:
  """A container, and commands in it. Use `create` to make one."""

  def __init__(
    self,
    engine: str,
    container: Container,
    limits: api.Limits,
    env: Mapping[str, str],
  ):
    self._engine, self._container, self._env = engine, container, dict(env)
    self._live: Live | None = None
    self._busy = asyncio.Lock()
    self._stop: asyncio.Future | None = None  # of the command that runs
    self._ending: asyncio.Future | None = None
    self._listeners: list[socket.socket] = []
    self.backend = engine
    self.limits = limits

  async def start(self) -> None:
    """Starts the container, once, and checks what it enforces."""
    self._live = await _started(
      self._engine, self._container, self._container.image, self.limits, self._env
    )

  @property
  def workspace(self) -> Path:
    """The working directory, for code of this process and its children.

    Its contents are untrusted: `read` follows no links, but `open` does.

    Raises:
      SandboxPathError: a command has replaced it.
      FileNotFoundError: a command has removed it.
    """
    self._check_open()
    os.close(self._directory('.'))
    root = f'/proc/{os.getpid()}/fd/{self._live.root}'
    return Path(root, self._live.workdir.lstrip('/'))

  # Commands -------------------------------------------------------------------------

  async def exec(
    self,
    command: str,
    timeout_s: float | None = None,
    *,
    user: str | None = None,
    workdir: str | None = None,
    env: Mapping[str, str] | None = None,
  ) -> api.ExecResult:
    """Runs a bash command, or one of sh without bash; commands run sequentially.

    What it leaves in the background continues, as in any container, until
    `kill_processes`. A timeout, too much output or cancellation kills all processes
    but the main one; after cancellation the next call waits for this.

    Args:
      command: text for `bash -c`, in the working directory, without input.
      timeout_s: elapsed time until it is killed, if below `limits.wall_s`.
      user, workdir, env: instead of, and in addition to, those of the container.

    Raises:
      ValueError: `timeout_s` is not a positive number.
      SandboxError: the engine failed, not the command.
    """
    wall_s = api.wall_s(self.limits, timeout_s)
    if (refused := api.impossible(command)) is not None:
      return refused
    text = command.encode(errors='replace').decode()
    options = [f'--env={key}={value}' for key, value in (env or {}).items()]
    place = self._absolute(workdir or '.')
    who = user or self._live.user
    await self._busy.acquire()
    try:
      self._check_open()
      self._stop = stop = asyncio.get_running_loop().create_future()
      work = self._execute(text, wall_s, who, place, options, stop)
      task = asyncio.ensure_future(work)
    except BaseException:
      self._busy.release()
      raise
    task.add_done_callback(self._over)
    try:
      return await asyncio.shield(task)
    except asyncio.CancelledError:
      _set(stop, 'cancelled')
      raise

  def _over(self, done: asyncio.Future) -> None:
    self._busy.release()
    if not done.cancelled():
      done.exception()  # mark it as retrieved if the caller was cancelled

  async def _execute(
    self, command: str, wall_s: float, user: str, place: str, options, stop
  ) -> api.ExecResult:
    for attempt in range(2):
      ran = await self._attempt(command, wall_s, user, place, options, stop)
      if ran.started or ran.ended_by or attempt:
        break
      # Processes of earlier commands may have left no room for another.
      await self._kill()
    return await self._result(ran)

  async def _attempt(self, command, wall_s, user, place, options, stop) -> _Ran:
    word = secrets.token_hex(16)
    kills = self._live.group.oom_kills()
    process = engines.start(
      self._engine,
      'exec',
      *options,
      f'--user={user}',
      self._live.name,
      *('sh', '-c', _WRAPPER, 'sh', word, command, place),
    )
    limit = self.limits.output_bytes
    outputs = _Output(limit), _Output(limit, word.encode())
    sinks = (functools.partial(self._take, output, stop) for output in outputs)
    reading = asyncio.ensure_future(process.communicate(*sinks))
    ended_by, began = '', None
    # The engine takes a while to start the command, which is not the command's time.
    begun = asyncio.ensure_future(outputs[1].begun.wait())
    first = (reading, stop, begun)
    await asyncio.wait(first, timeout=engines.START_S, return_when='FIRST_COMPLETED')
    began = time.monotonic()
    if begun.done():
      await asyncio.wait((reading, stop), timeout=wall_s, return_when='FIRST_COMPLETED')
    begun.cancel()
    wall = time.monotonic() - began
    if not reading.done():
      ended_by = stop.result() if stop.done() else 'wall'
      if not begun.done() and not stop.done():
        ended_by = 'engine'
      for _ in range(_KILLS):  # the engine may still be about to start the command
        with contextlib.suppress(api.SandboxError):
          await self._kill()
        await asyncio.wait((reading,), timeout=_KILL_S)
        if reading.done():
          break
      process.kill()
    elif stop.done():
      ended_by = stop.result()  # too much output, by a command that then ended
    code = await reading
    oom = self._live.group.oom_kills() > kills
    return _Ran(code, *outputs, ended_by, wall, oom)

  def _take(self, output: _Output, stop: asyncio.Future, block: bytes) -> None:
    if output.add(block) > _FLOOD * self.limits.output_bytes:
      _set(stop, 'output')

  async def _result(self, ran: _Ran) -> api.ExecResult:
    codes = {'wall': 124, 'output': 137, 'cancelled': 137, 'destroyed': 137}
    stderr = ran.stderr.text()
    if ran.ended_by in codes:
      code = codes[ran.ended_by]
    elif ran.stderr.status is not None:
      code = ran.stderr.status
    else:
      # Its shell was killed, or there was none to start.
      if not await self._running():
        stderr += f'{self._engine}: the main process of the container has ended\n'
        code = 137
      elif ran.started or ran.oom:
        code = ran.returncode if ran.returncode > 128 else 137
      elif ran.returncode in (126, 127, 137):
        stderr += ran.stderr.preface()
        code = ran.returncode
      elif await self._starts_programs():
        stderr += f'{self._engine}: no shell runs in the container\n'
        code = 137
      else:
        late = f'no start in {engines.START_S:g} s' if ran.ended_by else ''
        words = late or ran.stderr.preface().strip()[-400:]
        raise api.SandboxError(f'{self._engine} exec: {words}')
    return api.ExecResult(
      returncode=code,
      stdout=ran.stdout.text(),
      stderr=stderr,
      truncated=ran.stdout.truncated or ran.stderr.truncated,
      wall_s=ran.wall_s,
      timed_out=ran.ended_by == 'wall',
      oom=ran.oom,
    )

  async def _running(self) -> bool:
    question = 'container', 'inspect', '--format={{.State.Running}}', self._live.name
    return await engines.checked(self._engine, *question) == 'true'

  async def _starts_programs(self) -> bool:
    """Whether the engine works, so that files of the container are at fault.

    It is asked for a program that nobody can have put there, and says so. It reads the
    accounts, and waits if they are a pipe.
    """
    for accounts in ('etc/passwd', 'etc/group'):
      with contextlib.suppress(FileNotFoundError):
        try:
          self._live.tree.read(accounts, _MAX_ACCOUNTS_BYTES)
        except api.SandboxPathError:
          return True
    absent = f'/{secrets.token_hex(16)}'
    done = await engines.run(
      self._engine, 'exec', '--user=0:0', self._live.name, absent
    )
    return done.returncode in (126, 127)

  async def kill_processes(self) -> None:
    """Kills all processes but the main one. On return they have ended.

    Raises:
      SandboxError: one did not end.
    """
    await self._alone(self._kill)

  async def _kill(self) -> None:
    done = await _inside('kill', self._live.processes)
    if done and await self._running():
      raise api.SandboxError(f'kill processes of a container: {done}')

  async def _alone(self, work):
    """Runs `work()` exclusively and to its end, even if the caller is cancelled."""
    await self._busy.acquire()
    try:
      self._check_open()
      task = asyncio.ensure_future(work())
    except BaseException:
      self._busy.release()
      raise
    task.add_done_callback(self._over)
    return await asyncio.shield(task)

  # Files ----------------------------------------------------------------------------

  def _absolute(self, path: str | PurePosixPath) -> str:
    """A path in the container; without '..', links are not resolved."""
    pure = PurePosixPath(self._live.workdir, path)
    if '..' in pure.parts or '\0' in str(pure):
      raise api.SandboxPathError(f'{str(path)!r}: must be a path in the container')
    return str(pure)

  def _inner(self, path: str | PurePosixPath) -> str:
    """A path relative to the container's root, not of its kernel's file systems."""
    inner = self._absolute(path).lstrip('/')
    if inner.partition('/')[0] in _NOT_FILES:
      raise api.SandboxPathError(f'{path}: a file system of the kernel')
    return inner

  def _directory(self, path: str | PurePosixPath, *, make: bool = False) -> int:
    if not (inner := self._inner(path)):
      return os.open('.', files.DIRECTORY, dir_fd=self._live.root)
    return self._live.tree.open_directory(inner, make=make)

  async def read(
    self, path: str | PurePosixPath, max_bytes: int | None = None
  ) -> bytes:
    """Returns the content of a file, without following links.

    Args:
      path: relative to the working directory, or absolute in the container.
      max_bytes: the most that it may have; default `limits.workspace_bytes`.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      SandboxPathError: not a regular file of the container, or above `max_bytes`.
    """

    async def work():
      limit = max_bytes or self.limits.workspace_bytes
      return await asyncio.to_thread(self._live.tree.read, self._inner(path), limit)

    return await self._alone(work)

  async def write(
    self, path: str | PurePosixPath, data: bytes, mode: int = 0o644
  ) -> None:
    """Writes a file, replacing what was there; follows no links.

    The file, and directories that were missing, belong to the user of the commands.

    Raises:
      SandboxPathError: `path` contains a link or is a directory.
      WorkspaceFull: no space is left.
    """

    async def work():
      write = self._live.tree.write
      return await asyncio.to_thread(write, self._inner(path), data, mode)

    await self._alone(work)

  async def copy_in(
    self, source: Mapping[str, bytes] | Path, path: str | PurePosixPath = '.'
  ) -> None:
    """Writes files below a directory; see `write`.

    Args:
      source: relative path -> content; or a directory of this machine, of which regular
        files are copied with their modes, and links and others are not.
      path: the directory; made if missing.
    """

    async def work():
      await asyncio.to_thread(self._copy_in, source, PurePosixPath(path))

    await self._alone(work)

  def _copy_in(self, source, path: PurePosixPath) -> None:
    os.close(self._directory(path, make=True))
    if not isinstance(source, Path):
      for name, data in source.items():
        self._live.tree.write(self._inner(path / name), data)
      return
    for top, _, names in os.walk(source):
      for name in names:
        file = Path(top, name)
        info = file.lstat()
        if stat.S_ISREG(info.st_mode):
          inner = self._inner(path / file.relative_to(source))
          self._live.tree.write(inner, file.read_bytes(), stat.S_IMODE(info.st_mode))

  async def fill(self, source: Path) -> None:
    """Copies a directory of the host into the working directory; see `copy_in`."""
    await self.copy_in(Path(source))

  async def copy_out(
    self, path: str | PurePosixPath = '.', max_bytes: int | None = None
  ) -> dict[str, bytes]:
    """Returns the regular files below a directory, by their relative paths.

    Follows no links; links, pipes and empty directories are omitted.

    Args:
      path: the directory.
      max_bytes: the most that they may have together; default
        `limits.workspace_bytes`.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      SandboxPathError: it is not a directory, or they have more.
    """
    limit = max_bytes or self.limits.workspace_bytes

    async def work():
      return await asyncio.to_thread(self._copy_out, path, limit)

    return await self._alone(work)

  def _copy_out(self, path, limit: int) -> dict[str, bytes]:
    fd = self._directory(path)
    try:
      packed = archive.pack(fd, limit + _ARCHIVE_OVERHEAD_BYTES, force=False)
      return _unpacked(packed, limit)
    except tarfile.TarError as error:  # a file changed while it was read
      raise api.SandboxPathError(f'{path}: {error}') from error
    except OSError as error:
      raise api.SandboxPathError(f'{path}: {error.strerror or error}') from error
    finally:
      os.close(fd)

  # Network --------------------------------------------------------------------------

  async def listen(self, port: int) -> socket.socket:
    """Listens on 127.0.0.1:`port` of the container's own network.

    Only processes of this container can connect, so a connection proves who its client
    is. The socket stops listening when the sandbox is destroyed; the caller closes it.

    Raises:
      SandboxError: the port is in use.
    """
    self._check_open()
    ours, theirs = socket.socketpair()
    with ours, theirs:
      descriptors = self._live.network, port, theirs.fileno()
      asked = _inside('listen', *descriptors, keep=theirs.fileno())
      if words := await asyncio.shield(asyncio.ensure_future(asked)):
        raise api.SandboxError(f'listen on port {port}: {words}')
      ours.setblocking(False)
      _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    listener = socket.socket(fileno=fds[0])
    listener.set_inheritable(False)
    if self._ending is not None:
      listener.close()
    self._check_open()
    self._listeners.append(listener.dup())
    return listener

  def _stop_listening(self) -> None:
    for listener in self._listeners:
      with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # also ends that of the caller
      listener.close()
    self._listeners.clear()

  def shell(self, terminal: bool) -> tuple[list[str], dict[str, str]]:
    """The command of an interactive shell in the container, and its environment.

    For a person: nothing limits how long it runs or what it prints.

    Args:
      terminal: whether the input is one.
    """
    self._check_open()
    command = [self._engine, 'exec', '--interactive', *['--tty'] * terminal]
    command += ['--user', self._live.user, '--workdir', self._live.workdir]
    words = 'command -v bash >/dev/null && exec bash; exec sh'
    return [*command, self._live.name, 'sh', '-c', words], engines.environment()

  # Snapshots ------------------------------------------------------------------------

  async def commit(self) -> str:
    """Returns the name of a new image: the container's files, without mounts.

    Kill its processes first, or files may be from different times. The image is
    removed when this process ends, or by `discard`.

    Raises:
      SandboxError: the engine failed.
    """
    return await self._alone(self._commit)

  async def _commit(self) -> str:
    image = f'{owners.SNAPSHOTS}:{owners.new_name()}'
    owners.keep(self._engine, 'rmi', image)
    await snapshots.commit(self._engine, self._live.name, image)
    return image

  @contextlib.asynccontextmanager
  async def fork(
    self,
    container: Container,
    limits: api.Limits,
    env: Mapping[str, str] | None = None,
  ) -> AsyncIterator[ContainerSandbox]:
    """A new container of this one's files, while the context is open.

    The processes of this one are killed first; what the new one writes stays there.

    Args:
      container: its network, user and so on; its image is not used. None for workdir
        and user are those of this one.
      limits, env: as for `create`; the environment of this one's image is there too.
    """
    await self.kill_processes()
    live, snapshot = self._live, ''
    if self._engine == 'podman':
      # Without a copy: an overlay. Nor does `podman commit` translate the ids of a
      # container with a uid map.
      image = await engines.checked(self._engine, 'mount', live.name)
      names = '--format={{range .Config.Env}}{{println .}}{{end}}'
      words = await engines.checked(
        self._engine, 'container', 'inspect', names, live.name
      )
      inherited = dict(line.split('=', 1) for line in words.splitlines() if '=' in line)
    else:
      image = snapshot = await self.commit()
      inherited = {}
    place = dataclasses.replace(
      container,
      image=image,
      workdir=container.workdir or live.workdir,
      user=container.user or live.user,
    )
    env = {**inherited, **(env or {})}
    try:
      async with ContainerSandbox(self._engine, place, limits, env) as other:
        await other.start()
        yield other
    finally:
      if snapshot:
        await self.discard(snapshot)
      else:
        await engines.run(self._engine, 'umount', live.name)

  async def discard(self, image: str) -> None:
    """Removes an image of `commit`; containers of it go on."""
    await engines.run(self._engine, 'rmi', '--force', image)
    owners.removed(self._engine, 'rmi', image)

  async def snapshot(self) -> bytes:
    """Returns a token of an image of the container's files, for `restore`.

    All files are part of it, and the image lasts as long as this process.
    """
    return (await self.commit()).encode()

  async def restore(self, snapshot: bytes) -> None:
    """Continues in a new container with the files of a snapshot.

    All processes and listeners end. If it fails, the container is unchanged.

    Raises:
      SandboxError: `snapshot` is not from `snapshot`, or the engine failed.
    """

    async def work():
      image = snapshot.decode(errors='replace')
      if not image.startswith(f'{owners.SNAPSHOTS}:'):
        raise api.SandboxError('restore: not a snapshot of a container')
      old = self._live
      place = dataclasses.replace(
        self._container, workdir=old.workdir, user=self._live.user
      )
      self._live = await _started(self._engine, place, image, self.limits, self._env)
      self._stop_listening()
      old.close()
      await _removed(self._engine, old.name)

    await self._alone(work)

  # The end --------------------------------------------------------------------------

  async def destroy(self) -> None:
    """Ends the sandbox and removes its container. Idempotent.

    Kills a running command at once. On return no process of the sandbox is alive.
    """
    if self._ending is None:
      self._stop_listening()
      if self._stop is not None:
        _set(self._stop, 'destroyed')
      self._ending = asyncio.ensure_future(self._end())
    await asyncio.shield(self._ending)

  async def _end(self) -> None:
    async with self._busy:
      if self._live is not None:
        self._live.close()
        await _removed(self._engine, self._live.name)

  async def __aenter__(self) -> ContainerSandbox:
    return self

  async def __aexit__(self, *unused) -> None:
    await self.destroy()

  def _check_open(self) -> None:
    if self._ending is not None:
      raise api.SandboxError('the sandbox was destroyed')


# Starting and removing containers -----------------------------------------------------


async def _started(
  engine: str,
  container: Container,
  image: str,
  limits: api.Limits,
  env: Mapping[str, str],
) -> Live:
  """Starts a container; it has been checked when it is returned.

  Raises:
    SandboxUnavailable: the engine does not enforce what a sandbox promises.
    SandboxError: it does not start.
  """
  user, place, source = '', '', (image,)
  if image.startswith('/'):  # files of a container, `fork`
    source = '--rootfs', f'{image}:O'
  else:
    words = await engines.checked(
      engine,
      *('image', 'inspect', '--format={{.Config.User}}|{{.Config.WorkingDir}}', image),
    )
    user, _, place = words.partition('|')
  name = owners.new_name()
  owners.keep(engine, 'rm', name)
  live = None
  try:
    await engines.checked(
      engine,
      *('run', '--detach', '--name', name),
      *enforcement.options(engine, limits, container.network, container.cpus),
      *(f'--mount=type=bind,src={s},dst={t},readonly' for s, t in container.read_only),
      *(f'--env={key}={value}' for key, value in env.items()),
      *('--user=0:0', '--workdir=/', '--entrypoint=', *source, 'sh', '-c', _MAIN),
    )
    facts = 'container', 'inspect', '--format={{.State.Pid}}', name
    pid = int(await engines.checked(engine, *facts))
    if not pid:
      raise api.SandboxError(f'{image}: `sh` or `sleep` does not run in it')
    who, workdir = container.user or user or '0', container.workdir or place or '/'
    live = await _opened(engine, name, pid, workdir, who)
    enforcement.check(engine, pid, live.group, limits, container.network)
    if workdir != '/':
      _make_workdir(live, enforcement.outside(pid, 'uid', 0))
    return live
  except BaseException as error:
    if live is not None:
      live.close()
    await asyncio.shield(_removed(engine, name))
    if isinstance(error, OSError):  # its main process has ended
      raise api.SandboxError(
        f'{image}: the container did not start: {error}'
      ) from error
    raise


async def _opened(engine, name: str, pid: int, workdir: str, user: str) -> Live:
  with contextlib.ExitStack() as stack:

    def opened(path: str, flags: int) -> int:
      fd = os.open(f'/proc/{pid}/{path}', flags | os.O_CLOEXEC)
      stack.callback(os.close, fd)
      return fd

    root = opened('root', os.O_RDONLY | os.O_DIRECTORY)
    processes, network = (opened(f'ns/{n}', os.O_RDONLY) for n in ('pid', 'net'))
    group = enforcement.Group.of(pid)
    options = f'--user={user}', name, 'sh', '-c', _WHO
    ids = (await engines.checked(engine, 'exec', *options)).split()
    if len(ids) != 2 or not all(map(str.isdecimal, ids)):
      raise api.SandboxError(f'{name}: no user of its commands: {ids}')
    uid, gid = (
      enforcement.outside(pid, kind, int(number))
      for kind, number in zip(('uid', 'gid'), ids, strict=True)
    )
    tree = files.Tree(root, uid, gid)
    stack.pop_all()
    return Live(name, pid, root, processes, network, group, tree, workdir, user)


def _make_workdir(live: Live, root: int) -> None:
  """Makes the working directory; a missing one becomes the user's.

  podman makes one that its image lacks as user 0 of this machine, not of the image.
  """
  fd = live.tree.open_directory(live.workdir.lstrip('/'), make=True)
  try:
    if os.fstat(fd).st_uid == 0 != root:
      os.fchown(fd, root, root)
  finally:
    os.close(fd)


async def _removed(engine: str, name: str) -> None:
  done = await engines.run(engine, 'rm', '--force', '--volumes', name)
  if not done.returncode:
    owners.removed(engine, 'rm', name)


async def _inside(command: str, *arguments: int, keep: int = -1) -> str:
  """Runs `inside`; returns why it failed, or ''."""
  words = []
  process = engines.Process(
    (sys.executable, '-I', '-S', str(_INSIDE), command, *map(str, arguments)),
    env={},
    keep=[fd for fd in (arguments[0], keep) if fd >= 0],
  )
  code = await process.communicate(lambda _: None, words.append)
  return b''.join(words).decode(errors='replace').strip()[-400:] if code else ''


# Output -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Ran:
  """How an `exec` of the engine ended, by itself or by what."""

  returncode: int
  stdout: _Output
  stderr: _Output
  ended_by: str
  wall_s: float
  oom: bool

  @property
  def started(self) -> bool:
    return self.stderr.begun.is_set()


class _Output:
  """The first bytes of a stream; of stderr, what the wrapper reports too."""

  def __init__(self, limit: int, word: bytes = b''):
    self._limit, self._word = limit, word
    self._head, self._tail, self._bytes = b'', b'', 0
    self._preface = b''
    self.begun = asyncio.Event()

  def add(self, block: bytes) -> int:
    """Adds a block; returns how many bytes the command has written."""
    if self._word and not self.begun.is_set():
      before, found, block = (self._preface + block).partition(self._word)
      self._preface = before[-self._limit - len(self._word) :]
      if not found:
        return 0
      self.begun.set()
    self._bytes += len(block)
    kept = self._limit + _TAIL_BYTES
    self._head += block[: max(kept - len(self._head), 0)]
    self._tail = (self._tail + block)[-_TAIL_BYTES:]
    return self._bytes

  def _report(self) -> re.Match | None:
    found = re.compile(re.escape(self._word) + rb'(\d{1,3})\.').finditer(self._tail)
    return next(reversed(list(found)), None) if self._word else None

  @property
  def status(self) -> int | None:
    """The command's status, if its wrapper reported one."""
    report = self._report()
    return int(report[1]) if report else None

  @property
  def _own_bytes(self) -> int:
    report = self._report()
    return self._bytes - (len(self._tail) - report.start() if report else 0)

  @property
  def truncated(self) -> bool:
    return self._own_bytes > self._limit

  def text(self) -> str:
    own = self._head[: min(self._own_bytes, self._limit)]
    return own.decode(errors='replace')

  def preface(self) -> str:
    """What the engine wrote before the command started."""
    return self._preface.decode(errors='replace')


def _set(future: asyncio.Future, value: str) -> None:
  if not future.done():
    future.set_result(value)


def _unpacked(packed: bytes, limit: int) -> dict[str, bytes]:
  """The files of an archive; a sparse file counts with its holes."""
  found, total = {}, 0
  with tarfile.open(fileobj=io.BytesIO(packed), mode='r:') as tar:
    for entry in tar:
      if entry.isfile():
        total += entry.size
        if total > limit:
          raise api.SandboxPathError(f'the files are larger than {limit} bytes')
        found[entry.name] = tar.extractfile(entry).read()
      elif entry.islnk():
        found[entry.name] = found[entry.linkname]  # one object, of the same bytes
  return found
