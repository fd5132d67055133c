"""Which groups go in rows and which in chunks; that no sample is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax import forest
from m2jax.rl import packing

SIZES = dict(row_tokens=12, row_terms=12, buckets=forest.Buckets((6,), (16,)))


def group(*tokens, prompt_length=1):
  return [forest.Sample(np.array(t), prompt_length) for t in tokens]


def star(stem, leaves, leaf=2):
  """Answers of `leaf` tokens to one prompt."""
  return group(*([1] * stem + [2 + i] * leaf for i in range(leaves)))


@pytest.mark.parametrize(
  'samples, chunked',
  [
    (star(4, 3), False),  # fits a row
    (star(2, 7), False),  # two rows repeat 2 tokens: four chunks would be more
    (star(9, 8), True),  # eight rows would repeat the stem, one each
    (group([1] * 14), True),  # longer than a row
  ],
)
def test_the_cheaper_way(samples, chunked):
  """A tree that fits no row is trained in rows or chunks, whichever costs less: for a
  small excess chunks would run twice the tokens."""
  batch = packing.pack([samples, star(1, 1)], **SIZES)
  assert batch.chunked == int(chunked)
  assert (batch.plan is not None) == chunked
  assert batch.rows is not None


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_every_term_once(seed):
  """For every assignment of groups, each loss term and each unit of multiplicity is in
  the update exactly once, which the sums of weights by token id show."""
  rng = np.random.default_rng(seed)
  groups = []
  for _ in range(rng.integers(1, 5)):
    stem = rng.integers(1, 9, rng.integers(1, 9))
    samples = []
    for _ in range(rng.integers(1, 6)):
      tokens = np.concatenate([stem, rng.integers(1, 9, rng.integers(1, 7))])
      weights = rng.random(len(tokens) - len(stem)).astype(np.float32)
      samples.append(forest.Sample(tokens, len(stem), weights=weights))
    groups.append(samples)
  batch = packing.pack(groups, **SIZES)
  weight, through = np.zeros(9), 0
  parts = [batch.rows] if batch.rows is not None else []
  parts += [c.batch for c in batch.plan or () if c.kind != 'push']
  for part in parts:
    ids = np.take_along_axis(part.tokens, part.term_token, axis=1)
    np.add.at(weight, ids, part.weight)
    through += part.multiplicity.sum()
  want = np.zeros(9)
  for s in (s for g in groups for s in g):
    np.add.at(want, s.tokens[s.prompt_length :], s.weights)
  np.testing.assert_allclose(weight, want, rtol=1e-6)
  assert through == sum(len(s.tokens) for g in groups for s in g)


@pytest.mark.parametrize('hosts', [1, 2, 4])
def test_hosts_have_the_micro_batches_side_by_side(hosts):
  """Host by host each micro-batch is that of one host, the last one's padding included;
  the plan is everyone's."""
  # of different prompts, which otherwise would be merged
  groups = [star(9, 8), *(group([10 + i] * 5 + [2] * 4) for i in range(5))]
  batch = packing.pack(groups, **SIZES)
  number, micro_rows = len(batch.rows.tokens), 4
  assert number % micro_rows and number > micro_rows and batch.plan is not None
  parts = packing.parts(batch, micro_rows, hosts)
  assert all(part.plan is batch.plan for part in parts)
  share = micro_rows // hosts
  for micro in range(-(-number // micro_rows)):
    rows = slice(micro * micro_rows, (micro + 1) * micro_rows)
    want = forest.select(batch.rows, rows, rows=micro_rows)
    mine = slice(micro * share, (micro + 1) * share)
    got = [forest.select(part.rows, mine, rows=share) for part in parts]
    for name in forest.TOKEN_FIELDS + forest.TERM_FIELDS:
      if getattr(batch.rows, name) is not None:
        side_by_side = np.concatenate([getattr(one, name) for one in got])
        np.testing.assert_array_equal(side_by_side, getattr(want, name))


def test_hosts_without_rows():
  """A batch of chunks only, and an empty one."""
  batch = packing.pack([star(9, 8)], **SIZES)
  for whole in (batch, packing.Batch(None, None, 0)):
    assert whole.rows is None
    assert packing.parts(whole, 4, 2) == [whole, whole]
