"""Long documents: imports before importers, the alike together, nothing lost or cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.data import long_context


def before(order, *names):
  places = [order.index(name) for name in names]
  return places == sorted(places)


def test_python_imports():
  """Absolute and relative, of modules, packages and names in them, over several lines;
  src/ may be the root of what is imported."""
  files = {
    'src/app/main.py': 'import os\nfrom app import db, api\nimport app.util as u\n',
    'src/app/api.py': 'from .deep import (\n  tool,\n  other,\n)\n',
    'src/app/deep/__init__.py': '',
    'src/app/deep/tool.py': 'from ..util import x\n',
    'src/app/db.py': 'def f():\n  from . import util  # late\n',
    'src/app/util.py': 'import sys\n',
    'setup.py': 'from setuptools import setup\n',
  }
  order = long_context.dependency_order(files)
  assert sorted(order) == sorted(files)
  assert before(order, 'src/app/util.py', 'src/app/deep/tool.py', 'src/app/api.py')
  assert before(order, 'src/app/api.py', 'src/app/main.py')
  assert before(order, 'src/app/util.py', 'src/app/db.py', 'src/app/main.py')


@pytest.mark.parametrize(
  'files',
  [
    {
      'a/main.c': '#include <stdio.h>\n #include "b.h"\n',
      'a/b.h': '#include "lib/c.h"',
      'lib/c.h': '',
    },
    {
      'a/main.ts': "import x from './b'\nimport y from 'react'",
      'a/b.tsx': "export { z } from '../lib'",
      'lib/index.js': "const p = require('fs')",
    },
  ],
)
def test_other_languages(files):
  """Includes by folder and by root; scripts by relative path, suffix left out."""
  assert long_context.dependency_order(files) == list(files)[::-1]


@given(
  edges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20),
  count=st.integers(1, 10),
)
def test_dependency_order(edges, count):
  """Any graph: each file once; where it has no cycles, imports come first."""
  files = {f'm{i}.py': '' for i in range(count)}
  edges = [(a % count, b % count) for a, b in edges]
  acyclic = [(a, b) for a, b in edges if a > b]
  for use, chosen in ((edges, []), (acyclic, acyclic)):
    texts = dict(files)
    for a, b in use:
      texts[f'm{a}.py'] += f'import m{b}\n'
    order = long_context.dependency_order(texts)
    assert sorted(order) == sorted(files)
    for a, b in chosen:
      assert before(order, f'm{b}.py', f'm{a}.py')


def test_cycles_and_strangers():
  """A cycle ends; what is unrelated stays in the order of the paths."""
  files = {'b.py': 'import a', 'a.py': 'import b', 'c.py': '', 'd/e.py': ''}
  order = long_context.dependency_order(files)
  assert order == ['b.py', 'a.py', 'c.py', 'd/e.py']


def test_long_import_chains():
  """A repository with a chain of thousands must not end the recursion."""
  files = {f'm{i:05}.py': f'import m{i + 1:05}' for i in range(5000)}
  assert long_context.dependency_order(files) == sorted(files, reverse=True)


@given(
  sizes=st.lists(st.integers(1, 20), min_size=1, max_size=15),
  repositories=st.integers(1, 4),
  most=st.integers(1, 40),
)
def test_groups_partition_and_fit(sizes, repositories, most):
  """Both ways of joining: every document in one group, no group above `most` unless of
  one document, and code never joined across repositories."""
  n = len(sizes)
  repository = [i % repositories for i in range(n)]
  paths = [f'f{i}.py' for i in range(n)]
  texts = [f'import f{(i + 3) % n}\nword{i % 3} ' * 3 for i in range(n)]
  code = long_context.related_code(paths, repository, sizes, texts.__getitem__, most)
  likeness = long_context.vectors(texts, width=16)
  for groups in (code, long_context.related_texts(likeness, sizes, most)):
    assert sorted(sum(groups, [])) == list(range(n))
    assert all(len(g) == 1 or sum(sizes[i] for i in g) <= most for g in groups)
  assert all(len({repository[i] for i in group}) == 1 for group in code)


@pytest.mark.parametrize('block', [24, 8])
def test_themes_are_chained(monkeypatch, block):
  """Texts of three themes, mixed, come out one theme after the other, also where they
  are more than are compared with each other."""
  monkeypatch.setattr(long_context, '_BLOCK', block)
  themes = [
    'the whale swam in the deep ocean with other whales and fish',
    'compile the kernel with a linker and debug its memory allocator',
    'knead the dough, add flour and yeast and bake the bread slowly',
  ]
  rng = np.random.default_rng(0)
  texts = []
  for i in range(24):
    words = themes[i % 3].split()
    texts.append(' '.join(rng.choice(words, 8)))
  groups = long_context.related_texts(long_context.vectors(texts), [1] * 24, 24)
  (order,) = groups
  changes = sum(a % 3 != b % 3 for a, b in zip(order, order[1:], strict=False))
  assert changes <= (3 if block == 24 else 7)  # two are needed, of 15 by chance


def test_the_work_is_near_linear(monkeypatch):
  """Twice the texts are twice the comparisons, and not four times: with n² a shard of
  a corpus would take days."""
  compared = []

  class Counted(np.ndarray):
    def __matmul__(self, other):
      compared.append(self.shape[0] * (other.shape[1] if other.ndim == 2 else 1))
      return np.asarray(self) @ np.asarray(other)

  monkeypatch.setattr(long_context, '_BLOCK', 32)
  work = []
  for n in (512, 1024):
    vectors = np.random.default_rng(0).normal(size=(n, 4)).view(Counted)
    groups = long_context.related_texts(vectors, [1] * n, 10)
    assert sorted(sum(groups, [])) == list(range(n)) and len(groups) <= n / 10 + 1
    work.append(sum(compared))
    compared.clear()
  assert work[1] < 2.2 * work[0] and work[0] < 512**2 / 8


def test_hashed_vectors_keep_likeness():
  """Inner products of hashed vectors are near those of plain TF-IDF."""
  rng = np.random.default_rng(0)
  words = [f'w{i}' for i in range(200)]
  texts = [' '.join(rng.choice(words, 60)) for _ in range(30)]
  counts = np.array([[text.split().count(w) for w in words] for text in texts])
  idf = np.log(30 / np.maximum((counts > 0).sum(0), 1))
  full = np.where(counts, 1 + np.log(np.maximum(counts, 1)), 0) * idf
  full /= np.linalg.norm(full, axis=1, keepdims=True)
  hashed = long_context.vectors(texts, width=4096)
  np.testing.assert_allclose(np.linalg.norm(hashed, axis=1), 1, rtol=1e-5)
  assert np.abs(hashed @ hashed.T - full @ full.T).max() < 0.15
