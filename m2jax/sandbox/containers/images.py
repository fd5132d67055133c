"""Builds images of directories with a Dockerfile, once each, and removes old ones.

An image's name is a hash of what it is made of: the directory's files, the build's
arguments, the local images that it begins with. The steps of a Dockerfile run as
root of this machine, with the engine's default capabilities and filter of system calls
and without limits: podman 4 gives files the wrong owners if it maps users in a build.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

from m2jax.sandbox import api
from m2jax.sandbox.containers import engines
from m2jax.sandbox.containers.engines import unavailable as unavailable

_NAME = 'localhost/m2jax/built'
_WAIT_S = 0.1  # between attempts at a lock that another builder holds
_LINES = re.IGNORECASE | re.MULTILINE
_FROM = re.compile(r'^([ \t]*FROM[ \t]+(?:--\S+[ \t]+)*)(\S+)', _LINES)
_STAGE = re.compile(r'^[ \t]*FROM[ \t][^\n]*[ \t]AS[ \t]+(\S+)', _LINES)
_COPY_FROM = re.compile(r'(^[ \t]*COPY[ \t][^\n]*--from=)(\S+)', _LINES)
# What no task needs: a cache is another build's, and other mounts, or a cache's id,
# lead podman 4.3 to files of this machine (CVE-2024-1753, CVE-2024-9675).
_CACHE = re.compile(r'--mount=(?:\S*,)?type=cache(?:,\S*)?[ \t]')
_OPTIONS = re.compile('RUN--(mount|network|security|device)', re.IGNORECASE)
_NOT_STEPS = re.compile(r'^[ \t]*#.*$', re.MULTILINE)
_MAX_DOCKERFILE_BYTES = 1 << 20


class BuildFailed(api.SandboxError):
  """An image cannot be built: its Dockerfile, or what it needs, is at fault."""

  repeatable = False


async def build(
  context: Path,
  *,
  engine: str = 'podman',
  dockerfile: str = 'Dockerfile',
  network: str = 'host',
  timeout_s: float = 1800.0,
  replace: Mapping[str, str] | None = None,
  args: Mapping[str, str] | None = None,
  max_bytes: int = 4 << 30,
) -> str:
  """Builds an image, unless it exists; returns its name.

  Concurrent builders of an image, also in other processes, wait for one build.

  Args:
    context: directory. Links in it are copied as links.
    engine: 'podman' or 'docker'.
    dockerfile: path in it.
    network: network of its steps: 'host', 'none', or a network of the engine. A step
      sees all that its network reaches. Images that it begins with are pulled.
    timeout_s: time for the build.
    replace: image named by FROM or COPY --from -> local image to take instead.
    args: build arguments.
    max_bytes: the most that the directory may have.

  Raises:
    BuildFailed: it is not built in time, or at all; or the directory is too large, or
      has something other than files, directories and links.
  """
  with tempfile.TemporaryDirectory(prefix='m2jax-build-') as place:
    copy = Path(place, 'context')
    await asyncio.to_thread(_copy, Path(context), copy, max_bytes)
    file = copy / dockerfile
    if file.is_symlink() or not file.is_file():
      raise BuildFailed(f'{context}: no file {dockerfile}')
    if file.stat().st_size > _MAX_DOCKERFILE_BYTES:
      raise BuildFailed(f'{file.name}: more than {_MAX_DOCKERFILE_BYTES} bytes')
    text = _checked(file.read_text(errors='surrogateescape'), f'{context}/{dockerfile}')
    text, bases = _replaced(text, replace or {})
    file.write_text(text, errors='surrogateescape')
    # By its name podman may have cpp read it, which includes files of this machine.
    file = Path(place, 'Dockerfile')
    file.write_text(text, errors='surrogateescape')
    parts = [_hash(copy), engine, network, dockerfile, *sorted((args or {}).items())]
    offline = engine == 'podman' and network == 'none'
    stages = {*_STAGE.findall(text), 'scratch'}
    for base in bases:
      found = await _id(engine, base)
      if offline and not found and base not in stages and not base.startswith('-'):
        await engines.run(engine, 'pull', '--quiet', base, timeout_s=timeout_s)
        found = await _id(engine, base)
      parts.append((base, found))
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    image = f'{_NAME}:{digest}'
    async with _locked(engine, digest):
      if not await _id(engine, image):
        await _build(engine, image, copy, file, network, args or {}, timeout_s)
  return image


async def _build(engine, image, copy, file, network, args, timeout_s) -> None:
  options = ['--network', network, '--file', str(file), '--tag', image]
  options += [f'--build-arg={key}={value}' for key, value in args.items()]
  # Otherwise ADD fetches what this machine reaches, whatever the network of the steps.
  offline = engine == 'podman' and network == 'none'
  options += ['--http-proxy=false'] * offline
  done = await engines.run(
    engine, 'build', *options, str(copy), timeout_s=timeout_s, offline=offline
  )
  if done.late:
    raise BuildFailed(f'{engine} build: no end in {timeout_s:g} s')
  if done.returncode:
    words = (done.stdout + done.stderr).strip()[-800:]
    raise BuildFailed(f'{engine} build: {words}')


def _checked(text: str, where: str) -> str:
  """A Dockerfile without caches. Raises BuildFailed for other options of RUN."""
  text = _CACHE.sub('', text)
  # As engines join lines, and at least as closely.
  joined = re.sub(r'[\s\\`]', '', _NOT_STEPS.sub('', text))
  if found := _OPTIONS.search(joined):
    raise BuildFailed(f'{where}: RUN --{found[1]} is not supported: remove it')
  return text


def _replaced(text: str, replace: Mapping[str, str]) -> tuple[str, list[str]]:
  """A Dockerfile with other images, and the images that it begins with."""
  bases = []

  def other(match: re.Match) -> str:
    name = replace.get(match[2], match[2])
    bases.append(name)
    return match[1] + name

  return _COPY_FROM.sub(other, _FROM.sub(other, text)), bases


def _copy(source: Path, target: Path, max_bytes: int) -> None:
  """Copies a directory without following links."""
  if source.is_symlink() or not source.is_dir():
    raise BuildFailed(f'{source}: not a directory')
  left = max_bytes
  target.mkdir()
  for path, info in _entries(source):
    copy = target / path.relative_to(source)
    if stat.S_ISDIR(info.st_mode):
      copy.mkdir()
    elif stat.S_ISLNK(info.st_mode):
      copy.symlink_to(os.readlink(path))
      continue
    elif not stat.S_ISREG(info.st_mode):
      raise BuildFailed(f'{path}: not a file, directory or link')
    else:
      left -= info.st_size
      if left < 0:
        raise BuildFailed(f'{source}: larger than {max_bytes} bytes')
      shutil.copyfile(path, copy, follow_symlinks=False)
    copy.chmod(stat.S_IMODE(info.st_mode) | 0o600)


def _entries(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
  for path in sorted(top.iterdir()):
    info = path.lstat()
    yield path, info
    if stat.S_ISDIR(info.st_mode):
      yield from _entries(path)


def _hash(top: Path) -> str:
  digest = hashlib.sha256()
  for path, info in _entries(top):
    name = os.fsencode(path.relative_to(top))
    content = b''
    if stat.S_ISREG(info.st_mode):
      with open(path, 'rb') as file:
        content = hashlib.file_digest(file, 'sha256').digest()
    elif stat.S_ISLNK(info.st_mode):
      content = os.fsencode(os.readlink(path))
    digest.update(repr((name, info.st_mode, content)).encode())
  return digest.hexdigest()


async def _id(engine: str, image: str) -> str:
  """The id of a local image; '' if there is none."""
  done = await engines.run(engine, 'image', 'inspect', '--format={{.Id}}', image)
  return '' if done.returncode else done.stdout.strip()


def _lock(engine: str, digest: str) -> Path:
  home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
  place = Path(home, 'm2jax', 'images', engine)
  place.mkdir(mode=0o700, parents=True, exist_ok=True)
  return place / digest


@contextlib.asynccontextmanager
async def _locked(engine: str, digest: str) -> AsyncIterator[None]:
  """Holds an image's lock, and notes that the image was used."""
  with open(_lock(engine, digest), 'a') as file:
    while True:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        await asyncio.sleep(_WAIT_S)
    os.utime(file.fileno())
    yield


async def prune(engine: str = 'podman', keep_bytes: int = 20 << 30) -> list[str]:
  """Removes the least recently used images of `build` until they fit.

  Never others' images, nor one that has a container. What images share counts for each.

  Args:
    engine: 'podman' or 'docker'.
    keep_bytes: the most that they may have together.

  Returns:
    The names of those removed.

  Raises:
    SandboxError: the engine does not list them.
  """
  found = []
  for image in await engines.images(engine, _NAME):
    lock = _lock(engine, image.rpartition(':')[2])
    used = lock.stat().st_mtime if lock.exists() else 0.0
    size = await engines.run(engine, 'image', 'inspect', '--format={{.Size}}', image)
    if not size.returncode:  # or removed by another
      found.append((used, image, int(size.stdout)))
  total, gone = sum(size for *_, size in found), []
  for _, image, size in sorted(found):
    if total <= keep_bytes:
      break
    async with _locked(engine, image.rpartition(':')[2]):
      done = await engines.run(engine, 'rmi', image)
    if not done.returncode:
      total -= size
      gone.append(image)
  return gone
