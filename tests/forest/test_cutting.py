"""Cutting trees into chunks: every token once, and it sees just its path."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import forest
from tests.forest.test_forest import path_to, samples


def walk(tree, plan):
  """Runs the plan over token ids in place of keys and checks what each token sees.

  Returns how often each token was trained, and its terms.
  """
  size = plan.buckets.chunk_tokens[-1]
  slots = np.full(plan.buckets.stack_tokens[-1] + size, -1)
  depth = 0
  owner = {tuple(path_ids(tree, i)): i for i in range(tree.num_tokens)}
  trained, terms = collections.Counter(), []
  for chunk in plan:
    batch = chunk.batch
    kind, tokens, stack, _ = chunk.shape
    assert batch.tokens.shape == (1, tokens) and chunk.length <= tokens
    ends = batch.subtree_end[0]
    assert not np.any(ends[stack + chunk.length :])
    ids = []  # of the chunk's tokens, found by their paths
    for i in range(chunk.length):
      q = stack + i
      seen = [j for j in range(stack + tokens) if j <= q < ends[j]]
      above = [int(slots[j]) for j in seen if j < stack]
      inside = [j - stack for j in seen if j >= stack]
      assert inside[-1] == i
      path = [*above, *(ids[j] for j in inside[:-1])]
      letters = [int(tree.tokens[0, t]) for t in path] + [int(batch.tokens[0, i])]
      ids.append(owner[tuple(letters)])
      assert path + ids[-1:] == path_to(tree, 0, ids[-1])
      assert batch.position[0, i] == len(path)
      assert batch.multiplicity[0, i] == tree.multiplicity[0, ids[-1]]
      parent = int(batch.parent[0, i])
      if path:
        where = int(slots[parent]) if parent < stack else ids[parent - stack]
        assert where == path[-1]
      else:
        assert parent == -1
    if kind == 'push':
      assert chunk.start == depth
      slots[depth : depth + chunk.length] = ids
      depth += chunk.length
      assert not np.any(batch.weight)
      continue
    if kind == 'pop':
      assert chunk.start == depth - chunk.length
      assert slots[chunk.start : depth].tolist() == ids
      depth = chunk.start
      slots[depth:] = -1
    trained.update(ids)
    for slot in np.flatnonzero(batch.weight[0]):
      token = ids[batch.term_token[0, slot]]
      names = ('term_sample', 'term_offset', 'weight', 'advantage', 'old_logprob')
      terms.append((token, *(getattr(batch, n)[0, slot] for n in names)))
  assert depth == 0
  return trained, terms


def path_ids(tree, i):
  return [int(t) for t in tree.tokens[0, path_to(tree, 0, i)]]


@given(
  samples(most=16),
  st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True),
  st.lists(st.integers(1, 8), min_size=0, max_size=2, unique=True),
)
def test_cut(given_samples, chunk_tokens, stack_tokens):
  """Whatever the tree and the sizes: each token and each term is trained once, sees
  exactly its ancestors, and shapes stay within the bound."""
  tree = forest.merge(given_samples)
  sizes = tuple(sorted({*stack_tokens, 9}))
  buckets = forest.Buckets(tuple(sorted(chunk_tokens)), sizes)
  plan = forest.cut(tree, buckets)
  trained, terms = walk(tree, plan)
  assert trained == collections.Counter(range(tree.num_tokens))
  live = tree.weight[0] != 0
  names = ('term_token', 'term_sample', 'term_offset', 'weight', 'advantage')
  columns = [getattr(tree, n)[0][live] for n in (*names, 'old_logprob')]
  assert sorted(terms) == sorted(zip(*columns, strict=True))
  pushed = sum(c.length for c in plan if c.kind == 'push')
  assert (
    pushed
    == plan.trunk_tokens
    == plan.tokens - sum(c.length for c in plan if c.kind == 'leaf')
  )
  shapes = {c.shape for c in plan}
  assert len(shapes) <= buckets.max_programs(max(s[3] for s in shapes))
  assert len(plan) == len(list(plan))


@given(samples(most=16), st.integers(1, 12))
def test_chunks_are_full(given_samples, size):
  """Leaf chunks are packed: no two of one path could have been one."""
  tree = forest.merge(given_samples)
  plan = forest.cut(tree, forest.Buckets((size,), (9,)))
  lengths = [c.length for c in plan if c.kind == 'leaf']
  if tree.num_tokens <= size:
    assert lengths == [tree.num_tokens] and len(plan) == 1
  # at most twice the chunks that the tokens need, and one for each end of the core
  bottoms = sum(
    a.kind == 'push' and b.kind == 'leaf'
    for a, b in zip(plan, list(plan)[1:], strict=False)
  )
  assert len(lengths) <= 2 * sum(lengths) / size + bottoms + 1


def test_experts_and_terms_room():
  """Recorded ids follow their tokens; a chunk with many terms gets a larger shape."""
  ids = np.arange(2 * 3 * 2, dtype=np.int32).reshape(6, 1, 2)
  path = [1, 2, 3, 4, 5, 6]
  given_samples = [forest.Sample(path, 0, experts=ids) for _ in range(5)]
  tree = forest.merge(given_samples)
  plan = forest.cut(tree, forest.Buckets((2,), (8,)))
  for chunk in plan:
    position = chunk.batch.position[0, : chunk.length]
    np.testing.assert_array_equal(chunk.batch.experts[0, : chunk.length], ids[position])
    assert chunk.shape[3] == (1 if chunk.kind == 'push' else 16)
  roomy = dataclasses.replace(plan.buckets, terms_per_token=8)
  assert {c.shape[3] for c in forest.cut(tree, roomy)} == {1, 16}


def test_memory_is_one_path():
  """The stack holds one path, however many leaves hang off it."""
  stem = np.arange(1, 21)
  for leaves in (4, 64):
    given_samples = [
      forest.Sample(np.concatenate([stem, np.full(8, 30 + i)]), 20)
      for i in range(leaves)
    ]
    plan = forest.cut(forest.merge(given_samples), forest.Buckets((8,), (32,)))
    assert plan.longest_path == plan.trunk_tokens == 20
    assert len(plan) == 3 + leaves + 3


def test_errors():
  """What cannot be cut says what to change."""
  tree = forest.merge([forest.Sample(np.arange(1, 12), 1)])
  with pytest.raises(ValueError, match='stack_tokens: a path: 9 exceeds .* 4'):
    forest.cut(tree, forest.Buckets((2,), (4,)))
  rows = forest.merge([forest.Sample([1, 2]), forest.Sample([3, 4])], row_tokens=2)
  with pytest.raises(ValueError, match='has 2 rows, not 1'):
    forest.cut(rows, forest.Buckets((2,), (4,)))
  for bad in (((), (4,)), ((2,), (4, 4)), ((0,), (4,))):
    with pytest.raises(ValueError, match='ascending sizes'):
      forest.Buckets(*bad)
  with pytest.raises(ValueError, match='terms_per_token=0'):
    forest.Buckets((2,), (4,), 0)
