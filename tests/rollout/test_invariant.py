"""`numerics='invariant'`: engine and learner agree to the bit, whatever was beside.

The learner's values come from its own passes over the merged forest of the responses;
no expert ids are replayed.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import uuid

import jax
import numpy as np
import pytest

from benchmarks import speculative
from m2jax import forest, model, sharding
from m2jax.rl import passes
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.rollout.tiers.config import KvPoolConfig
from m2jax.sharding import ONE_DEVICE
from m2jax.train import step as train_step
from tests.rollout import conftest as small
from tests.rollout.engine.test_engine import prompt
from tests.rollout.serving.test_scheduler import request

TIMEOUT_S = 600  # the first calls compile
BFLOAT16 = pytest.param('bfloat16', marks=pytest.mark.long)

CFG = dataclasses.replace(
  small.CFG,
  num_layers=2,
  num_mtp_modules=1,
  num_experts=6,
  experts_per_token=3,
  numerics='invariant',
)
# Pages for two sequences of a whole context, so that some are retracted.
CONFIG = dataclasses.replace(
  small.ENGINE_CONFIG,
  pages=1 + 12 + 14,
  decode_rows=(1, 2, 4),
  prefill_shapes=((1, 16), (4, 8)),
  contexts=(small.CONTEXT,),
  record_experts=True,
  draft_tokens=1,
)
STEM = prompt(3, 17)
# Prompts that share none, some or all of the stem.
PROMPTS = [
  STEM[:n] + prompt(50 + n + m, m) for n, m in ((17, 1), (17, 9), (9, 3), (0, 6))
]
PROMPTS += [STEM[:13] + prompt(7, 2), STEM]
FILL = 6, 7, 8
PROMPTS += [prompt(90 + i, 28) for i in FILL]


def weights(seed: int, cfg=CFG):
  """Of which modules and trunk predict much the same, with all of noise."""
  variables = small.init(seed, cfg)
  params = dict(variables['params'], head=variables['params']['head'] / 2)
  return speculative.agreeing(cfg, {**variables, 'params': params}, 0.3)


class Watched:
  """An engine that notes the rows of its decode calls."""

  def __init__(self, engine):
    self._engine, self.rows = engine, set()

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def generate_many(self, params, state, rows, *rest):
    self.rows.add(len(rows))
    return self._engine.generate_many(params, state, rows, *rest)

  def speculate(self, params, state, drafts, rows, *rest):
    self.rows.add(len(rows))
    return self._engine.speculate(params, state, drafts, rows, *rest)


@dataclasses.dataclass
class Served:
  """What an engine has answered, by its policy version, and how.

  Attributes:
    results: (prompt, result) of each response of one version.
    stats: the schedulers', with drafts and a pool, with a pool, and with neither.
    rows: batch sizes of decode calls.
  """

  results: dict[int, list]
  stats: list[dict]
  rows: set[int]


def ask(scheduler, variables) -> list:
  """(prompt, result) of requests together and alone, before and after a swap to these
  weights in flight."""
  swapped, answered = threading.Event(), []

  def swap(_):
    if not swapped.is_set():
      swapped.set()
      scheduler.update_weights(variables, 1)

  def submit(i, most=14, *then):
    return i, scheduler.submit(request(PROMPTS[i], max_tokens=most, seed=i), *then)

  def finish(*handles):
    answered.extend((PROMPTS[i], h.future.result(TIMEOUT_S)) for i, h in handles)

  # More than there are pages for, together.
  before_the_first_step = [submit(i) for i in (*FILL, *range(FILL[0]))]
  scheduler.start(warmup=False)
  finish(*before_the_first_step)
  for i in (0, *FILL, 0):  # those between take all pages
    finish(submit(i, 8))
  finish(*[submit(i, 14, swap) for i in (2, 0, 3)])
  for i in (1, 0, 4, 3, 5, 1, 2):
    finish(submit(i, 11))
  finish(submit(0), submit(4))
  scheduler.stop()
  return answered


def serve(cfg) -> Served:
  """With drafts; without, by the pages of a pool; looking ahead, without any tiers."""
  engine = Watched(Engine(cfg, CONFIG))
  pool = KvPoolConfig(f'memory://{uuid.uuid4()}/', bytes=1 << 24, wait_s=TIMEOUT_S)
  tiers = dict(host_cache_bytes=1 << 20, kv_pool=pool)
  out = Served({0: [], 1: []}, [], engine.rows)
  for how in (dict(draft_tokens=1, **tiers), dict(draft_tokens=0, **tiers), {}):
    config = SchedulerConfig(**{'decode_steps': 4, 'draft_tokens': 0} | how)
    scheduler = Scheduler(engine, weights(0, cfg), config=config)
    try:
      answered = ask(scheduler, weights(1, cfg))
    finally:
      scheduler.stop()
    out.stats.append(scheduler.stats())
    for asked, result in answered:
      versions = set(result.versions.tolist())
      if len(versions) == 1:
        out.results[versions.pop()].append((asked, result))
  return out


@functools.cache
def served(dtype: str) -> Served:
  return serve(dataclasses.replace(CFG, dtype=dtype))


def learned(cfg, variables, samples, row_tokens):
  """The learner's log-probabilities and the engine's, of all terms in rows, and in a
  tree by chunks."""
  config = train_step.StepConfig(micro_rows=1)
  learner = passes.Passes(cfg, config, ONE_DEVICE, read=('old_logprob', 'weight'))
  variables = model.without_modules(cfg, variables)[1]
  rows = forest.merge(samples, row_tokens=row_tokens)
  yield learner.of_rows(variables, rows)
  tree = forest.merge(samples, rows=1)
  plan = forest.cut(tree, forest.Buckets((24,), (48,), terms_per_token=8))
  assert {chunk.kind for chunk in plan} >= {'push', 'leaf'}
  yield learner.of_tree(variables, plan)


@pytest.mark.parametrize(
  'dtype', [pytest.param('float32', marks=pytest.mark.smoke), BFLOAT16]
)
def test_the_learner_has_the_engines_log_probabilities(dtype):
  """Difference 0: in rows of a forest and in chunks of it, with other weights after a
  swap in flight; and everything that could make a difference has occurred."""
  cfg, found = dataclasses.replace(CFG, dtype=dtype), served(dtype)
  drafting, pooled, alone = found.stats
  for stats in found.stats:
    assert stats['prefix_hit_tokens'] > 0 < stats['retractions']
    assert stats['weight_updates'] == 1
  assert drafting['host_hit_tokens'] > 0 < pooled['pool_hit_tokens']
  assert drafting['drafted_tokens'] > drafting['accepted_tokens'] > 0
  assert alone['ahead_calls'] > 0
  assert len(found.rows) >= 3
  for version, results in found.results.items():
    samples = [
      forest.Sample(np.int32([*p, *r.tokens]), len(p), old_logprobs=r.logprobs)
      for p, r in results
    ]
    assert len(samples) > 8
    for scores in learned(cfg, weights(version, cfg), samples, row_tokens=70):
      live = scores['weight'] != 0
      assert live.sum() > 80
      got, want = scores['logprob'][live], scores['old_logprob'][live]
      assert np.ptp(want) > 1
      np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize('dtype', ['float32', BFLOAT16])
def test_the_learner_has_the_engines_experts(dtype):
  """Of each token, prompts included, in the order of their scores."""
  cfg, found = dataclasses.replace(CFG, dtype=dtype), served(dtype)
  forward = jax.jit(functools.partial(model.forward, cfg))
  results = found.results[1]
  samples = [forest.Sample(np.int32([*p, *r.tokens]), len(p)) for p, r in results]
  rows = forest.merge(samples, row_tokens=70)
  ids = np.asarray(forward(weights(1, cfg), rows).experts)
  paths, of_token = {}, {}
  for at in zip(*np.nonzero(rows.subtree_end), strict=True):
    parent = (at[0], rows.parent[at])
    paths[at] = (*paths.get(parent, ()), int(rows.tokens[at]))
    of_token[paths[at]] = ids[at]
  for sample, (_, result) in zip(samples, results, strict=True):
    for i in range(len(sample.tokens) - 1):  # the last one was not consumed
      path = tuple(sample.tokens[: i + 1].tolist())
      np.testing.assert_array_equal(of_token[path], result.experts[i])


@pytest.mark.parametrize('dtype', ['float32', BFLOAT16])
def test_the_engine_agrees_with_itself(dtype):
  """Requests with the same seed have the same tokens and log-probabilities: with drafts
  and without, alone and with others, from the start and after a retraction."""
  found = served(dtype)
  for results in found.results.values():
    first = {}
    for asked, result in results:
      tokens, logprobs = first.setdefault(
        tuple(asked), (result.tokens, result.logprobs)
      )
      n = min(len(tokens), len(result.tokens))
      np.testing.assert_array_equal(tokens[:n], result.tokens[:n])
      np.testing.assert_array_equal(logprobs[:n], result.logprobs[:n])
    assert len(first) < len(results) / 2


@pytest.mark.parametrize(
  'mesh',
  [
    dict(data=2, expert=2),
    pytest.param(dict(fsdp=2), marks=pytest.mark.long),
    pytest.param(dict(context=2), marks=pytest.mark.long),
  ],
)
def test_devices_that_split_rows_tokens_or_experts(mesh):
  """The learner's log-probabilities and experts are those of one device."""
  cfg, variables = model.without_modules(CFG, weights(0))
  samples = [forest.Sample(np.int32(p), 4) for p in PROMPTS if len(p) > 4]
  batch = forest.merge(samples, row_tokens=64, rows=4)
  one, many = (
    jax.jit(functools.partial(model.forward, cfg, sharding=on))(variables, batch)
    for on in (ONE_DEVICE, sharding.make(sharding.MeshConfig(**mesh)))
  )
  np.testing.assert_array_equal(many.logprob, one.logprob)
  np.testing.assert_array_equal(many.experts, one.experts)
  assert np.ptp(one.logprob) > 1
