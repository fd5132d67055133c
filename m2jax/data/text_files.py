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
  """Files in `root` and its subdirectories, in an order independent of file systems.

  Args:
    root: a directory.
    suffixes: suffixes of the files to return, such as '.py'.
    exclude_dirs: names of directories to skip, such as 'tests'.

  Raises:
    FileNotFoundError: `root` is not a directory, or no file matches.
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
    raise FileNotFoundError(
      f'no file in {root} ends in {" or ".join(suffixes)}: set `suffixes` of this text '
      'to the endings of its files'
    )
  return sorted(found, key=lambda path: path.relative_to(root).as_posix())


class TextFiles(Sequence):
  """One document per file, read when it is indexed; its name is its path in `root`.

  Attributes:
    fingerprint: hash of the files' names and sizes; a saved data position becomes
      invalid if they change.
  """

  def __init__(self, paths: Iterable[str | os.PathLike], *, root: str | os.PathLike):
    """Opens the files, in order (`find`)."""
    self._paths = [pathlib.Path(path) for path in paths]
    self._names = [path.relative_to(root).as_posix() for path in self._paths]
    sizes = [path.stat().st_size for path in self._paths]
    self.fingerprint = documents.fingerprint(*self._names, *sizes)

  def __len__(self) -> int:
    return len(self._paths)

  def name(self, index: int) -> str:
    """The name of a document, without reading it."""
    return self._names[index]

  def __getitem__(self, index: int) -> Document:
    # Invalid UTF-8 becomes U+FFFD: one such file must not stop a run.
    text = self._paths[index].read_text(encoding='utf-8', errors='replace')
    return Document(text, self._names[index], {'path': self._names[index]})
