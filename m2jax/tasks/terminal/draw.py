"""Draws the parts of a task: a workspace of excerpts of real files, planted words.

All randomness comes from one `random.Random` seeded with the task's spec, so a task is
the same in every process. Choices that a family cannot use raise `Redraw`; the family
then starts over with the generator in its current state.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from m2jax.tasks.terminal import corpus
from m2jax.tasks.terminal.config import TerminalConfig

T = TypeVar('T')
Files = dict[str, list[str]]  # name -> lines without newlines


class Redraw(Exception):
  """The random choices do not make a valid task; draw again."""


@dataclasses.dataclass
class Draft:
  """A task as its family drew it.

  Attributes:
    instruction: the agent's instruction.
    files: the workspace at the start.
    params: the random choices, for the teacher.
    calls: tool calls that a correct solution needs.
    answer: the right final answer; None if only the workspace is judged.
    after: the workspace at the end.
  """

  instruction: str
  files: Files
  params: dict[str, Any]
  calls: int
  answer: str | None
  after: Files


class Call(NamedTuple):
  """A turn of the teacher that runs a command."""

  thought: str
  command: str


class Answer(NamedTuple):
  """The last turn of the teacher."""

  thought: str
  content: str


Slip = Callable[[str], bool]  # whether the teacher makes this kind of mistake
Lesson = Generator[Call, str, Answer]  # yields calls, receives their output


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of tasks.

  Attributes:
    build: draws a task, or raises Redraw.
    teach: solves a task by closed-loop commands, given `Draft.params` and a `Slip`.
    mistakes: the kinds of mistakes for which `teach` may call its `Slip`.
  """

  build: Callable[[Draw], Draft]
  teach: Callable[[Mapping[str, Any], Slip], Lesson]
  mistakes: tuple[str, ...]


class Draw:
  """Makes the random choices of one task, all within its split."""

  def __init__(self, split: str, rng: random.Random, config: TerminalConfig):
    self.split, self.rng, self.config = split, rng, config
    self.corpus = corpus.load(split)

  def pick(self, options: Sequence[T]) -> T:
    if not options:
      raise Redraw
    return self.rng.choice(options)

  def chance(self, probability: float) -> bool:
    return self.rng.random() < probability

  def word(self, files: Files) -> str:
    """Returns a word that `files` and their names do not contain, in any case."""
    text = text_of(files).lower()
    for _ in range(50):
      if self.chance(self.config.pseudo_words):
        word = corpus.pseudo_word(self.rng, self.split)
      else:
        word = self.pick(self.corpus.words)
      if word not in text:
        return word
    raise Redraw

  def new_name(self, files: Files, suffix: str) -> str:
    """Returns a file name that is not in `files`."""
    return self.word(files) + suffix

  def cut(self, source: corpus.Source) -> list[str]:
    """Returns consecutive lines of the source."""
    total, (low, high) = len(source.lines), self.config.lines
    length = min(total, self.rng.randint(low, high))
    start = self.rng.randint(0, total - length)
    return list(source.lines[start : start + length])

  def name_of(self, source: corpus.Source, files: Files) -> str:
    """Returns the source's name or a made-up one; it is not yet in `files`."""
    if self.chance(self.config.pseudo_names):
      name = corpus.pseudo_stem(self.rng, self.split) + source.suffix
    else:
      name = source.name
    if name in files:
      raise Redraw
    return name

  def files(self, least: int) -> Files:
    """Returns a new workspace of `least` files or more, in the order of drawing."""
    low, high = self.config.files
    count = self.rng.randint(max(low, least), max(high, least))
    files: Files = {}
    for source in self.rng.sample(self.corpus.sources, count):
      files[self.name_of(source, files)] = self.cut(source)
    return files

  def plant(
    self, files: Files, file: str, low: int, high: int, twice: bool = False
  ) -> str:
    """Puts a word of this split on low..high lines of `file`, in no other file.

    Uses an identifier of the file as it is, or renames it throughout the file to a real
    or made-up word. With `twice`, some line contains it more than once.
    """
    lines = [corpus.IDENTIFIER.findall(line) for line in files[file]]
    counts = collections.Counter(word for words in lines for word in set(words))
    repeated = {w for words in lines for w in words if words.count(w) > 1}
    old = self.pick(
      sorted(
        word
        for word, count in counts.items()
        if low <= count <= high
        and corpus.is_nameable(word)
        and (word in repeated or not twice)
      )
    )
    if not self.chance(self.config.pseudo_words):
      others = {name: lines for name, lines in files.items() if name != file}
      if corpus.split_of(old) == self.split and old not in text_of(others):
        return old
    new, pattern = self.word(files), re.compile(rf'\b{old}\b')
    files[file] = [pattern.sub(new, line) for line in files[file]]
    return new


def text_of(files: Files) -> str:
  """Returns names and lines of all files as one string."""
  return '\n'.join(line for name, lines in files.items() for line in (name, *lines))


def encode(lines: Sequence[str]) -> bytes:
  """Returns a file's bytes; every line ends with a newline."""
  return ''.join(line + '\n' for line in lines).encode()


def first_line(observation: str) -> str:
  """Returns the first line a command printed, or '?' if it printed nothing."""
  return (observation.strip().splitlines() or ['?'])[0]
