"""Law 3 for trees larger than a chunk: push and pop give the samples' own gradient."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax import forest
from m2jax.rl import packing
from m2jax.train import chunks, feeds
from m2jax.train import step as train_step
from tests.model import test_forest_equivalence as rows

BUCKETS = forest.Buckets((6,), (16,), terms_per_token=12)
SMALL = forest.Buckets((6,), (8,), 12)
STEP = train_step.StepConfig(mtp_weight=rows.MTP_WEIGHT)


@functools.cache
def programs(cfg, step=STEP):
  return chunks.programs(cfg, rows.objective, step)


def check(samples, variables, cfg, tolerance, replay=True, buckets=BUCKETS):
  """Chunked sums against the samples one by one, in row form."""
  samples = rows.recorded(variables, samples, cfg, replay)
  plan = forest.cut(forest.merge(samples), buckets)
  grads, metrics, loads = chunks.gradients(programs(cfg), variables, plan)
  want, want_grads, counted = rows.by_rows(variables, samples, cfg)
  loss = metrics['loss'] + rows.MTP_WEIGHT * metrics['mtp_loss']
  assert abs(loss - want) <= tolerance * abs(want)
  for (path, leaf), other in zip(
    jax.tree.leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
  ):
    assert rows.relative(leaf, other) <= tolerance, path
  for name, load in loads.items():
    np.testing.assert_array_equal(load, counted[name])
  return plan


@pytest.mark.long
@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1), st.integers(2, 14), st.booleans())
def test_float64(seed, count, replay):
  """Random trees, with MoE, three MTP modules, with and without replay: loss, gradient
  and expert loads are those of the samples alone, to 1e-10."""
  with jax.enable_x64():
    cfg = rows.config('float64', num_mtp_modules=3)
    rng = np.random.default_rng(seed)
    samples = rows.random_samples(rng, count=count, vocab=cfg.vocab_size)
    variables = rows.variables_for(cfg, 0)
    check(samples, variables, cfg, 1e-10, replay)


def test_a_path_that_fills_the_stack():
  """The last run of a path of P tokens is padded beyond the stack, which has no slots
  for padding: what is there already must stay."""
  with jax.enable_x64():
    cfg = rows.config('float64', num_mtp_modules=1)
    rng = np.random.default_rng(1)
    path = rng.integers(1, cfg.vocab_size, 8)
    samples = []
    for _ in range(2):
      tokens = np.concatenate([path, rng.integers(1, cfg.vocab_size, 3)])
      logprobs, advantages, weights = rng.random((3, len(tokens) - 2), np.float32)
      samples.append(
        forest.Sample(tokens.astype(np.int32), 2, logprobs, advantages, weights)
      )
    plan = check(samples, rows.variables_for(cfg, 0), cfg, 1e-10, buckets=SMALL)
    runs = [(c.start, c.shape[1]) for c in plan if c.kind == 'push']
    assert plan.longest_path == 8 and runs == [(0, 6), (6, 6)]


@pytest.mark.thorough
def test_float32():
  """In fp32 with recorded ids the relative error stays below 1e-5. The plan has all
  there is: a second run of a path, pieces at two points of one, a tree on its own."""
  cfg = rows.config('float32', num_mtp_modules=3)
  samples = rows.random_samples(np.random.default_rng(6), count=12, vocab=23)
  variables = rows.variables_for(cfg, 5)
  plan = list(check(samples, variables, cfg, 1e-5))
  assert {chunk.shape[:3] for chunk in plan} == {
    ('push', 6, 16),
    ('pop', 6, 16),
    ('leaf', 6, 16),
    ('leaf', 6, 0),
  }
  assert any(chunk.kind == 'push' and chunk.start > 0 for chunk in plan)
  slots = [c.batch.parent[0] for c in plan if c.kind == 'leaf' and c.shape[2]]
  assert any(len(set(p[(p >= 0) & (p < 16)])) > 1 for p in slots)


@pytest.mark.long
def test_as_one_row():
  """Everything a step reads, metrics of the objective included, is the whole tree's,
  with the MTP loss detached, and drafts compared with the trunk, too."""
  with jax.enable_x64():
    drafts = dict(draft_weight=0.5, draft_top_k=4)
    step = dataclasses.replace(STEP, detach_mtp=True, **drafts)
    cfg = rows.config('float64', num_layers=1, num_mtp_modules=1)
    samples = rows.random_samples(np.random.default_rng(3), count=9, vocab=23)
    variables = rows.variables_for(cfg, 3)
    tree = forest.merge(samples)
    optimizer = optax.sgd(0.1)
    in_chunks = chunks.feed(cfg, rows.objective)
    cut = packing.Batch(rows=None, plan=forest.cut(tree, BUCKETS), chunked=1)
    got, want = (
      train_step.make_step(cfg, optimizer, rows.objective, step, feed=feed)(
        train_step.init_state(jax.tree.map(jnp.copy, variables), optimizer), batch
      )
      for feed, batch in ((in_chunks, cut), (feeds.rows, tree))
    )
    assert got[1].keys() == want[1].keys()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_windows():
  """Layers with a sliding window and sinks see the right part of the path."""
  with jax.enable_x64():
    changes = dict(window=3, full_attention_every=2, sinks=1)
    cfg = rows.config('float64', num_mtp_modules=3, **changes)
    samples = rows.random_samples(np.random.default_rng(7), count=9, vocab=23)
    check(samples, rows.variables_for(cfg, 7), cfg, 1e-10)


@pytest.mark.thorough
def test_cotangents_matter():
  """The comparison can fail: without the cotangents that descendants leave, which is
  caching the prefix without its gradient, the gradient is far off."""
  cfg = rows.config('float32', num_layers=1, num_mtp_modules=1)
  parts = programs(cfg)

  def forgetful(variables, sums, stack, cotangents, batch):
    sums, cotangents = parts.leaf(variables, sums, stack, cotangents, batch)
    return sums, jax.tree.map(jnp.zeros_like, cotangents)

  samples = rows.random_samples(np.random.default_rng(5), count=12, vocab=23)
  variables = rows.variables_for(cfg, 5)
  plan = forest.cut(forest.merge(rows.recorded(variables, samples, cfg)), BUCKETS)
  want = chunks.gradients(parts, variables, plan)[0]
  got = chunks.gradients(parts._replace(leaf=forgetful), variables, plan)[0]
  assert max(jax.tree.leaves(jax.tree.map(rows.relative, got, want))) > 1e-2


def test_memory_and_compilations():
  """Live bytes do not grow with the number of leaves; programs are compiled once a
  shape, and no more of them than the buckets allow."""
  with jax.enable_x64():
    cfg = rows.config('float64', num_mtp_modules=1)
    variables = rows.variables_for(cfg, 1)
    rng = np.random.default_rng(0)
    stem = rng.integers(1, 23, 7)
    parts = programs(cfg)
    peaks, compiled = [], []
    for leaves in (3, 24, 5):
      samples = [
        forest.Sample(
          np.concatenate([stem, rng.integers(1, 23, 6)]),
          7,
          experts=np.full((13, cfg.num_layers, cfg.experts_per_token), -1, np.int32),
        )
        for _ in range(leaves)
      ]
      plan = forest.cut(forest.merge(samples), SMALL)
      before = live_bytes()
      seen = []

      def leaf(*args, seen=seen):
        out = parts.leaf(*args)
        seen.append(live_bytes())
        return out

      chunks.gradients(parts._replace(leaf=leaf), variables, plan)
      assert len(seen) >= leaves / 2
      peaks.append(max(seen) - before)
      compiled.append(sum(p._cache_size() for p in (parts.push, parts.leaf, parts.pop)))
    assert peaks[0] == peaks[1] == peaks[2]
    assert compiled[0] == compiled[1] == compiled[2] <= SMALL.max_programs()


def live_bytes() -> int:
  return sum(a.nbytes for a in jax.live_arrays())
