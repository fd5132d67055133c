"""Merging samples into forests: nothing lost, nothing twice, visibility is ancestry."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import forest


@st.composite
def samples(draw, *, most: int = 12, longest: int = 9):
  """Samples over two or three letters, so that prefixes collide, duplicates included.

  Values of the terms are distinct, so that a swap cannot go unseen.
  """
  letters = st.integers(0, draw(st.integers(1, 2)))
  paths = draw(
    st.lists(st.lists(letters, min_size=1, max_size=longest), min_size=1, max_size=most)
  )
  out, serial = [], 1
  for path in paths:
    prompt = draw(st.integers(0, len(path)))
    n = len(path) - prompt
    values = serial + np.arange(n)
    serial += n
    weights = None
    if draw(st.booleans()):
      dropped = draw(st.lists(st.booleans(), min_size=n, max_size=n))
      weights = np.where(dropped, 0.0, 0.5 * values)
    as_array = draw(st.sampled_from([np.int32, np.int64, list]))
    out.append(
      forest.Sample(
        tokens=path if as_array is list else np.array(path, as_array),
        prompt_length=prompt,
        old_logprobs=draw(st.sampled_from([None, -0.25 * values])),
        advantages=draw(st.sampled_from([None, 2.0 * values])),
        weights=weights,
      )
    )
  return out


def path_to(batch, row, index) -> list[int]:
  """Row indices from the root to `index`, by parent links."""
  path = []
  while index >= 0:
    path.append(int(index))
    assert batch.parent[row, index] < index
    index = batch.parent[row, index]
  return path[::-1]


def check_shape_of_rows(batch):
  """What every forest obeys, whatever it was made from."""
  for row in range(len(batch.tokens)):
    end = batch.subtree_end[row]
    used = int(np.count_nonzero(end))
    assert not np.any(end[used:])  # padding is at the tail,
    assert np.all(batch.parent[row, used:] == -1)
    for field in (batch.tokens, batch.position, batch.multiplicity):
      assert not np.any(field[row, used:])  # and empty
    for i in range(used):
      path = path_to(batch, row, i)
      assert batch.position[row, i] == len(path) - 1
      seen = [j for j in range(len(end)) if j <= i < end[j]]
      assert seen == path  # ancestors and self, nothing else
    for i in range(used, len(end)):
      assert not any(j <= i < end[j] for j in range(len(end)))


def check_samples(batch, given_samples):
  """Every sample is in one row, every term exactly once, counts agree."""
  found = collections.defaultdict(dict)
  home = {}
  for row, slot in zip(*np.nonzero(batch.weight), strict=True):
    index, offset = batch.term_sample[row, slot], batch.term_offset[row, slot]
    assert offset not in found[index], 'a term occurs twice'
    found[index][offset] = row, slot
    assert home.setdefault(index, row) == row  # a sample lives in one row
  padding = batch.weight == 0
  assert np.all(batch.term_sample[padding] == -1)
  assert np.all(batch.term_offset[padding] == -1)
  for index, sample in enumerate(given_samples):
    n = len(sample.tokens) - sample.prompt_length
    weights = np.ones(n) if sample.weights is None else sample.weights
    assert set(found[index]) == set(np.flatnonzero(weights))
    for offset, (row, slot) in found[index].items():
      path = path_to(batch, row, batch.term_token[row, slot])
      length = sample.prompt_length + offset + 1
      assert list(batch.tokens[row, path]) == list(sample.tokens[:length])
      for field, values, default in (
        (batch.weight, sample.weights, 1.0),
        (batch.old_logprob, sample.old_logprobs, 0.0),
        (batch.advantage, sample.advantages, 1.0),
      ):
        want = default if values is None else values[offset]
        assert field[row, slot] == np.float32(want)


def prefixes(batch, row) -> list[tuple[int, ...]]:
  """The token path to each token of a row."""
  used = int(np.count_nonzero(batch.subtree_end[row]))
  return [tuple(batch.tokens[row, path_to(batch, row, i)]) for i in range(used)]


def check_multiplicity(batch, given_samples):
  """Over all rows a prefix counts the samples that pass through it, and the samples of
  a row all start at its roots."""
  counted = collections.Counter()
  for row in range(len(batch.tokens)):
    for i, prefix in enumerate(prefixes(batch, row)):
      assert batch.multiplicity[row, i] >= 1
      counted[prefix] += int(batch.multiplicity[row, i])
  want = collections.Counter(
    tuple(s.tokens[:n]) for s in given_samples for n in range(1, len(s.tokens) + 1)
  )
  assert counted == want


@given(samples())
def test_merge(given_samples):
  """In one row: a trie, in which every sample is found with all its terms."""
  total = sum(len(s.tokens) for s in given_samples)
  batch = forest.merge(given_samples, row_tokens=total)
  check_shape_of_rows(batch)
  check_samples(batch, given_samples)
  check_multiplicity(batch, given_samples)
  assert len(batch.tokens) == 1
  distinct = {
    tuple(s.tokens[:n]) for s in given_samples for n in range(1, len(s.tokens) + 1)
  }
  assert sorted(prefixes(batch, 0)) == sorted(distinct)  # each prefix exactly once
  assert batch.num_tokens == len(distinct)


@given(samples(), st.integers(0, 6), st.integers(0, 6))
def test_split(given_samples, spare, spare_terms):
  """Split over small rows the same holds: paths repeat between rows, never in one, and
  no row has more tokens or terms than it may."""
  row_tokens = max(len(s.tokens) for s in given_samples) + spare
  row_terms = spare_terms + max(
    1, *(len(s.tokens) - s.prompt_length for s in given_samples)
  )
  batch = forest.merge(given_samples, row_tokens=row_tokens, row_terms=row_terms)
  assert batch.tokens.shape[1] == row_tokens
  assert batch.term_token.shape == (len(batch.tokens), row_terms)
  check_shape_of_rows(batch)
  check_samples(batch, given_samples)
  check_multiplicity(batch, given_samples)
  for row in range(len(batch.tokens)):
    paths = prefixes(batch, row)
    assert len(set(paths)) == len(paths)


@given(samples())
def test_dtypes(given_samples):
  """Arrays are int32 and float32 whatever the samples brought."""
  batch = forest.merge(given_samples, row_tokens=16, rows=12)
  floats = ('old_logprob', 'advantage', 'weight')
  for field in dataclasses.fields(forest.Forest):
    values = getattr(batch, field.name)
    if values is not None:
      want = np.float32 if field.name in floats else np.int32
      assert values.dtype == want, field.name
      assert values.shape[0] == 12


def test_order_does_not_matter():
  """A permutation of the samples gives the same rows; only term_sample differs."""
  rng = np.random.default_rng(0)
  given_samples = [forest.Sample(rng.integers(0, 2, 6), 2) for _ in range(10)]
  order = rng.permutation(10)
  a = forest.merge(given_samples, row_tokens=13)
  b = forest.merge([given_samples[i] for i in order], row_tokens=13)
  for name in ('tokens', 'parent', 'subtree_end', 'position', 'multiplicity'):
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_experts():
  """Recorded ids land on the tokens they were recorded for: also where a sample without
  a record, or with gaps in it, shares the path of one that has them."""

  def ids(length, start):
    return start + np.arange(length * 2).reshape(length, 1, 2).astype(np.int32)

  bare = forest.Sample([1, 2, 3], 1)
  full = forest.Sample([1, 2, 4, 5], 1, experts=ids(4, 10))
  gap = ids(3, 10)
  gap[1] = -1
  holey = dataclasses.replace(bare, experts=gap)
  for group in ([bare, full], [full, bare], [holey, full], [full, holey]):
    batch = forest.merge(group, row_tokens=8)
    where = {prefix: i for i, prefix in enumerate(prefixes(batch, 0))}
    for n in range(1, 5):
      at = where[tuple(full.tokens[:n])]
      np.testing.assert_array_equal(batch.experts[0, at], full.experts[n - 1])
    own = batch.experts[0, where[1, 2, 3]]
    np.testing.assert_array_equal(
      own, gap[2] if any(s is holey for s in group) else [[-1, -1]]
    )
    assert np.all(batch.experts[0, batch.num_tokens :] == -1)


def test_chain():
  """Documents are packed whole, share nothing even where they are equal, and every
  token but a document's first is a term of weight 1."""
  documents = [[1, 2, 3], [1, 2, 3], np.array([1, 2]), [7]]
  batch = forest.chain(documents, row_tokens=5, rows=3)
  check_shape_of_rows(batch)
  assert batch.num_tokens == 9
  assert np.all(batch.multiplicity[batch.subtree_end > 0] == 1)
  check_samples(batch, [forest.Sample(d, 1) for d in documents])
  starts = [
    (r, i) for r, i in np.argwhere(batch.parent == -1) if batch.subtree_end[r, i]
  ]
  pieces = [batch.tokens[r, i : batch.subtree_end[r, i]].tolist() for r, i in starts]
  assert sorted(pieces) == sorted([[1, 2, 3], [1, 2, 3], [1, 2], [7]])


def test_causal():
  """One chain a row, equal to what `chain` makes of the same rows; NumPy stays NumPy
  and a jax array stays one."""
  tokens = np.arange(1, 13, dtype=np.int32).reshape(2, 6)
  batch = forest.causal(tokens)
  packed = forest.chain(list(tokens), row_tokens=6)
  for field in dataclasses.fields(forest.Forest):
    if field.name != 'experts':
      a, b = getattr(batch, field.name), getattr(packed, field.name)
      np.testing.assert_array_equal(a, b, err_msg=field.name)
      assert isinstance(a, np.ndarray) and a.dtype == b.dtype, field.name
  import jax.numpy as jnp

  assert not isinstance(forest.causal(jnp.array(tokens)).position, np.ndarray)


@pytest.mark.parametrize(
  'sample, message',
  [
    (forest.Sample([]), 'sample 1 has no tokens'),
    (forest.Sample([1] * 9), 'sample 1 has 9 tokens, more than row_tokens=8'),
    (forest.Sample([1, 2], 3), r'sample 1: prompt_length=3 outside \[0, 2\]'),
    (forest.Sample([1, 2], -1), r'sample 1: prompt_length=-1 outside \[0, 2\]'),
    (
      forest.Sample([1, 2], 1, advantages=[1.0, 2.0]),
      'sample 1: advantages has length 2',
    ),
    (forest.Sample([1, 2], 1, weights=[]), 'sample 1: weights has length 0'),
    (
      forest.Sample([1, 2], 1, experts=np.zeros((1, 1, 2))),
      'sample 1: experts has length 1, not 2',
    ),
    (forest.Sample([1] * 7), 'sample 1 has 7 loss terms, more than row_terms=6'),
    (forest.Sample([[1, 2], [3, 4]]), 'sample 1: tokens must be one-dimensional'),
    (forest.Sample([1.5, 2.0]), 'sample 1: tokens must be integers'),
  ],
)
def test_bad_samples(sample, message):
  """Each mistake names the sample and what is wrong with it."""
  good = forest.Sample([1, 2, 3], 1)
  with pytest.raises(ValueError, match=message):
    forest.merge([good, sample], row_tokens=8, row_terms=6)


def test_too_few_rows_or_none():
  """Samples that do not fit `rows` raise instead of being dropped; so does nothing."""
  with pytest.raises(ValueError, match='need 2 rows, more than rows=1'):
    forest.merge([forest.Sample([1, 2]), forest.Sample([3, 4])], row_tokens=2, rows=1)
  with pytest.raises(ValueError, match='at least one sample'):
    forest.merge([], row_tokens=4)
  with pytest.raises(ValueError, match='at least one document'):
    forest.chain([], row_tokens=4)
  with pytest.raises(ValueError, match='sample 0 has no tokens'):
    forest.chain([[]], row_tokens=4)
