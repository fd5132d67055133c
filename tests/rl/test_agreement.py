"""The learner's log-probabilities are the engine's, for every token that is trained."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax import forest, model, records
from m2jax.rl import agreement, learner, rewards, samples
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.train import step as train_step
from tests.rollout import conftest as small

TIMEOUT_S = 60
BOUND = agreement.BOUND
CFG = dataclasses.replace(small.CFG, unroll_layers=False)
# So few pages that sequences are retracted.
ENGINE = dataclasses.replace(
  small.ENGINE_CONFIG,
  pages=1 + 12 + 6,
  record_experts=True,
  decode_rows=(4,),
  prefill_shapes=((4, 8),),
  contexts=(small.CONTEXT,),
)
ROW_TOKENS = 96


def complete(scheduler, session, turn, prompt, seed, on_tokens=None, **how):
  sampling = SamplingParams(**{'max_tokens': 12, 'seed': seed} | how)
  handle = scheduler.submit(GenerateRequest(prompt, sampling), on_tokens)

  def record():
    result = handle.future.result(TIMEOUT_S)
    return records.Completion(
      id=f'{session}/{turn}',
      session=session,
      turn=turn,
      parent=f'{session}/{turn - 1}' if turn else None,
      fork_reason=None,
      prompt_ids=prompt,
      response_ids=result.tokens,
      logprobs=result.logprobs,
      versions=result.versions,
      finish_reason=result.finish_reason,
      status='ok',
      experts=result.experts,
    )

  return record


def rollouts(scheduler, item: int):
  """A group of six trajectories of two turns, all at once on four slots; the second
  turn continues the first, as a session of the gateway does."""
  stem = np.random.default_rng(item).integers(1, CFG.vocab_size, 11)
  asked = [complete(scheduler, f'{item}-{i}', 0, stem, 10 * item + i) for i in range(6)]
  first = [record() for record in asked]
  asked = [
    complete(
      scheduler, c.session, 1, np.concatenate([c.tokens, [3, i % 2]]), 90 + item + i
    )
    for i, c in enumerate(first)
  ]
  second = [record() for record in asked]
  return [
    (
      records.Trajectory(a.session, item, i, 't', 'f', 'answer', float(i % 2), 1.0, 0),
      (a, b),
    )
    for i, (a, b) in enumerate(zip(first, second, strict=True))
  ]


@pytest.fixture(scope='module')
def weights():
  return small.init(0, CFG)


@pytest.fixture(scope='module')
def groups(weights):
  """Two groups, and a third after the weights were replaced by version 1."""
  scheduler = Scheduler(Engine(CFG, ENGINE), weights, config=SchedulerConfig(4))
  scheduler.start(warmup=False)
  try:
    found = [rollouts(scheduler, item) for item in range(2)]
    scheduler.update_weights(small.init(1, CFG), 1)
    found.append(rollouts(scheduler, 2))
    stats = scheduler.stats()
  finally:
    scheduler.stop()
  assert stats['retractions'] > 0 and stats['prefix_hit_tokens'] > 100
  return found


def sampled(groups):
  return [c for group in groups for _, turns in group for c in turns]


@jax.jit
def forward(variables, batch):
  return model.forward(CFG, variables, batch).logprob


def gaps(variables, batch: list[forest.Sample], *, replay: bool) -> np.ndarray:
  """|Δ log-probability| of every sampled token, by a forward pass over merged trees."""
  if not replay:
    batch = [dataclasses.replace(s, experts=None) for s in batch]
  merged = forest.merge(batch, row_tokens=ROW_TOKENS)
  assert merged.num_tokens < 0.8 * sum(len(s.tokens) for s in batch)
  out = forward(variables, merged)
  logprob = np.asarray(train_step.at_terms(out, merged))
  live = merged.weight != 0
  return np.abs(logprob - merged.old_logprob)[live]


@pytest.mark.parametrize('replay', [True, False])
def test_every_token_agrees(weights, groups, replay):
  """Sampled from pages, after prefix hits and retractions, in whatever batch; scored in
  rows of merged trees: within 1e-4, with the recorded experts and with the learner's
  own."""
  batch = [
    forest.Sample(c.tokens, len(c.prompt_ids), c.logprobs, experts=c.experts)
    for c in sampled(groups[:2])
  ]
  found = gaps(weights, batch, replay=replay)
  assert len(found) == sum(len(c.response_ids) for c in sampled(groups[:2])) > 200
  assert found.max() <= BOUND
  other = jax.tree.map(lambda x: x * 1.001, weights)
  assert gaps(other, batch, replay=replay).max() > 10 * BOUND


def test_metrics_of_an_update(weights, groups):
  """The update reports the largest difference and the mean over exactly the tokens that
  its own weights have sampled; those of other versions do not count, whatever they are.
  Its router chooses what the engine's did; with other biases it would not."""
  config = learner.LearnerConfig(
    row_tokens=ROW_TOKENS, row_terms=128, step=train_step.StepConfig(micro_rows=1)
  )

  def state(variables):
    return train_step.init_state(jax.tree.map(jnp.copy, variables), optax.sgd(0.0))

  one = learner.Learner(CFG, config, optax.sgd(0.0), state(weights))

  def update(variables, groups):
    one.state = state(variables)
    return one.update([one.credit(group) for group in groups])

  found = update(weights, groups)
  tokens = sum(len(c.response_ids) for c in sampled(groups[:2]))
  assert found['mismatch/tokens'] == tokens
  assert 0 < found['mismatch/mean'] < found['mismatch/max'] <= BOUND
  assert found['policy/lag_max'] == 1 and found['abs_log_ratio'] > 0.1
  assert found['replay/rerouted'] > 0  # of the third group, whose router was another
  assert not any(name.startswith('agreement') for name in found)
  assert update(weights, groups[:2])['replay/rerouted'] == 0

  bias = np.linspace(0, 1, CFG.num_experts, dtype=np.float32)
  router = {'layers': weights['router']['layers'] + bias}
  found = update({**weights, 'router': router}, groups[:2])
  assert 0.1 < found['replay/rerouted'] <= 1
  # The experts are replayed, and their weights are of the unbiased scores.
  assert found['mismatch/max'] <= BOUND


def test_responses_of_several_versions(weights):
  """Tokens that the new weights drew after a swap saw keys of the old ones: they differ
  by much more than rounding, are counted apart, and raise no alarm; an error in tokens
  of one version does."""
  scheduler = Scheduler(Engine(CFG, ENGINE), weights, config=SchedulerConfig(4))
  newer, swapped = small.init(1, CFG), iter([1])

  def swap(tokens):  # with the first tokens
    for version in swapped:
      scheduler.update_weights(newer, version)

  scheduler.start(warmup=False)
  try:
    stem = np.arange(1, 12)
    mixed = complete(scheduler, 'mixed', 0, stem, 1, on_tokens=swap, max_tokens=24)()
    alone = complete(scheduler, 'alone', 0, stem, 2)()
  finally:
    scheduler.stop()
  new = int(np.sum(mixed.versions == 1))
  assert 0 < new < 24 and set(alone.versions) == {1}
  group = [
    (
      records.Trajectory(c.session, 0, i, 't', 'f', 'answer', float(i), 1.0, 0),
      (c,),
    )
    for i, c in enumerate((mixed, alone))
  ]
  credit = rewards.advantages(group, rewards.RewardConfig())
  batch = samples.from_group(credit, [1.0, 1.0], lambda c: 1 - c.versions)
  assert [sorted(set(s.lags.tolist())) for s in batch] == [[forest.OLDER_KEYS, 1], [0]]

  def finished(batch, error=0.0):
    merged = forest.merge(batch, row_tokens=ROW_TOKENS)
    logprob = train_step.at_terms(forward(newer, merged), merged) + error
    return agreement.finish(
      {k: float(v) for k, v in agreement.measure(logprob, merged).items()}
    )

  alone = [dataclasses.replace(s, experts=None) for s in batch]
  found = finished(alone)
  assert found['mismatch/tokens'] == 12 and found['mismatch/mixed_tokens'] == new
  assert found['mismatch/max'] <= BOUND and found['mismatch/mixed_max'] > 100 * BOUND
  assert agreement.excess(found) == ''
  wrong = finished(alone, error=0.01)
  assert 'mismatch/mean is 0.01' in agreement.excess(wrong)
  # To the bit, of single tokens too.
  assert 'mismatch/max is 1e-07' in agreement.excess({'mismatch/max': 1e-7}, True)
  assert agreement.excess({'mismatch/max': 0.0}, True) == ''
  # One token of thousands: a near-tie of the router, unless the ids are replayed.
  one = {'mismatch/max': 0.1, 'mismatch/mean': 0.1 / 5000}
  assert agreement.excess(one) == agreement.excess({}) == ''
  assert 'mismatch/max is 0.1' in agreement.excess(one | {'replay/disagreement': 0.0})
  # The ids of the shared prompt are those of the older weights.
  replayed = finished(batch)
  assert replayed['mismatch/max'] > 100 * BOUND
  differing = forest.disagreement(batch).rate
  assert differing > 0
  assert agreement.excess(replayed | {'replay/disagreement': differing}) == ''


def test_parts_of_a_batch():
  """Sums add up and the maximum stays the maximum; tokens of unknown or other weights
  and padding count nowhere, even if they are not finite."""
  batch = forest.causal(np.zeros((1, 7), np.int32))
  old = np.array([[-1.0, -2.0, np.nan, -4.0, -1.0, -1.0]], np.float32)
  lag = np.array([[0, 0, 0, 1, forest.OLDER_KEYS, -1]])
  weight = np.array([[1.0, 0.5, 0.0, 1.0, 1.0, 1.0]], np.float32)
  batch = dataclasses.replace(batch, old_logprob=old, lag=lag, weight=weight)
  logprob = np.array([[-1.5, -2.25, -3.0, -9.0, -4.0, -50.0]], np.float32)
  first = agreement.measure(logprob, batch)
  second = agreement.measure(logprob - 1, batch)
  sums = [train_step.Sums({}, {**m, 'weight': 1.0}, {}) for m in (first, second)]
  total = {k: float(v) for k, v in train_step.add(*sums).metrics.items()}
  assert agreement.finish(total) == {
    'mismatch/tokens': 4,
    'mismatch/max': 1.5,
    'mismatch/mean': (0.5 + 0.25 + 1.5 + 1.25) / 4,
    'mismatch/mixed_tokens': 2,
    'mismatch/mixed_max': 4.0,
  }
  assert agreement.without_sums(total) == {'weight': 2}
  unknown = agreement.measure(logprob, forest.causal(np.zeros((1, 7), np.int32)))
  assert agreement.finish({k: float(v) for k, v in unknown.items()}) == {
    'mismatch/tokens': 0,
    'mismatch/mixed_tokens': 0,
  }


def test_lags_are_of_the_lineage(groups):
  """A version of a dead lineage is not the living one of the same number."""
  credit = rewards.advantages(groups[0], rewards.RewardConfig())
  lineages = records.Lineages(((-1, 0), (0, 5)))

  def lags(completion):
    return lineages.updates_between(completion.lineage, completion.versions + 7, 7)

  batch = samples.from_group(credit, [1.0] * len(groups[0]), lags)
  assert {lag for s in batch for lag in s.lags.tolist()} == {4}  # 7 → 5 → 7
