"""From directories to a stage's source: domains, survey, joining and mixing."""

import json

import numpy as np
import pytest

from m2jax.data import corpus
from m2jax.data.corpus import DomainConfig
from m2jax.data.mixture import MixtureConfig


@pytest.fixture
def root(tmp_path):
  """A domain of code in two repositories, and one of records in two languages."""
  for repository in ('one', 'two'):
    for i in range(6):
      path = tmp_path / 'code' / repository / f'm{i}.py'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(f'import m{i + 1}\n' + f'# {repository} {i}\n' * 20)
  lines = [
    {'text': f'story {i} ' * 10, 'language': 'en' if i % 4 else 'de'} for i in range(40)
  ]
  (tmp_path / 'web').mkdir()
  (tmp_path / 'web' / 'a.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  (tmp_path / 'web' / 'note.txt').write_text('a plain text among the records')
  return tmp_path


def domains(root, **web):
  code = DomainConfig(f'{root}/code', ('.py',), join='code')
  return {
    'code': code,
    'web': DomainConfig(f'{root}/web', category_field='language', **web),
  }


def load(root, held_out=0.2, **web):
  return corpus.load(domains(root, **web), held_out)


def test_load_splits_every_domain(root):
  """Text files and records side by side; each document on one side, by its name."""
  train, held_out = load(root)
  names = [train.source[i].name for i in range(len(train.source))]
  held = [held_out[i].name for i in range(len(held_out))]
  assert len(names) + len(held) == 12 + 40 + 1 and not set(names) & set(held)
  assert {'one/m1.py', 'note.txt'} & {*names, *held}
  by_domain = [train.names[d] for d in train.domains]
  for name, domain in zip(names, by_domain, strict=True):
    assert (domain == 'code') == name.endswith('.py')
  file = DomainConfig(f'{root}/web/a.jsonl')
  assert len(corpus.load({'web': file}, 0.2)[0].source) == sum(
    name.startswith('a.jsonl') for name in names
  )


def test_survey_is_kept(root, tmp_path):
  """Each document is read and scored once: again only with another scorer or data."""
  train, _ = load(root)
  calls = []

  def scorer(document):
    calls.append(document.name)
    return len(document.text)

  path = tmp_path / 'survey.npz'
  first = corpus.survey(train, scorer, path, 'length')
  assert sorted(calls) == sorted(d.name for d in train.source)
  again = corpus.survey(train, scorer, path, 'length')
  assert len(calls) == len(train.source)
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(
    first.sizes, [len(d.text.encode()) for d in train.source]
  )
  for document, category in zip(train.source, first.categories, strict=True):
    domain = 'code' if document.name.endswith('.py') else 'web'
    assert first.labels[category] == document.fields.get('language', domain)
  corpus.survey(train, scorer, path, 'another')
  assert len(calls) == 2 * len(train.source)
  (root / 'code' / 'one' / 'new.py').write_text('x = 1\n' * 30)
  train, _ = load(root)
  before = len(calls)
  corpus.survey(train, scorer, path, 'another')
  assert len(calls) == before + len(train.source)


def test_joined(root):
  """Files of a repository come together, imports first; bytes are kept, and scores are
  the members' mean by size."""
  train, _ = load(root)
  table = corpus.survey(train, lambda d: float(d.name.endswith('.py')))
  long, rows = corpus.joined(train, table, most=10_000)
  assert rows.sizes.sum() == table.sizes.sum() and rows.sizes.max() <= 10_000
  assert len(long.source) == len(long.domains) == len(rows.scores) < len(train.source)
  code = [long.source[i].text for i in np.flatnonzero(long.domains == 0)]
  assert len(code) == 2
  for text in code:
    used = [int(line[8:]) - 1 for line in text.splitlines() if line[:6] == 'import']
    assert used == sorted(used, reverse=True)  # m0 imports m1 imports m2 …
    assert ('one' in text) != ('two' in text)
  assert set(rows.scores[long.domains == 0]) == {1.0}


def test_mixed(root):
  """Weights, qualities and categories reach the mixture; the seed alone decides it."""
  train, _ = load(root, weight=3.0)
  table = corpus.survey(train, lambda d: d.name.startswith('a.jsonl'))
  config = MixtureConfig(cap=100.0, floor=0.0, gain=1.0, epoch=5.0)
  mixed = corpus.mixed(train, table, config, seed=0)
  total = web = 0
  for document in mixed:
    size = len(document.text.encode())
    total += size
    web += size * (not document.name.endswith('.py'))
  assert web / total == pytest.approx(0.75, abs=0.03)
  assert total == pytest.approx(5 * table.sizes.sum(), rel=0.05)
  names = [d.name for d in mixed]
  assert names == [d.name for d in corpus.mixed(train, table, config, seed=0)]
  gained = MixtureConfig(cap=100.0, floor=0.0, gain=9.0, epoch=5.0)
  better = [d.name for d in corpus.mixed(train, table, gained, seed=0)]
  assert better.count('note.txt') < names.count('note.txt')  # the scorer's worst
  floor = MixtureConfig(cap=100.0, floor=1.0, gain=1.0, epoch=1.0)
  even = [d.name for d in corpus.mixed(train, table, floor, seed=0)]
  assert set(even) == {d.name for d in train.source}  # natural shares: each once


def test_bad_settings_are_named(root):
  """A person must learn which domain or field was wrong."""
  with pytest.raises(ValueError, match=r'DomainConfig\.join='):
    DomainConfig('x', join='pictures')
  with pytest.raises(ValueError, match=r'DomainConfig\.weight='):
    DomainConfig('x', weight=-1.0)
  with pytest.raises(FileNotFoundError, match='gone'):
    corpus.load({'x': DomainConfig(f'{root}/gone')}, 0.1)
  with pytest.raises(ValueError, match='0 held out of'):
    load(root, held_out=0.0)
