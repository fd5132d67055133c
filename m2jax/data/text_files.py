"""Plain text files as a random-access source of token arrays."""

from __future__ import annotations

import hashlib
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np


def find(
  root: str | os.PathLike,
  patterns: Iterable[str] = ('**/*.txt',),
  *,
  exclude: Iterable[str] = (),
) -> list[pathlib.Path]:
  """Files below `root` that match a glob pattern, in the same order everywhere.

  Args:
    root: a directory.
    patterns: globs relative to `root`; `**` spans directories.
    exclude: globs relative to `root` of what to leave out, directories with all they
      hold ('test' or '*/tests').

  Raises:
    FileNotFoundError: `root` is no directory, or nothing matches.
  """
  root = pathlib.Path(root)
  if not root.is_dir():
    raise FileNotFoundError(f'text directory {root} does not exist')
  patterns = tuple(patterns)
  excluded = {path for pattern in exclude for path in root.glob(pattern)}
  found = {
    path
    for pattern in patterns
    for path in root.glob(pattern)
    if path.is_file() and not excluded.intersection((path, *path.parents))
  }
  if not found:
    raise FileNotFoundError(f'no file below {root} matches {patterns}')
  return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def split(
  paths: Sequence[pathlib.Path], held_out: float, *, root: str | os.PathLike
) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
  """(training, held-out) paths: each file's side depends on its own name only.

  Args:
    held_out: share of files held out, in [0, 1].
    root: names are taken relative to it, so that a moved tree splits alike.
  """

  def side(path):
    name = pathlib.Path(path).relative_to(root).as_posix()
    return zlib.crc32(name.encode()) < held_out * 2**32

  return [p for p in paths if not side(p)], [p for p in paths if side(p)]


class TextFiles(Sequence):
  """One token array [tokens] int32 a file, read and encoded when it is asked for.

  Attributes:
    fingerprint: of the files' names and sizes; a saved data position is refused when
      they have changed.
  """

  def __init__(
    self, paths: Iterable[str | os.PathLike], encode: Callable[[str], Sequence[int]]
  ):
    """Args:
    paths: the files, in order (`find`).
    encode: text to token ids; adds what should separate documents.
    """
    self._paths = [pathlib.Path(path) for path in paths]
    self._encode = encode
    names = [f'{path.name}\0{path.stat().st_size}\n' for path in self._paths]
    self.fingerprint = hashlib.sha256(''.join(names).encode()).hexdigest()[:16]

  def __len__(self) -> int:
    return len(self._paths)

  def __getitem__(self, index: int) -> np.ndarray:
    # Bytes that are not UTF-8 become U+FFFD: one odd file must not end a run.
    text = self._paths[index].read_text(encoding='utf-8', errors='replace')
    return np.asarray(self._encode(text), np.int32)
