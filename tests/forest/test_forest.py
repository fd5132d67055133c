"""Merging samples into forests: nothing lost, nothing twice, visibility is ancestry."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import forest
from tests.forest import reference


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
  """Invariants of every forest."""
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
  limits = dict(row_tokens=row_tokens, row_terms=row_terms)
  batch = forest.merge(given_samples, **limits)
  size = forest.measure(given_samples, **limits)  # foretold from lengths
  assert size == (len(batch.tokens), batch.num_tokens)
  assert batch.tokens.shape[1] == row_tokens
  assert batch.term_token.shape == (len(batch.tokens), row_terms)
  check_shape_of_rows(batch)
  check_samples(batch, given_samples)
  check_multiplicity(batch, given_samples)
  for row in range(len(batch.tokens)):
    paths = prefixes(batch, row)
    assert len(set(paths)) == len(paths)


@given(samples(), st.integers(0, 6), st.integers(0, 6))
def test_equals_reference(given_samples, spare, spare_terms):
  """Rows, order and terms are those of merging one sample after the other."""
  row_tokens = max(len(s.tokens) for s in given_samples) + spare
  row_terms = spare_terms + max(
    1, *(len(s.tokens) - s.prompt_length for s in given_samples)
  )
  batch = forest.merge(given_samples, row_tokens=row_tokens, row_terms=row_terms)
  rows = reference.merge(given_samples, row_tokens, row_terms)
  assert len(batch.tokens) == len(rows)
  for i, row in enumerate(rows):
    used = len(row['tokens'])
    row['subtree_end'] = row['end']
    for name in ('tokens', 'parent', 'subtree_end', 'position', 'multiplicity'):
      assert getattr(batch, name)[i, :used].tolist() == row[name], name
    columns = (batch.term_token[i], batch.term_sample[i], batch.term_offset[i])
    terms = zip(*columns, strict=True)
    assert list(terms)[: len(row['terms'])] == row['terms']
    assert not np.any(batch.weight[i, len(row['terms']) :])


@given(samples())
def test_one_row(given_samples):
  """Without row_tokens there is one row, exactly as long as the tree."""
  batch = forest.merge(given_samples)
  total = sum(len(s.tokens) for s in given_samples)
  whole = forest.merge(given_samples, row_tokens=total)
  n = whole.num_tokens
  assert batch.tokens.shape == (1, n)
  for name in ('tokens', 'parent', 'subtree_end', 'position', 'multiplicity'):
    np.testing.assert_array_equal(getattr(batch, name), getattr(whole, name)[:, :n])


@given(samples(), st.integers(0, 6))
def test_loss_of_paths(given_samples, spare):
  """'path' weighs a response token as often as root-to-leaf paths go through it: what
  explicit rows, one a leaf, with every response on them trained, would sum to."""
  tokens = [tuple(s.tokens) for s in given_samples]
  leaves = [t for t in tokens if not any(_continues(o, t) for o in tokens)]
  want = collections.Counter()
  for leaf in leaves:
    for index, s in enumerate(given_samples):
      n = len(s.tokens) - s.prompt_length
      weights = np.ones(n) if s.weights is None else s.weights
      for offset in range(n):
        path = tokens[index][: s.prompt_length + offset + 1]
        if leaf[: len(path)] == path and weights[offset]:
          want[index, offset] += weights[offset]
  row_tokens = max(map(len, tokens)) + spare
  batch = forest.merge(given_samples, row_tokens=row_tokens, loss='path')
  live = batch.weight != 0
  columns = (batch.term_sample, batch.term_offset, batch.weight)
  found = {(i, k): w for i, k, w in zip(*(c[live] for c in columns), strict=True)}
  assert found == {key: np.float32(w) for key, w in want.items()}


def _continues(other, path) -> bool:
  return len(other) > len(path) and other[: len(path)] == path


@given(samples(), st.integers(0, 6))
def test_by_bucket(given_samples, spare):
  """Rows keep all they had but padding, in as few shapes as there are sizes."""
  longest = max(len(s.tokens) for s in given_samples)
  batch = forest.merge(given_samples, row_tokens=longest + spare)
  sizes = forest.sizes(4, longest + spare + 4)
  terms = forest.sizes(8, 128, ratio=4)
  parts = forest.by_bucket(batch, sizes, terms)
  shapes = [(p.tokens.shape[1], p.weight.shape[1]) for p in parts]
  assert len(set(shapes)) == len(shapes) <= len(sizes) * len(terms)
  for part, (tokens, most) in zip(parts, shapes, strict=True):
    check_shape_of_rows(part)
    used = np.count_nonzero(part.subtree_end, axis=1)
    live = np.count_nonzero(part.weight, axis=1)
    for n in used:
      assert next(size for size in sizes if size >= n) == tokens
    for n in live:
      assert next(size for size in terms if size >= n) == most
  assert sum(p.num_tokens for p in parts) == batch.num_tokens
  found = sorted(term for part in parts for term in _live_terms(part))
  assert found == sorted(_live_terms(batch))
  check_multiplicity_of(parts, given_samples)


def _live_terms(batch):
  columns = (batch.term_sample, batch.term_offset, batch.weight, batch.advantage)
  return list(zip(*(c[batch.weight != 0] for c in columns), strict=True))


def check_multiplicity_of(parts, given_samples):
  """`check_multiplicity` over several forests."""
  counted = collections.Counter()
  for part in parts:
    for row in range(len(part.tokens)):
      for i, prefix in enumerate(prefixes(part, row)):
        counted[prefix] += int(part.multiplicity[row, i])
  want = collections.Counter(
    tuple(s.tokens[:n]) for s in given_samples for n in range(1, len(s.tokens) + 1)
  )
  assert counted == want


@given(samples())
def test_dtypes(given_samples):
  """Arrays are int32 and float32 for any dtypes of the samples."""
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


def test_sampled_record_holds():
  """The record of the sample that sampled a token holds, wherever that sample comes in
  order and in whichever row the token is repeated."""

  def record(length, value):
    return np.full((length, 1, 2), value, np.int32)

  # sorted last, yet it sampled [1, 2]; the others saw them in their prompts
  sampler = forest.Sample([1, 2, 9], 0, experts=record(3, 7))
  early = forest.Sample([1, 2, 3, 4], 2, experts=record(4, 5))
  other = forest.Sample([1, 2, 5, 6], 2, experts=record(4, 3))
  for group in ([early, other, sampler], [sampler, early, other]):
    for row_tokens in (4, 16):
      batch = forest.merge(group, row_tokens=row_tokens)
      for row in range(len(batch.tokens)):
        for i, prefix in enumerate(prefixes(batch, row)):
          want = {3: 5, 4: 5, 5: 3, 6: 3}.get(prefix[-1], 7)
          assert np.all(batch.experts[row, i] == want), (prefix, row_tokens)


def test_disagreement():
  """Counts records that another's replaces, and of them those with another set."""

  def record(*sets):
    return np.array([[s] for s in sets], np.int32)

  group = [
    forest.Sample([1, 2, 3], 0, experts=record([0, 1], [2, 3], [4, 5])),
    # position 0 agrees as a set, 1 differs
    forest.Sample([1, 2, 4], 2, experts=record([1, 0], [2, 4], [0, 1])),
    forest.Sample([1, 2, 4], 3),
    forest.Sample([8], 0, experts=record([0, 1])),
  ]
  found = forest.disagreement(group)
  assert found == (2, 1, 1) and found.rate == 0.5
  assert forest.disagreement(group[2:]) == (0, 0, 0)
  assert forest.disagreement(group[2:]).rate == 0.0


def test_sizes():
  """Ascending multiples of the least, about a ratio apart, that end at the most."""
  assert forest.sizes(512, 4096) == (512, 1024, 2048, 4096)
  assert forest.sizes(128, 1000) == (128, 256, 512, 1000)
  assert forest.sizes(128, 640, ratio=1.1) == (128, 256, 384, 512, 640)
  assert forest.sizes(7, 7) == (7,)
  for bad in ((0, 4), (8, 4)):
    with pytest.raises(ValueError, match='least'):
      forest.sizes(*bad)
  with pytest.raises(ValueError, match='ratio'):
    forest.sizes(1, 2, ratio=1.0)


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
    a, b = getattr(batch, field.name), getattr(packed, field.name)
    if field.default is None:
      assert a is b is None, field.name
    else:
      np.testing.assert_array_equal(a, b, err_msg=field.name)
      assert isinstance(a, np.ndarray) and a.dtype == b.dtype, field.name
  import jax.numpy as jnp

  assert not isinstance(forest.causal(jnp.array(tokens)).position, np.ndarray)


@pytest.mark.parametrize(
  'sample, message',
  [
    (forest.Sample([]), 'sample 1 has no tokens'),
    (forest.Sample([1] * 9), 'sample 1 has 9 tokens, more than row_tokens=8'),
    (forest.Sample([1, 2], 3), r'sample 1: prompt_length=3: must be in \[0, 2\]'),
    (forest.Sample([1, 2], -1), r'sample 1: prompt_length=-1: must be in \[0, 2\]'),
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
  with pytest.raises(ValueError, match="loss='rows': must be one of"):
    forest.merge([forest.Sample([1])], row_tokens=4, loss='rows')
  row = forest.merge([forest.Sample([1, 2, 3], 1)], row_tokens=4)
  with pytest.raises(ValueError, match='tokens of a row: 3 exceeds .* 2'):
    forest.by_bucket(row, (1, 2))
  with pytest.raises(ValueError, match='at least one document'):
    forest.chain([], row_tokens=4)
  with pytest.raises(ValueError, match='sample 0 has no tokens'):
    forest.chain([[]], row_tokens=4)
