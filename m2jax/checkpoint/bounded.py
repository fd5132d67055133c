"""Reads the small files of a checkpoint directory from elsewhere, within bounds."""

from __future__ import annotations

import os
import stat
from typing import Any

from m2jax.checkpoint.errors import CorruptCheckpoint
from m2jax.text import strict_json

MAX_BYTES = 100_000_000  # the safetensors library's bound of a header


def read(path: str | os.PathLike) -> bytes:
  """The content of a file of at most `MAX_BYTES`.

  Raises:
    FileNotFoundError: no such file.
    CorruptCheckpoint: it is larger, or a pipe, which would never end.
  """
  fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  with open(fd, 'rb') as file:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
      raise CorruptCheckpoint(f'{os.fspath(path)}: not a regular file')
    data = file.read(MAX_BYTES + 1) if status.st_size <= MAX_BYTES else None
    if data is None or len(data) > MAX_BYTES:
      raise CorruptCheckpoint(f'{os.fspath(path)}: more than {MAX_BYTES} bytes')
    return data


def read_object(path: str | os.PathLike) -> dict[str, Any]:
  """The JSON object of a file.

  Raises:
    FileNotFoundError: no such file.
    CorruptCheckpoint: it is not an object, or see `read` and `strict_json.loads`.
  """
  try:
    found = strict_json.loads(read(path))
  except strict_json.JsonFault as error:
    raise CorruptCheckpoint(f'{os.fspath(path)}: {error}') from error
  if not isinstance(found, dict):
    raise CorruptCheckpoint(f'{os.fspath(path)}: not a JSON object')
  return found
