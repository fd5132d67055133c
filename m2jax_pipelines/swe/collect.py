"""Stage 1, collect: source distributions, by pip, with hash and licence.

No code of a package runs here, not even its build backend (download.py). No package is
part of this repository: they come from the registry at run time, and each task records
name, version, sha256 and licence.
"""

from __future__ import annotations

import asyncio
import dataclasses
import email
import gzip
import hashlib
import io
import os
import re
import sys
import tarfile
import time
from pathlib import Path

from m2jax.tasks.harbor import compose
from m2jax_pipelines.swe import requirements

_PIP = (sys.executable, '-m', 'pip', '--disable-pip-version-check')
_DOWNLOAD = (sys.executable, '-P', str(Path(__file__).with_name('download.py')))
_DOWNLOAD_S = 300.0
_MAX_BYTES = 8 << 20  # of an archive
_KEPT = re.compile(r'\.(py|pyi|txt|cfg|toml|ini|md|rst|json|sql|html|yaml|yml|csv)$')


class CollectError(Exception):
  """A package is unavailable or unusable; the message says why."""


@dataclasses.dataclass(frozen=True)
class Source:
  """A release of a package.

  Attributes:
    name, version: the distribution's name and version.
    sha256: hash of the source distribution.
    licence: the licence that its metadata states.
    files: relative path → content, of text files.
    archive: tar.gz of `files`, to be linked into tasks.
    requires: distributions that its metadata declare.
  """

  name: str
  version: str
  sha256: str
  licence: str
  files: dict[str, bytes]
  archive: Path
  requires: frozenset[str] = frozenset()

  @property
  def provenance(self) -> dict[str, str]:
    """What a task records of it."""
    return {
      'registry': 'PyPI',
      'name': self.name,
      'version': self.version,
      'sha256': self.sha256,
      'licence': self.licence,
    }


def name_of(requirement: str) -> str:
  """Name of a requirement `name==version`."""
  return re.split(r'[=<>!~ ]', requirement, maxsplit=1)[0]


async def fetch(requirement: str, directory: Path) -> Source:
  """Downloads a source distribution, once, and reads it.

  Raises:
    CollectError: pip fails, or the package is too large or no archive.
  """
  name, _, version = requirement.partition('==')
  place = directory / requirement.replace('==', '-')
  if not any(place.glob('*.tar.gz')):
    await _run(*_DOWNLOAD, requirement, str(place), str(_MAX_BYTES), what='download')
  (path,) = place.glob('*.tar.gz')
  return await asyncio.to_thread(_read, path, name, version, place)


async def versions(name: str) -> list[str]:
  """Final releases, newest first.

  Raises:
    CollectError: pip fails.
  """
  text = await pip('index', 'versions', name)
  found = re.search(r'Available versions: (.*)', text)
  listed = found[1].split(', ') if found else []
  return [v.strip() for v in listed if re.fullmatch(r'[\d.]+', v.strip())]


async def pip(*arguments: str) -> str:
  """Runs pip; returns its output. Raises CollectError."""
  return await _run(*_PIP, *arguments, what=arguments[0])


async def _run(*command: str, what: str) -> str:
  process = await asyncio.create_subprocess_exec(
    *command,
    stdout=asyncio.subprocess.PIPE,
    stderr=asyncio.subprocess.PIPE,
    env={**os.environ, 'PIP_NO_INPUT': '1'},
  )
  try:
    out, err = await asyncio.wait_for(process.communicate(), _DOWNLOAD_S)
  except TimeoutError:
    process.kill()
    await process.wait()
    raise CollectError(f'pip {what}: no answer in {_DOWNLOAD_S} s') from None
  if process.returncode:
    lines = err.decode(errors='replace').splitlines()
    last = [line for line in lines if 'ERROR' in line][-1:] or lines[-1:]
    raise CollectError(f'pip {what} failed: {" ".join(last)[:300]}')
  return out.decode()


def _read(path: Path, name: str, version: str, place: Path) -> Source:
  data = path.read_bytes()
  if len(data) > _MAX_BYTES:
    raise CollectError(f'{path.name} has {len(data)} bytes, more than {_MAX_BYTES}')
  try:
    unpacked = compose.unpack(data)
  except compose.BadArchive as error:
    raise CollectError(f'{path.name}: {error}') from error
  found = {}
  for full, content in unpacked.items():
    _, _, inner = full.partition('/')
    if inner and (_KEPT.search(inner) or 'LICEN' in inner.upper()):
      if b'\0' not in content:
        found[inner] = content
  stated = min((p for p in unpacked if p.endswith('PKG-INFO')), key=len, default='')
  info = email.message_from_bytes(unpacked.get(stated, b''))
  licence = info.get('License-Expression') or _classified(info) or info.get('License')
  found = {k: v for k, v in found.items() if '.egg-info/' not in k}
  archive = place / 'text' / 'workspace.tar.gz'
  archive.parent.mkdir(exist_ok=True)
  pack(found, archive)
  return Source(
    name,
    version or info.get('Version', ''),
    hashlib.sha256(data).hexdigest(),
    (licence or 'unknown').splitlines()[0][:80],
    found,
    archive,
    frozenset(requirements.declared(found, info.get_all('Requires-Dist', []))),
  )


def _classified(info) -> str:
  found = [c for c in info.get_all('Classifier', []) if c.startswith('License')]
  return found[0].rpartition(':: ')[2] if found else ''


def pack(files: dict[str, bytes], target: Path) -> None:
  """Writes a tar.gz with the same bytes each time."""
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode='w') as tar:
    for path in sorted(files):
      entry = tarfile.TarInfo(path)
      entry.size, entry.mtime = len(files[path]), 0
      tar.addfile(entry, io.BytesIO(files[path]))
  partial = target.with_name(f'{target.name}.{time.monotonic_ns()}')
  partial.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
  partial.replace(target)
