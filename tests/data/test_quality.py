"""The quality classifier against its formula, and that any callable can replace it."""

import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.data import quality
from m2jax.data.documents import Document

SOURCES = sorted((pathlib.Path(__file__).parents[2] / 'm2jax').glob('*/*.py'))


def shuffled(text, seed):
  """The same words in random order: bad for its n-grams alone."""
  words = text.split(' ')
  random.Random(seed).shuffle(words)
  return ' '.join(words)


@pytest.fixture(scope='module')
def labelled():
  """(texts, labels): real sources, and the same with their words shuffled."""
  good = [path.read_text()[:4000] for path in SOURCES if path.stat().st_size > 2000]
  bad = [shuffled(text, i) for i, text in enumerate(good)]
  return good + bad, [True] * len(good) + [False] * len(bad)


def split(labelled):
  """Every fourth file, good and bad, is held out."""
  texts, labels = labelled
  half = len(texts) // 2
  out = [i % half % 4 == 0 for i in range(len(texts))]
  pick = lambda want: (
    [t for t, o in zip(texts, out, strict=True) if o == want],
    [label for label, o in zip(labels, out, strict=True) if o == want],
  )
  return pick(False), pick(True)


def test_it_learns_and_survives_the_disk(labelled, tmp_path):
  """Held-out good documents score above bad ones; the saved file gives the same
  probabilities bit for bit."""
  train, test = split(labelled)
  classifier = quality.fit(*train)
  scores = [classifier(Document(text, '')) for text in test[0]]
  good, bad = (
    np.array([s for s, g in zip(scores, test[1], strict=True) if g == want])
    for want in (True, False)
  )
  assert np.mean(good[:, None] > bad) > 0.9
  classifier.save(tmp_path / 'quality.npz')
  again = quality.Classifier.load(tmp_path / 'quality.npz')
  assert [again.probability(text) for text in test[0]] == scores


def test_fit_is_the_minimum_of_its_loss():
  """The gradient of the documented loss, written here densely in float64, vanishes at
  what is returned, with unbalanced labels too."""
  texts = ['a b c', 'a b', 'c c d', 'd e', 'e a', 'b d a']
  labels, l2, buckets = [1, 1, 0, 0, 0, 0], 1e-2, 64
  found = quality.fit(texts, labels, buckets=buckets, l2=l2, steps=500)
  x = np.zeros((6, buckets))
  for row, text in zip(x, texts, strict=True):
    active = quality.features(text, buckets=buckets, longest=2)
    row[active] = 1 / np.sqrt(len(active))
  y, weight = np.array(labels), np.where(labels, 1 / 4, 1 / 8)

  def loss(w, b):
    p = jax.nn.sigmoid(x @ w + b)
    entropy = -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p))
    return weight @ entropy + l2 / 2 * w @ w

  with jax.enable_x64():
    w, b = np.float64(found.weights), np.float64(found.bias)
    grads = jax.grad(loss, argnums=(0, 1))(w, b)
    assert max(np.abs(g).max() for g in grads) < 1e-5
    want = jax.nn.sigmoid(x @ w + b)
  got = [found.probability(text) for text in texts]
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_features():
  """n-grams up to the longest, each once, case-insensitive. Recorded numbers detect a
  change of the hash, which would invalidate saved classifiers."""
  small = quality.features('a b A b', buckets=2**16, longest=2)
  assert len(small) == 4  # a, b, a b, b a
  assert set(quality.features('a b', buckets=2**16, longest=1)) < set(small)
  assert small.tolist() == sorted(small) and len(set(small)) == 4
  assert quality.features('', buckets=8, longest=2).tolist() == []
  assert quality.features('if x', buckets=2**16, longest=2).tolist() == GOLDEN


GOLDEN = [47360, 57601, 58780]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_ranks_keep_the_order(scores):
  """Whatever the scorer's scale; equal scores have equal ranks, and the mean is 1/2."""
  ranks = quality.ranks(scores)
  assert np.all((ranks > 0) & (ranks < 1)) and np.mean(ranks) == pytest.approx(0.5)
  for i, a in enumerate(scores):
    for j, b in enumerate(scores):
      assert (a < b) == (ranks[i] < ranks[j])


def test_any_callable_can_be_the_scorer():
  """A rule, a reward model's function; numbers of any kind."""
  document = Document('abc', 'x', {'stars': 9})
  assert quality.score_one(document, lambda d: len(d.text)) == 3.0
  assert quality.score_one(document, lambda d: jnp.float32(d.fields['stars'])) == 9.0


def test_scorers_by_name(tmp_path):
  """A saved classifier by its path, anything else as module:function; a classifier
  trained anew is another one, under the same path too."""
  prints = []
  for texts in (['a b', 'c'], ['c', 'a b']):
    quality.fit(texts, [True, False], buckets=8).save(tmp_path / 'q.npz')
    scorer, print_ = quality.load(str(tmp_path / 'q.npz'))
    prints.append(print_)
  assert scorer(Document('c', '')) > 0.5 and prints[0] != prints[1]
  scorer, print_ = quality.load('builtins:len')
  assert scorer is len and print_ == 'builtins:len'
  for name in ('gone.npz', 'builtins:gone', 'no.such.module:f'):
    with pytest.raises(FileNotFoundError, match='gone|no'):
      quality.load(name)


@pytest.mark.parametrize('bad', [float('nan'), None, 'high', [1, 2]])
def test_a_broken_scorer_is_named(bad):
  """One document without a score must not spoil the ranks of all."""
  with pytest.raises(ValueError, match=r'for document second\.txt'):
    quality.score_one(Document('b', 'second.txt'), lambda d: bad)


def test_broken_files_and_labels_are_named(tmp_path):
  """The message names the file or label that was wrong."""
  (tmp_path / 'other.npz').write_bytes(b'nonsense')
  with pytest.raises(ValueError, match=r'other\.npz is not a quality classifier'):
    quality.Classifier.load(tmp_path / 'other.npz')
  with open(tmp_path / 'empty.npz', 'wb') as file:
    np.savez(file, weights=np.zeros(2))
  with pytest.raises(ValueError, match=r'empty\.npz is not a quality classifier'):
    quality.Classifier.load(tmp_path / 'empty.npz')
  with pytest.raises(ValueError, match='both classes'):
    quality.fit(['a', 'b'], [True, True])
  with pytest.raises(ValueError, match='one label per text'):
    quality.fit(['a', 'b'], [True])
