"""The prefix-tree table: its workloads are what they are called, its rows hold all."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from benchmarks import prefix_tree, prefix_tree_rows, prefix_tree_workloads
from m2jax import forest, records
from m2jax.pool.data_pool import DataPool
from tests import processes
from tests.pool.test_data_pool import completion, trajectory

VOCAB = 1 << 30  # so large that nothing is shared by chance


def flat(trajectories):
  return [sample for trajectory in trajectories for sample in trajectory]


@pytest.mark.parametrize(
  'name, samples, tokens, tree',
  [
    ('star', 64, 64 * 4224, 4096 + 64 * 128),
    ('verl A', 4, 12_800, 6400),
    # published: depth 16, 512 leaves, about 69 % of the tokens saved
    ('verl B', 512, 512 * 16 * 16, (4 + 510 + 4 * 512) * 16),
    ('tau2', 16, 86_400, 9120),
    ('terminal', 91, 786_240, 12_240),
  ],
)
def test_workloads(name, samples, tokens, tree):
  """Counts worked out by hand from the descriptions."""
  found = flat(prefix_tree_workloads.make(name, VOCAB))
  assert len(found) == samples
  assert sum(len(s.tokens) for s in found) == tokens
  merged = forest.merge(found)
  assert merged.num_tokens == tree
  if name == 'verl B':
    assert 1 - tree / tokens == pytest.approx(0.69, abs=0.005)
  assert len(merged.weight[0]) == sum(len(s.tokens) - s.prompt_length for s in found)


def test_thinking_is_stripped():
  """In the caterpillar a completion continues the one before within a user turn only,
  and what comes after has its action without its thinking."""
  (trajectory,) = prefix_tree_workloads.make('swe', VOCAB)
  for i, (a, b) in enumerate(zip(trajectory, trajectory[1:], strict=False), start=1):
    continues = np.array_equal(b.tokens[: len(a.tokens)], a.tokens)
    assert continues == (i % 6 != 0)
    if not continues:
      action, later = a.tokens[-40:].tolist(), b.tokens[: b.prompt_length].tolist()
      assert action[0] in later and a.tokens[-120] not in later
      assert later[later.index(action[0]) :][:40] == action


def test_recorded(tmp_path):
  """Groups that were trained on, in the run's order, with completions by turn."""
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    for item in range(3):
      pool.submit(records.WorkItem(item, 'a task', 2))
      for rank in range(2):
        key, answer = f's{item}.{rank}', (10 + item, rank)
        pool.add_completion(completion(key, 1, prompt_ids=(1, *answer, 9)))
        pool.add_completion(completion(key, 0, prompt_ids=(1,), response_ids=answer))
        pool.add_trajectory(trajectory(key, item, rank))
      pool.complete(item)
    pool.take([2, 0], step=1)
  found = prefix_tree_workloads.recorded(tmp_path, 2)
  assert [[s.tokens.tolist() for s in turns] for turns in found] == [
    [[1, 10 + item, rank], [1, 10 + item, rank, 9, 4, 5]]
    for item in (0, 2)
    for rank in range(2)
  ]
  assert [s.prompt_length for s in found[0]] == [1, 4]
  with pytest.raises(ValueError, match='2 groups .* fewer than --groups=3'):
    prefix_tree_workloads.recorded(tmp_path, 3)


def settings(**changes):
  return argparse.Namespace(**{'batch_tokens': 256, 'row_tokens': 512, **changes})


@pytest.mark.parametrize('name', prefix_tree_workloads.WORKLOADS)
def test_rows(name, monkeypatch):
  """Every kind of rows trains every term of every completion once; (d) has the tree's
  tokens; counted operations are those of the rows."""
  monkeypatch.setattr(
    prefix_tree_rows, 'with_experts', lambda samples, tree, cfg: samples
  )
  cfg = prefix_tree_rows.small('float32')
  trajectories = prefix_tree_workloads.make(name, cfg.vocab_size, scale=0.04)
  samples = flat(trajectories)
  want = sorted(
    (i, k)
    for i, s in enumerate(samples)
    for k in range(len(s.tokens) - s.prompt_length)
  )
  kinds = {k.name: k for k in prefix_tree_rows.kinds(trajectories, cfg, settings())}
  tree = forest.merge(samples)
  for kind in kinds.values():
    terms, sizes = [], 0
    for batch, counted in zip(kind.batches, kind.operations, strict=True):
      parts = [batch]
      if isinstance(batch, forest.Plan):
        parts = [c.batch for c in batch if c.kind != 'push']
      for part in parts:
        live = part.weight != 0
        columns = part.term_sample[live], part.term_offset[live]
        terms += zip(*(c.tolist() for c in columns), strict=True)
      if not isinstance(batch, forest.Plan):
        seen = batch.position[batch.subtree_end > 0] + 1
        assert (counted.tokens, counted.pairs) == (len(seen), seen.sum())
      sizes += counted.tokens
    assert sorted(terms) == want
    assert sizes == kind.tokens
  assert kinds['a'].tokens == sum(len(s.tokens) for s in samples)
  assert kinds['d'].tokens == kinds['e'].tokens == tree.num_tokens
  assert kinds['d'].tokens <= kinds['b'].tokens <= kinds['a'].tokens
  assert kinds['d'].tokens <= kinds['c'].tokens <= kinds['a'].tokens
  again = kinds['e'].operations[0]
  assert kinds['e'].total(cfg) > kinds['d'].total(cfg) or not again.again_tokens


def test_operations():
  """Counted operations of a plain case, worked out by hand."""
  cfg = prefix_tree_rows.small('float32')
  layer = 256 * (2 * 256 + 2 * 64) + 256 * 32 + 4 * 3 * 256 * 128
  token = 4 * layer + 256 * 512
  assert prefix_tree_rows.Operations(10, 0).flops(cfg) == 2 * 3 * 10 * token
  # two products of 256 a pair and layer; five more of them backward
  assert prefix_tree_rows.Operations(0, 10).flops(cfg) == 2 * 10 * 4 * 256 * 7
  assert prefix_tree_rows.Operations(0, 0, 10, 0).flops(cfg) == 2 * 10 * token


@pytest.mark.thorough
def test_table():
  """The command runs, all kinds give (a)'s loss and gradient, and a row has every
  column of the table."""
  flags = '--json --scale=0.03 --workloads terminal --rounds=1 --limit_s=1000'.split()
  done = processes.run('benchmarks.prefix_tree', *flags, timeout_s=1200)
  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads(done.stdout)['rows']
  assert [r['rows'] for r in found] == list('abcdef')
  for row in found:
    assert set(prefix_tree.COLUMNS) <= set(row)
    assert row['seconds'] > 0 and row['memory_bytes'] > 0 and row['programs'] > 0
    assert row['d_loss'] < 1e-6 and row['d_grad'] < 1e-5
