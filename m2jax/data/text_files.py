"""Plain text files as a source of documents."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Sequence

from m2jax.data import documents
from m2jax.data.documents import Document


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


class TextFiles(Sequence):
  """One document a file, read when it is asked for; its name is the path below `root`.

  Attributes:
    fingerprint: of the files' names and sizes; a saved data position is refused when
      they have changed.
  """

  def __init__(self, paths: Iterable[str | os.PathLike], *, root: str | os.PathLike):
    """Takes the files as they are now, in order (`find`)."""
    self._paths = [pathlib.Path(path) for path in paths]
    self._names = [path.relative_to(root).as_posix() for path in self._paths]
    sizes = [path.stat().st_size for path in self._paths]
    self.fingerprint = documents.fingerprint(*self._names, *sizes)

  def __len__(self) -> int:
    return len(self._paths)

  def name(self, index: int) -> str:
    """The document's name, without reading it."""
    return self._names[index]

  def __getitem__(self, index: int) -> Document:
    # Bytes that are not UTF-8 become U+FFFD: one odd file must not end a run.
    text = self._paths[index].read_text(encoding='utf-8', errors='replace')
    return Document(text, self._names[index], {'path': self._names[index]})
