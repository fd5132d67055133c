"""Groups related short documents into long ones.

Stages with a long context (facts/m2-and-forge.md §1.5) concatenate related documents:
the files of a repository, each after the files that it imports, and texts on similar
topics, each after the most similar one. Both functions return groups of indices for
`documents.Joined`; every document is in exactly one group and stays whole. (The report
states that related material is concatenated; the method is ours.)

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
  """Paths in the repository that the imports of a file may refer to.

  Python (absolute and relative imports), C and C++ (`#include "…"`), JavaScript and
  TypeScript (relative imports). The caller ignores paths that do not exist.
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
  """Modules as paths without suffix, from every directory that may be in sys.path."""
  for module, names, plain in _PYTHON.findall(text):
    if plain:
      modules = [(name.split() or [''])[0] for name in plain.split(',')]
    else:  # a name imported from a module may be a module itself
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
        base = folder
        while base:  # src/package/module.py imports package.other
          yield _normal(base, tail)
          base = posixpath.dirname(base)


def _normal(folder: str, name: str) -> str:
  return posixpath.normpath(posixpath.join(folder, name))


def dependency_order(files: Mapping[str, str]) -> list[str]:
  """Paths of a repository, each after the files that it imports.

  Files that do not import each other are ordered by path, so that directories stay
  together. In a cycle, the first path in that order comes last.

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
    while stack:  # depth first, without recursion: import chains can be long
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
  """Splits each repository, in dependency order, into groups of at most `most`.

  Args:
    paths: [n], unique within a repository.
    repositories: [n], the repository (or directory) of each file.
    sizes: [n] in tokens or bytes; a file larger than `most` is a separate group.
    read: returns the text of a file; one repository at a time is in memory.
    most: maximum size of a group.
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
  """[n, width] float32 unit vectors: hashed TF-IDF; inner products are similarities.

  A word is hashed to a column and a sign, so that inner products of the hashed vectors
  are unbiased; tf = 1 + log count, idf = log(n / n_w) by word.
  """
  found = []  # per text: hashes of its words and their counts
  documents_with: dict[int, int] = {}
  for text in texts:
    words = _WORD.findall(text.lower())
    hashes, count = np.unique(
      [zlib.crc32(w.encode()) for w in words], return_counts=True
    )
    hashes = hashes.astype(np.int64)
    found.append((hashes, count))
    for word in hashes.tolist():
      documents_with[word] = documents_with.get(word, 0) + 1
  out = np.zeros((len(found), width), np.float32)
  for row, (hashes, count) in zip(out, found, strict=True):
    frequency = np.array([documents_with[w] for w in hashes.tolist()], float)
    idf = np.log(len(found) / frequency)
    value = (1 + np.log(count)) * idf * np.where(hashes & 1, 1.0, -1.0)
    np.add.at(row, (hashes >> 1) % width, value)
  lengths = np.linalg.norm(out, axis=1, keepdims=True)
  return out / np.maximum(lengths, 1e-12)


_BLOCK = 1024  # similar texts that are compared with each other


def related_texts(vectors: np.ndarray, sizes: Sequence[int], most: int) -> Groups:
  """Greedy chains: each text is followed by the most similar one that is left.

  A group starts with the first text left and continues while a text fits into `most`.
  Only the texts of a block are compared, of `_BLOCK` similar ones (`_blocks`); a group
  continues into the next block. The work is n · F · (_BLOCK + log n), not n² · F.

  Args:
    vectors: [n, F] unit vectors (see `vectors`).
    sizes: [n] in tokens or bytes; a text larger than `most` is a separate group.
    most: maximum size of a group.
  """
  sizes = np.asarray(sizes)
  groups: Groups = []
  used = most + 1  # of the last group: there is none yet
  for block in _blocks(vectors, np.arange(len(sizes))):
    likeness = vectors[block] @ vectors[block].T
    left = np.ones(len(block), bool)
    if groups:
      scores = vectors[block] @ vectors[groups[-1][-1]]
    while left.any():
      fits = left & (sizes[block] + used <= most)
      if fits.any():
        at = int(np.argmax(np.where(fits, scores, -np.inf)))
      else:
        at, used = int(np.argmax(left)), 0
        groups.append([])
      groups[-1].append(int(block[at]))
      used += sizes[block[at]]
      left[at], scores = False, likeness[at]
  return groups


def _blocks(vectors: np.ndarray, indices: np.ndarray) -> Iterator[np.ndarray]:
  """Parts of at most `_BLOCK` indices of similar texts, each in order.

  Halves, split at the median along the direction in which the texts vary most (a few
  steps of the power iteration on a sample), until they are small enough.
  """
  if len(indices) <= _BLOCK:
    yield indices
    return
  sample = vectors[indices[:: -(-len(indices) // _BLOCK)]]
  sample = sample - sample.mean(axis=0)
  direction = sample[0]
  for _ in range(8):
    direction = (sample @ direction) @ sample
    direction = direction / np.maximum(np.linalg.norm(direction), 1e-12)
  along = np.argsort(vectors[indices] @ direction, kind='stable')
  for half in np.array_split(indices[along], 2):
    yield from _blocks(vectors, np.sort(half))
