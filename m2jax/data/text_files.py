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
  suffixes: Sequence[str] = ('.txt',),
  *,
  exclude_dirs: Iterable[str] = (),
) -> list[pathlib.Path]:
  """Files anywhere below `root`, in the same order on every file system.

  Args:
    root: a directory.
    suffixes: endings of the names wanted ('.py').
    exclude_dirs: names of directories that are not entered ('tests').

  Raises:
    FileNotFoundError: `root` is no directory, or nothing matches.
  """
  root = pathlib.Path(root)
  if not root.is_dir():
    raise FileNotFoundError(f'text directory {root} does not exist')
  excluded = frozenset(exclude_dirs)
  found = []
  for folder, folders, names in os.walk(root):
    folders[:] = [name for name in folders if name not in excluded]
    found += [pathlib.Path(folder, n) for n in names if n.endswith(tuple(suffixes))]
  if not found:
    raise FileNotFoundError(f'no file below {root} ends in {" or ".join(suffixes)}')
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
    """Takes the files as they are now.

    Args:
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
