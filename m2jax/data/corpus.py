"""Builds the data source of a pre-training stage from directories and settings.

  domains  →  documents  →  survey (size, score, category of each)
                              →  joined (long documents of related ones)
                              →  mixed (repeated according to the mixture)

A domain is a directory of text files and record files, or one such file. The survey
reads every document once; its table is cached in a file as long as documents and scorer
do not change.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from m2jax.checks import require
from m2jax.data import (
  documents,
  long_context,
  mixture,
  quality,
  record_files,
  text_files,
)
from m2jax.data.documents import Document
from m2jax.data.mixture import MixtureConfig

JOINS = ('code', 'texts')


@dataclasses.dataclass(frozen=True)
class DomainConfig:
  """The documents of a domain, and their use.

  Attributes:
    root: a directory, or a single file.
    suffixes: suffixes of the files to read. Files with a suffix in
      `record_files.READERS` have records; any other file is one document.
    exclude_dirs: names of directories to skip.
    weight: the domain's weight in the mixture.
    text_field: field of a record with its text.
    category_field: field of a record with its category; '' or a record without it: the
      domain is the category.
    join: how long documents are built: 'code' joins the files of a repository in
      dependency order, 'texts' the most similar texts.
    repository_field: field with the repository; '' or a record without it: the first
      directory of its path.
  """

  root: str
  suffixes: tuple[str, ...] = ('.txt', *record_files.READERS)
  exclude_dirs: tuple[str, ...] = ()
  weight: float = 1.0
  text_field: str = 'text'
  category_field: str = ''
  join: str = 'texts'
  repository_field: str = ''

  def __post_init__(self):
    require(self, self.join in JOINS, 'join', f'one of {JOINS}')
    require(self, self.weight >= 0, 'weight', 'at least 0')


class Corpus(NamedTuple):
  """The documents of several domains, in order of domain.

  Attributes:
    source: the documents.
    domains: [n] index of each document's domain in `configs`.
    configs: settings of the domains.
    names: the domains' names.
  """

  source: Sequence[Document]
  domains: np.ndarray
  configs: tuple[DomainConfig, ...]
  names: tuple[str, ...]


class Table(NamedTuple):
  """Data about each document for the mixture; arrays are [n].

  Attributes:
    sizes: UTF-8 bytes.
    scores: given by the scorer.
    categories: index of each document's category in `labels`.
    repositories: index of the repository.
    paths: paths in the repository, or the documents' names.
    labels: the categories' labels.
  """

  sizes: np.ndarray
  scores: np.ndarray
  categories: np.ndarray
  repositories: np.ndarray
  paths: np.ndarray
  labels: np.ndarray


def load(
  domains: Mapping[str, DomainConfig], held_out: float
) -> tuple[Corpus, Sequence[Document]]:
  """Reads the current files; returns (training corpus, held-out documents).

  Raises:
    FileNotFoundError: a domain has no files.
    ValueError: one of the two sides has no documents.
  """
  train, test, index = [], [], []
  for number, config in enumerate(domains.values()):
    for part in open_domain(config):
      out = np.array(
        [documents.held_out(part.name(i), held_out) for i in range(len(part))]
      )
      train.append(documents.Subset(part, np.flatnonzero(~out)))
      test.append(documents.Subset(part, np.flatnonzero(out)))
      index += [number] * len(train[-1])
  corpus = Corpus(
    documents.Chain(train),
    np.array(index, np.int64),
    tuple(domains.values()),
    tuple(domains),
  )
  held = documents.Chain(test)
  if not len(corpus.source) or not len(held):
    raise ValueError(
      f'{len(corpus.source)} documents to train on and {len(held)} held out of '
      f'{", ".join(config.root for config in domains.values())}: both need at least '
      'one: change held_out or add documents'
    )
  return corpus, held


def open_domain(config: DomainConfig) -> list[Sequence[Document]]:
  """Sources of a domain: all text files as one, then each record file."""
  root = pathlib.Path(config.root)
  if root.is_file():
    paths, root = [root], root.parent
  else:
    paths = text_files.find(root, config.suffixes, exclude_dirs=config.exclude_dirs)
  plain = [path for path in paths if path.suffix not in record_files.READERS]
  parts: list[Sequence[Document]] = []
  if plain:
    parts.append(text_files.TextFiles(plain, root=root))
  for path in paths:
    if reader := record_files.READERS.get(path.suffix):
      parts.append(reader(path, text_field=config.text_field))
  return parts


def survey(
  corpus: Corpus,
  scorer: quality.Scorer | None,
  path: str | os.PathLike | None = None,
  scorer_print: str = '',
) -> Table:
  """Reads every document once.

  Args:
    scorer: None gives all documents the same score.
    path: .npz file that caches the table.
    scorer_print: fingerprint of the scorer (`quality.load`); a cached table is replaced
      if this or the documents have changed.

  Raises:
    ValueError: the scorer did not return a number; names the document.
  """
  print_ = documents.fingerprint(
    corpus.source.fingerprint, corpus.domains, corpus.configs, scorer_print
  )
  if path is not None and pathlib.Path(path).exists():
    with np.load(path) as cached:
      if str(cached['fingerprint']) == print_:
        return Table(*(cached[name] for name in Table._fields))
  logging.info('reading %d documents for their size and score', len(corpus.source))
  sizes, scores, labels, repositories, paths = [], [], [], [], []
  for index, domain in enumerate(corpus.domains):
    config, name = corpus.configs[domain], corpus.names[domain]
    document = corpus.source[index]
    where = str(document.fields.get('path', document.name))
    sizes.append(max(len(document.text.encode()), 1))
    scores.append(0.0 if scorer is None else quality.score_one(document, scorer))
    labels.append(str(document.fields.get(config.category_field, name)))
    folder = where.split('/')[0] if '/' in where else ''
    repository = document.fields.get(config.repository_field, folder)
    repositories.append(f'{name}/{repository}')
    paths.append(where)
  label, category = np.unique(labels, return_inverse=True)
  _, repository = np.unique(repositories, return_inverse=True)
  table = Table(
    np.array(sizes, np.int64),
    np.array(scores),
    category,
    repository,
    np.array(paths),
    label,
  )
  if path is not None:
    new = pathlib.Path(path).with_suffix('.new')
    with open(new, 'wb') as file:
      np.savez_compressed(file, fingerprint=print_, **table._asdict())
    new.replace(path)
  return table


def joined(corpus: Corpus, table: Table, most: int) -> tuple[Corpus, Table]:
  """The corpus as long documents of at most `most` bytes, built as in `join`.

  The score of a long document is the mean over its members, weighted by size; category
  and repository are those of the first member.
  """
  groups: list[list[int]] = []
  for number, config in enumerate(corpus.configs):
    mine = np.flatnonzero(corpus.domains == number)
    sizes = table.sizes[mine]

    def read(index, mine=mine):
      return corpus.source[int(mine[index])].text

    if config.join == 'code':
      paths, repositories = table.paths[mine].tolist(), table.repositories[mine]
      found = long_context.related_code(paths, repositories.tolist(), sizes, read, most)
    else:
      vectors = long_context.vectors(map(read, range(len(mine))))
      found = long_context.related_texts(vectors, sizes, most)
    groups += [[int(mine[i]) for i in group] for group in found]
  first = np.array([group[0] for group in groups], np.int64)
  sizes = np.array([table.sizes[group].sum() for group in groups])
  scores = [np.average(table.scores[g], weights=table.sizes[g]) for g in groups]
  long = table._replace(
    sizes=sizes,
    scores=np.array(scores),
    categories=table.categories[first],
    repositories=table.repositories[first],
    paths=table.paths[first],
  )
  source = documents.Joined(corpus.source, groups)
  return corpus._replace(source=source, domains=corpus.domains[first]), long


def mixed(
  corpus: Corpus, table: Table, config: MixtureConfig, seed: int
) -> mixture.Mixture:
  """The corpus with each document repeated according to the mixture's rule."""
  found = mixture.repetitions(
    table.sizes,
    corpus.domains,
    table.categories,
    mixture.quality(quality.ranks(table.scores), config.gain),
    [domain.weight for domain in corpus.configs],
    config,
  )
  groups = table.categories * len(corpus.configs) + corpus.domains
  return mixture.Mixture(corpus.source, mixture.counts(found, groups, seed))
