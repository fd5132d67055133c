"""The files of a directory of published versions.

  versions/SERIAL/version.json    the announcement: written last, by rename
                 /delta.P.bin     differences of process P's boxes, one after the other
                 /delta.P.json    where they are, and their checksums
                 /whole.P.json    checksums of the boxes of the whole version
  whole/SERIAL/                   a whole version, a `CheckpointManager`'s step

A version exists once it is announced. The announcement has the sizes and checksums of
the files beside it. Serial numbers count publications: a restarted learner continues
with the next one, whatever step it restored.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any, NamedTuple

from etils import epath

from m2jax.checkpoint.errors import (
  CheckpointError,
  CorruptCheckpoint,
  MissingCheckpoint,
)

ANNOUNCEMENT = 'version.json'
FORMAT = 1
_BLOCK_BYTES = 2**23


class Version(NamedTuple):
  """One publication; ordered by serial.

  Attributes:
    serial: counts the publications of a directory.
    lineage, step: the policy version of the weights (`records.Lineages`).
  """

  serial: int
  lineage: int
  step: int


def root(directory: str | os.PathLike) -> epath.Path:
  """The directory as an absolute path, or a URL."""
  text = os.fspath(directory)
  return epath.Path(text if '://' in text else os.path.abspath(text))


def version_dir(root: epath.Path, serial: int) -> epath.Path:
  return root / 'versions' / str(serial)


def whole_dir(root: epath.Path) -> epath.Path:
  """Directory of the whole versions, each named by its serial number."""
  return root / 'whole'


def serials(root: epath.Path) -> list[int]:
  """Serial numbers of the announced versions, ascending."""
  try:
    names = [path.name for path in (root / 'versions').iterdir()]
  except FileNotFoundError:
    return []
  found = sorted(int(name) for name in names if name.isdigit())
  return [n for n in found if (version_dir(root, n) / ANNOUNCEMENT).exists()]


def announcement(root: epath.Path, serial: int) -> dict[str, Any]:
  """The announcement of a version.

  Raises:
    MissingCheckpoint: there is none: it was deleted, or never written.
    CorruptCheckpoint: it cannot be read, or is of another format.
  """
  path = version_dir(root, serial) / ANNOUNCEMENT
  try:
    found = json.loads(path.read_bytes())
    if found['format'] != FORMAT:
      raise CorruptCheckpoint(
        f'{path} has format {found["format"]}, this code reads {FORMAT}'
      )
    content = found['content']
    if found['crc32'] != _checksum(content):
      raise CorruptCheckpoint(f'{path} is not what was written')
  except FileNotFoundError as error:
    raise MissingCheckpoint(
      f'version {serial} is not in {root}: it has versions {serials(root) or "none"}'
    ) from error
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise CorruptCheckpoint(f'cannot read {path}: {error!r}') from error
  return content


def announce(root: epath.Path, content: dict[str, Any]) -> None:
  """Announces the version of `content['serial']`, which exists from then on."""
  found = {'format': FORMAT, 'crc32': _checksum(content), 'content': content}
  path = version_dir(root, content['serial']) / ANNOUNCEMENT
  write(path, json.dumps(found).encode())


def _checksum(content: Any) -> int:
  return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read_file(root: epath.Path, content: dict[str, Any], name: str) -> bytes:
  """A file of an announced version, checked; raises as `failed` returns."""
  path = version_dir(root, content['serial']) / name
  try:
    data = path.read_bytes()
  except OSError as error:
    raise failed(root, content['serial'], f'{name}: {error!r}') from error
  want = content['files'][name]
  if (len(data), zlib.crc32(data)) != (want['size_bytes'], want['crc32']):
    raise failed(root, content['serial'], f'{name} is not what was written')
  return data


def failed(root: epath.Path, serial: int, reason: str) -> CheckpointError:
  """The error of a version that cannot be read: damaged, or deleted meanwhile."""
  try:
    announcement(root, serial)
  except MissingCheckpoint as error:
    return error
  except CorruptCheckpoint:
    pass
  return CorruptCheckpoint(f'version {serial} in {root}: {reason}')


def write(path: epath.Path, data: bytes) -> None:
  """Writes a file, which others see whole or not at all."""
  temporary = path.parent / f'{path.name}.tmp'
  temporary.write_bytes(data)
  temporary.rename(path)


def describe(path: epath.Path) -> dict[str, int]:
  """Size and checksum of a file, for the announcement."""
  checksum = 0
  with path.open('rb') as file:
    while block := file.read(_BLOCK_BYTES):
      checksum = zlib.crc32(block, checksum)
  return {'size_bytes': path.stat().length, 'crc32': checksum}


def size_bytes(path: epath.Path) -> int:
  """Bytes of the files below a directory."""
  return sum(
    size_bytes(entry) if entry.is_dir() else entry.stat().length
    for entry in path.iterdir()
  )
