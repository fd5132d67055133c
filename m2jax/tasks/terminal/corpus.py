"""Source data of the terminal tasks: real files, words and names, in three splits.

The files are the running Python's standard library, its licence text and its language
documentation (`pydoc_data.topics`), read from the installed copy; so tasks are the same
for the same Python version. Every file and word belongs to one split, by a hash of its
name, and the splits are disjoint. Made-up words complement the real ones, since unseen
names are hard to copy for a small policy.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib
import keyword
import os
import random
import re
import sysconfig
from pathlib import Path

SPLITS = ('train', 'dev', 'held_out')
# by the last decimal digit of a hash
_DIGITS = {'held_out': (0, 1), 'dev': (2, 3)}
_SPLIT_OF_DIGIT = tuple(
  next((split for split, digits in _DIGITS.items() if digit in digits), 'train')
  for digit in range(10)
)

_SKIPPED_DIRECTORIES = frozenset(
  'test tests idle_test idlelib lib2to3 site-packages dist-packages ensurepip '
  'pydoc_data turtledemo encodings distutils __pycache__'.split()
)
_MIN_LINES, _MAX_LINES, _MAX_COLUMNS = 24, 1500, 100
IDENTIFIER = re.compile(r'\b[A-Za-z_]\w*\b')
_COMMON = frozenset(keyword.kwlist) | {'self', 'cls', 'None', 'True', 'False'}

_ONSETS = 'b d f g k l m n p r s t v z br dr gr kl pl st tr'.split()
_VOWELS = 'a e i o u'.split()
_CODAS = ['', '', '', 'n', 'r', 'l', 'k', 'm', 't', 'x']


@dataclasses.dataclass(frozen=True)
class Source:
  """One real file: its name and its lines of printable ASCII, without newlines."""

  name: str
  lines: tuple[str, ...]

  @property
  def suffix(self) -> str:
    return os.path.splitext(self.name)[1]


@dataclasses.dataclass(frozen=True)
class Corpus:
  """The source data of one split.

  Attributes:
    sources: Python files and text files.
    words: real lower-case words from these files that belong to the split.
  """

  sources: tuple[Source, ...]
  words: tuple[str, ...]


def split_of(name: str) -> str:
  """Returns the split of a word or a file's stem; case is ignored."""
  digest = hashlib.blake2b(name.lower().encode(), digest_size=2).digest()
  return _SPLIT_OF_DIGIT[int.from_bytes(digest, 'big') % 10]


def is_nameable(word: str) -> bool:
  """Returns whether an identifier may be named in a task."""
  return 3 <= len(word) <= 12 and word not in _COMMON


def pseudo_word(rng: random.Random, split: str) -> str:
  """Returns a made-up word of two syllables, 4-7 letters, that belongs to `split`."""
  while True:
    syllables = (rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(2))
    word = ''.join(syllables) + rng.choice(_CODAS)
    if split_of(word) == split and word not in _COMMON:
      return word


def pseudo_stem(rng: random.Random, split: str) -> str:
  """Returns a made-up stem of a file's name that belongs to `split`.

  Mostly one word; as among real stems, some join two words or end in digits.
  """
  while True:
    stem, form = pseudo_word(rng, split), rng.random()
    if form < 0.1:
      other = pseudo_word(rng, split)[: rng.randint(2, 6)]
      stem = f'{stem[:6]}_{other}' if form < 0.05 else stem[:5].title() + other.title()
    elif form < 0.2:
      stem += str(rng.randint(2, 64))
    if split_of(stem) == split:
      return stem


@functools.cache
def load(split: str) -> Corpus:
  """Returns the split's part of the installed Python's files.

  Raises:
    ValueError: `split` is not one of SPLITS.
    RuntimeError: this Python has no sources of its standard library.
  """
  if split not in SPLITS:
    raise ValueError(f'unknown split {split!r}: expected one of {SPLITS}')
  sources = tuple(
    source
    for name, source in sorted(_all_sources().items())
    if split_of(name.partition('.')[0]) == split
  )
  modules = sum(source.suffix == '.py' for source in sources)
  if modules < 20:
    raise RuntimeError(
      f'only {modules} standard-library modules with sources under '
      f'{sysconfig.get_path("stdlib")}: terminal tasks need a Python that was '
      'installed with its .py files'
    )
  counts = collections.Counter(
    word
    for source in sources
    for line in source.lines[:80]
    for word in IDENTIFIER.findall(line)
  )
  words = tuple(
    sorted(
      word
      for word, count in counts.items()
      if count >= 3
      and re.fullmatch('[a-z]{4,9}', word)
      and word not in _COMMON
      and split_of(word) == split
    )
  )
  return Corpus(sources, words)


def _is_plain(line: str) -> bool:
  return (
    len(line) <= _MAX_COLUMNS and line.isascii() and line.expandtabs().isprintable()
  )


@functools.cache
def _all_sources() -> dict[str, Source]:
  """Reads every usable file; of two with the same name, the longer is used."""
  root = Path(sysconfig.get_path('stdlib'))
  sources: dict[str, Source] = {}

  def add(name: str, text: str) -> None:
    lines = tuple(filter(_is_plain, text.split('\n')[:_MAX_LINES]))
    longest_so_far = len(sources[name].lines) if name in sources else 0
    if len(lines) >= _MIN_LINES and len(lines) > longest_so_far:
      sources[name] = Source(name, lines)

  for directory, subdirectories, files in os.walk(root):
    subdirectories[:] = sorted(
      name
      for name in subdirectories
      if name not in _SKIPPED_DIRECTORIES and not name.startswith('config-')
    )
    for name in sorted(files):
      if name.endswith('.py') and not name.startswith('_') and len(name) <= 14:
        add(name, (Path(directory) / name).read_text('utf-8', 'replace'))
  licence = root / 'LICENSE.txt'
  if licence.is_file():
    add(licence.name, licence.read_text('utf-8', 'replace'))
  try:
    topics = importlib.import_module('pydoc_data.topics').topics
  except ImportError:  # some distributions lack the documentation
    topics = {}
  for topic, text in sorted(topics.items()):
    if topic.isidentifier() and len(topic) <= 10:
      add(f'{topic}.txt', text)
  return sources
