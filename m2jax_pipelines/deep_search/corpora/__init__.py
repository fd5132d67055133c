"""Corpora of deep search: passages with titles, text and links.

`load(name, directory)` finds `name` among the modules of this package, each with
`DESCRIPTION`, `FOLD` (whether links ignore case) and
`read(directory) -> (raw passages, Source)`. A raw passage is
(titles, anchors, text, link names); links name titles or anchors, and links to missing
passages are dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from m2jax import kinds
from m2jax_pipelines import installed

Raw = tuple[tuple[str, ...], tuple[str, ...], str, Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Passage:
  """A passage of a corpus.

  Attributes:
    id: unique in the corpus.
    titles: its names; the first is the main one.
    text: the text that an agent reads.
    links: ids of the passages that it refers to, in order, without repetition.
  """

  id: str
  titles: tuple[str, ...]
  text: str
  links: tuple[str, ...]

  @property
  def title(self) -> str:
    return self.titles[0]


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A corpus; `passages` by id."""

  name: str
  description: str
  passages: dict[str, Passage]
  source: installed.Source


def load(name: str, directory: Path) -> Corpus:
  """Reads a corpus from this machine; `directory` is for downloaded packages.

  Raises:
    SourceMissing: it is not here; says what to install.
    ValueError: an unknown corpus.
  """
  module = kinds.module(__package__, name)
  raw, source = module.read(directory)
  return build(name, module.DESCRIPTION, raw, source, fold=module.FOLD)


def build(
  name: str,
  description: str,
  raw: Sequence[Raw],
  source: installed.Source,
  *,
  fold: bool,
) -> Corpus:
  """Numbers passages and resolves their links."""

  def key(text: str) -> str:
    text = ' '.join(text.split())
    return text.casefold() if fold else text

  ids = {}
  for number, (titles, anchors, _, _) in enumerate(raw):
    for title in (*titles, *anchors):
      ids.setdefault(key(title), f'{name}-{number:05d}')
  passages = {}
  for number, (titles, _, text, names) in enumerate(raw):
    own = f'{name}-{number:05d}'
    found = (ids.get(key(n)) for n in names)
    links = tuple(dict.fromkeys(i for i in found if i and i != own))
    passages[own] = Passage(own, titles, text, links)
  return Corpus(name, description, passages, source)
