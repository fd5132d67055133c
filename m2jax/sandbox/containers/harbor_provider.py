"""A sandbox of one of Harbor's providers, local or remote, by Harbor's own interface.

`harbor:daytona` or `harbor:MODULE:CLASS` is an environment of Harbor (0.26,
environments/base.py: start, exec, upload, download, stop; Python 3.12). What isolates a
command and limits it is the provider's; Harbor refuses a network mode that the provider
does not have. Files are read by commands, so that their size is bounded here.

Not supported: `listen`, `commit`, `workspace`, and `kill_processes`, which no provider
promises: judge in a new sandbox, with what `copy_out` returns.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import math
import secrets
import shlex
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from m2jax.sandbox import api

PREFIX = 'harbor:'
_INSTALL = 'with Python 3.12 or newer: pip install harbor, and the SDK of the provider'
_GRACE_S = 30.0  # of the provider, beyond a command's time
_FILES_S = 120.0
# Arguments: word, seconds, bytes, command. A provider returns all output at once, so it
# goes to files first, of which the beginning is returned.
_WRAPPER = """\
printf %s "$1" >&2
d=$(mktemp -d) || exit 1
if command -v bash >/dev/null 2>&1; then shell=bash; else shell=sh; fi
timeout -s KILL "$2" "$shell" -c -- "$4" >"$d/o" 2>"$d/e"
code=$?
head -c "$3" "$d/o"
head -c "$3" "$d/e" >&2
rm -rf "$d"
printf %s%d. "$1" "$code" >&2
"""


async def create(
  provider: str,
  container,
  limits: api.Limits,
  env: Mapping[str, str],
) -> HarborSandbox:
  """Starts an environment of a provider.

  Args:
    provider: a name of Harbor's, or MODULE:CLASS of an environment.
    container: `Container`; its image is one that the provider can get.
    limits: memory goes to the provider; output and elapsed time are limited here, the
      other fields are not enforced.
    env: environment variables of its commands.

  Raises:
    SandboxUnavailable: Harbor or the provider is not installed, or refuses.
  """
  if container.read_only:
    raise ValueError('Container.read_only: Harbor has no directories of this machine')
  place = tempfile.TemporaryDirectory(prefix='m2jax-harbor-')
  try:
    environment = _environment(provider, container, limits, env, Path(place.name))
  except ImportError as error:
    place.cleanup()
    raise api.SandboxUnavailable(f'{PREFIX}{provider}: {error}', _INSTALL) from error
  except Exception as error:
    place.cleanup()
    words = f'{PREFIX}{provider}: {error}'
    raise api.SandboxUnavailable(words, 'see the provider in docs of Harbor') from error
  sandbox = HarborSandbox(f'{PREFIX}{provider}', environment, container, limits, place)
  try:
    await sandbox.start()
  except BaseException:
    await sandbox.destroy()
    raise
  return sandbox


def _environment(provider, container, limits, env, place: Path) -> Any:
  from harbor.environments.factory import EnvironmentFactory
  from harbor.models.environment_type import EnvironmentType
  from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
  from harbor.models.trial.paths import TrialPaths

  mode = NetworkMode.NO_NETWORK if container.network == 'none' else NetworkMode.PUBLIC
  config = EnvironmentConfig(
    docker_image=container.image,
    # Rounded up: a provider may sell whole processors.
    cpus=None if container.cpus is None else math.ceil(container.cpus),
    memory_mb=limits.memory_bytes >> 20,
    workdir=container.workdir,
    network_mode=mode,
  )
  definition, trial = place / 'environment', place / 'trial'
  definition.mkdir()
  trial.mkdir()
  (definition / 'Dockerfile').write_text(f'FROM {container.image}\n')
  options = dict(
    environment_dir=definition,
    environment_name='m2jax',
    session_id=f'm2jax-{secrets.token_hex(8)}',
    trial_paths=TrialPaths(trial),
    task_env_config=config,
    network_policy=NetworkPolicy(network_mode=mode),
    persistent_env=dict(env),
  )
  if ':' in provider:
    make = EnvironmentFactory.create_environment_from_import_path
    return make(import_path=provider, **options)
  return EnvironmentFactory.create_environment(EnvironmentType(provider), **options)


class HarborSandbox:
  """An environment of Harbor, and commands in it. Use `create` to make one."""

  def __init__(self, backend: str, environment, container, limits, place):
    self._environment, self._container, self._place = environment, container, place
    self._busy = asyncio.Lock()
    self._ending: asyncio.Future | None = None
    self.backend, self.limits = backend, limits

  async def start(self) -> None:
    """Starts the environment, once."""
    await self._of_provider(self._environment.start(force_build=False))

  async def _of_provider(self, work) -> Any:
    """What the provider does; its errors are not the command's (law 5)."""
    try:
      return await work
    except Exception as error:
      words = f'{self.backend}: {type(error).__name__}: {error}'
      raise api.SandboxError(words) from error

  async def exec(
    self,
    command: str,
    timeout_s: float | None = None,
    *,
    user: str | None = None,
    workdir: str | None = None,
    env: Mapping[str, str] | None = None,
  ) -> api.ExecResult:
    """Runs a bash command; see `ContainerSandbox.exec`.

    A timeout kills the command's process group. Cancellation stops waiting: the command
    continues until its time is over.
    """
    wall_s = api.wall_s(self.limits, timeout_s)
    if (refused := api.impossible(command)) is not None:
      return refused
    word, limit = secrets.token_hex(16), self.limits.output_bytes
    text = command.encode(errors='replace').decode()
    arguments = word, str(wall_s), str(limit + 1), text
    async with self._busy:
      self._check_open()
      began = time.monotonic()
      done = await self._run(_WRAPPER, arguments, wall_s, user, workdir, env)
    elapsed_s = time.monotonic() - began
    _, begun, stderr = (done.stderr or '').partition(word)
    stderr, reported, status = stderr.rpartition(word)
    if not begun or not reported:
      raise api.SandboxError(f'{self.backend}: no status: {(done.stderr or "")[-400:]}')
    code, late = int(status.partition('.')[0]), False
    if code == 137 and elapsed_s >= wall_s:
      code, late = 124, True
    outputs = [(text or '').encode() for text in (done.stdout, stderr)]
    return api.ExecResult(
      code,
      *(output[:limit].decode(errors='replace') for output in outputs),
      truncated=max(map(len, outputs)) > limit,
      wall_s=elapsed_s,
      timed_out=late,
    )

  async def _run(self, script, arguments, wall_s, user=None, workdir=None, env=None):
    words = shlex.join(('sh', '-c', script, 'sh', *arguments))
    whole_s = wall_s + _GRACE_S
    work = self._environment.exec(
      words,
      cwd=workdir or self._container.workdir,
      env=dict(env) if env else None,
      timeout_sec=math.ceil(whole_s),
      user=user or self._container.user,
    )
    return await self._of_provider(asyncio.wait_for(work, whole_s + _GRACE_S))

  async def _fetched(self, script: str, path, limit: int) -> bytes:
    """At most `limit` + 1 bytes that a script writes; `$1` is the path."""
    arguments = str(path), str(limit + 1)
    async with self._busy:
      self._check_open()
      done = await self._run(script, arguments, _FILES_S, 'root')
    if done.return_code == 3:
      raise FileNotFoundError(2, 'No such file', str(path))
    if done.return_code:
      raise api.SandboxPathError(f'{path}: not a regular file, or a link')
    try:
      data = base64.b64decode(''.join((done.stdout or '').split()), validate=True)
    except binascii.Error as error:
      raise api.SandboxPathError(f'{path}: cannot be read') from error
    if len(data) > limit:
      raise api.SandboxPathError(f'{path}: larger than {limit} bytes')
    return data

  async def read(
    self, path: str | PurePosixPath, max_bytes: int | None = None
  ) -> bytes:
    """Returns a regular file's content. Links on the way stay in the environment.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      SandboxPathError: not a regular file, a link, or above `max_bytes`.
    """
    script = '[ ! -L "$1" ] || exit 4; [ -e "$1" ] || exit 3; [ -f "$1" ] || exit 4\n'
    script += 'head -c "$2" -- "$1" | base64'
    return await self._fetched(script, path, max_bytes or self.limits.workspace_bytes)

  async def copy_out(
    self, path: str | PurePosixPath = '.', max_bytes: int | None = None
  ) -> dict[str, bytes]:
    """Returns the regular files below a directory; see `ContainerSandbox.copy_out`."""
    limit = max_bytes or self.limits.workspace_bytes
    script = '[ -e "$1" ] || exit 3; [ -d "$1" ] && [ ! -L "$1" ] || exit 4\n'
    script += 'tar -C "$1" --hard-dereference -cf - . | head -c "$2" | base64'
    packed = await self._fetched(script, path, limit + (limit >> 2) + (1 << 20))
    try:
      with tarfile.open(fileobj=io.BytesIO(packed), mode='r:') as tar:
        entries = [entry for entry in tar if entry.isfile() and not entry.issparse()]
        if sum(entry.size for entry in entries) > limit:
          raise api.SandboxPathError(f'{path}: larger than {limit} bytes')
        named = ((entry.name.removeprefix('./'), entry) for entry in entries)
        return {name: tar.extractfile(entry).read() for name, entry in named}
    except tarfile.TarError as error:
      raise api.SandboxPathError(f'{path}: {error}') from error

  async def write(
    self, path: str | PurePosixPath, data: bytes, mode: int = 0o644
  ) -> None:
    """Writes a file, with its directories. A link on the way leads where it leads."""
    target = PurePosixPath(self._container.workdir or '/', path)
    await self.copy_in({target.name: data}, target.parent)
    await self._done(f'chmod {mode:o} {shlex.quote(str(target))}')

  async def copy_in(
    self, source: Mapping[str, bytes] | Path, path: str | PurePosixPath = '.'
  ) -> None:
    """Writes files below a directory: path -> content, or a directory without links."""
    target = PurePosixPath(self._container.workdir or '/', path)
    with tempfile.TemporaryDirectory(prefix='m2jax-harbor-') as place:
      if isinstance(source, Path):
        files = {
          str(file.relative_to(source)): file.read_bytes()
          for file in source.rglob('*')
          if file.is_file() and not file.is_symlink()
        }
      else:
        files = source
      for name, data in files.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or '..' in pure.parts:
          raise api.SandboxPathError(f'{name!r}: must be a relative path')
        file = Path(place, pure)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
      await self._done(f'mkdir -p {shlex.quote(str(target))}')
      async with self._busy:
        self._check_open()
        upload = self._environment.upload_dir(place, str(target))
        await self._of_provider(upload)

  async def _done(self, command: str) -> None:
    result = await self.exec(command, _FILES_S, user='root', workdir='/')
    if result.returncode:
      raise api.SandboxPathError(f'{command}: {result.stderr.strip()[-200:]}')

  async def fill(self, source: Path) -> None:
    """Copies a directory of the host into the working directory."""
    await self.copy_in(Path(source))

  @property
  def workspace(self) -> Path:
    """No path of this machine; raises SandboxError."""
    raise api.SandboxError(f'{self.backend}: its files are not on this machine')

  async def listen(self, port: int):
    """Not supported; raises SandboxError."""
    raise api.SandboxError(f'{self.backend}: no listener in a remote network')

  async def kill_processes(self) -> None:
    """Not supported; raises SandboxError."""
    raise api.SandboxError(
      f'{self.backend}: does not end processes: judge in a new sandbox'
    )

  async def commit(self) -> str:
    """Not supported; raises SandboxError."""
    raise api.SandboxError(f'{self.backend}: makes no images of its files')

  async def destroy(self) -> None:
    """Ends the environment and deletes it. Idempotent."""
    if self._ending is None:
      self._ending = asyncio.ensure_future(self._end())
    await asyncio.shield(self._ending)

  async def _end(self) -> None:
    try:
      await self._of_provider(self._environment.stop(delete=True))
    finally:
      self._place.cleanup()

  async def __aenter__(self) -> HarborSandbox:
    return self

  async def __aexit__(self, *unused) -> None:
    await self.destroy()

  def _check_open(self) -> None:
    if self._ending is not None:
      raise api.SandboxError('the sandbox was destroyed')
