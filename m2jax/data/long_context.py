"""Long documents out of related short ones: which to join, and in what order.

For the stages of long context (facts/m2-and-forge.md §1.5) documents are concatenated
that have something to say to each other: the files of a repository, what is imported
before what imports it, and texts on one theme, each after the one most like it. Both
functions give groups of indices for `documents.Joined`; every document is in exactly
one group, and none is cut. (That related material is concatenated is the report's; how,
is ours.)

Axes: n documents, F hashed features.
"""

from __future__ import annotations

import os
import posixpath
import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np

Groups = list[list[int]]

_WORD = re.compile(r'\w+')
_PYTHON = re.compile(
  r'^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n;]*)'
  r'|import[ \t]+([^\n;]+))',
  re.MULTILINE,
)
_C = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_SCRIPT = re.compile(r"""(?:\bfrom|\bimport|\brequire\()\s*['"](\.[^'"\n]*)['"]""")
_SCRIPT_SUFFIXES = ('.ts', '.tsx', '.js', '.jsx', '.mjs')


def imports(path: str, text: str) -> Iterator[str]:
  """Paths, relative to the repository, that the file may mean by what it imports.

  Python (absolute and relative imports), C and C++ (`#include "…"`), JavaScript and
  TypeScript (relative imports). What is not there, the caller passes over.
  """
  folder, suffix = posixpath.dirname(path), posixpath.splitext(path)[1]
  if suffix == '.py':
    for base in _python_modules(folder, text):
      yield f'{base}.py'
      yield f'{base}/__init__.py'
  elif suffix in ('.c', '.cc', '.cpp', '.cxx', '.h', '.hh', '.hpp'):
    for name in _C.findall(text):
      yield _normal(folder, name)
      yield _normal('', name)
  elif suffix in _SCRIPT_SUFFIXES:
    for name in _SCRIPT.findall(text):
      base = _normal(folder, name)
      yield base
      for end in _SCRIPT_SUFFIXES:
        yield base + end
        yield f'{base}/index{end}'


def _python_modules(folder: str, text: str) -> Iterator[str]:
  """Modules as paths without suffix, at every folder that may be on Python's path."""
  for module, names, plain in _PYTHON.findall(text):
    if plain:
      modules = [(name.split() or [''])[0] for name in plain.split(',')]
    else:  # what is imported from a module may be a module itself
      inside = [(name.split() or [''])[0] for name in names.strip('()').split(',')]
      joint = '' if module.endswith('.') or not module else '.'
      modules = [module, *(f'{module}{joint}{name}' for name in inside)]
    for name in modules:
      dots = len(name) - len(name.lstrip('.'))
      tail = name[dots:].replace('.', '/')
      if dots:
        base = folder
        for _ in range(dots - 1):
          base = posixpath.dirname(base)
        yield _normal(base, tail)
      elif tail:
        yield tail
        above = folder
        while above:  # src/package/module.py imports package.other
          yield _normal(above, tail)
          above = posixpath.dirname(above)


def _normal(folder: str, name: str) -> str:
  return posixpath.normpath(posixpath.join(folder, name))


def dependency_order(files: Mapping[str, str]) -> list[str]:
  """Paths of a repository, each after the files that it imports.

  Files that do not import each other stay in the order of their paths, so that folders
  stay together. In a cycle the first path in that order comes last of its cycle: it was
  asked for first, and what it needs goes before it.

  Args:
    files: path → text.
  """
  done: list[str] = []
  seen: set[str] = set()
  for root in sorted(files):
    if root in seen:
      continue
    seen.add(root)
    stack = [(root, _present(root, files))]
    while stack:  # depth first, without recursion: chains of imports are long
      path, needed = stack[-1]
      following = next((other for other in needed if other not in seen), None)
      if following is None:
        done.append(path)
        stack.pop()
      else:
        seen.add(following)
        stack.append((following, _present(following, files)))
  return done


def _present(path: str, files: Mapping[str, str]) -> Iterator[str]:
  wanted = {other for other in imports(path, files[path]) if other in files}
  return iter(sorted(wanted))


def related_code(
  paths: Sequence[str],
  repositories: Sequence[Hashable],
  sizes: Sequence[int],
  read: Callable[[int], str],
  most: int,
) -> Groups:
  """Files of a repository in dependency order, cut into groups of at most `most`.

  Args:
    paths: [n], unique within a repository.
    repositories: [n], to which repository (or folder) each file belongs.
    sizes: [n] in tokens or bytes; a file larger than `most` is a group of its own.
    read: text of a file; one repository is in memory at a time.
    most: size of a group.
  """
  members: dict[Hashable, list[int]] = {}
  for index, repository in enumerate(repositories):
    members.setdefault(repository, []).append(index)
  groups: Groups = []
  for indices in members.values():
    by_path = {paths[i].replace(os.sep, '/'): i for i in indices}
    texts = {path: read(i) for path, i in by_path.items()}
    order = [by_path[path] for path in dependency_order(texts)]
    groups += _cut(order, sizes, most)
  return groups


def _cut(order: Iterable[int], sizes: Sequence[int], most: int) -> Groups:
  groups: Groups = []
  used = most
  for index in order:
    if used + sizes[index] > most:
      groups.append([])
      used = 0
    groups[-1].append(index)
    used += sizes[index]
  return groups


def vectors(texts: Iterable[str], width: int = 512) -> np.ndarray:
  """[n, width] float32 of length 1: hashed TF-IDF, inner products are likeness.

  Words are hashed to a column and a sign, so that the inner products of the hashed
  vectors are those of the full ones on average; tf = 1 + log count, idf = log(n / n_w)
  of the hashed columns' words.
  """
  found = []  # of each text: hashes of its words, and how often each
  spread: dict[int, int] = {}
  for text in texts:
    words = _WORD.findall(text.lower())
    hashes, often = np.unique(
      [zlib.crc32(w.encode()) for w in words], return_counts=True
    )
    hashes = hashes.astype(np.int64)
    found.append((hashes, often))
    for word in hashes.tolist():
      spread[word] = spread.get(word, 0) + 1
  out = np.zeros((len(found), width), np.float32)
  for row, (hashes, often) in zip(out, found, strict=True):
    idf = np.log(len(found) / np.array([spread[w] for w in hashes.tolist()], float))
    value = (1 + np.log(often)) * idf * np.where(hashes & 1, 1.0, -1.0)
    np.add.at(row, (hashes >> 1) % width, value)
  lengths = np.linalg.norm(out, axis=1, keepdims=True)
  return out / np.maximum(lengths, 1e-12)


def related_texts(likeness: np.ndarray, sizes: Sequence[int], most: int) -> Groups:
  """Greedy chains: each text is followed by the one most like it that is left.

  A group begins with the first text left and goes on while the next fits `most`. One
  chain costs n · F for every link: split more than some ten thousand texts first.

  Args:
    likeness: [n, F] vectors of length 1 (`vectors`).
    sizes: [n] in tokens or bytes; a text larger than `most` is a group of its own.
    most: size of a group.
  """
  left = np.ones(len(sizes), bool)
  sizes = np.asarray(sizes)
  groups: Groups = []
  for start in range(len(sizes)):
    if not left[start]:
      continue
    group, used = [start], sizes[start]
    left[start] = False
    while True:
      fits = left & (sizes + used <= most)
      if not fits.any():
        break
      scores = np.where(fits, likeness @ likeness[group[-1]], -np.inf)
      following = int(np.argmax(scores))
      group.append(following)
      left[following] = False
      used += sizes[following]
    groups.append(group)
  return groups
