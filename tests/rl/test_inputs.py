"""Sequence ratios, a reference policy and entropy, on merged trees: laws 2 and 3.

Updates of the learner in float64 against samples one by one, by a dense model and
formulas written apart from m2jax.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax import forest
from m2jax.records import Trajectory
from m2jax.rl import agreement, estimators, learner, rewards
from m2jax.rl import terms as terms_lib
from m2jax.rl.estimators import cispo
from m2jax.sharding import ONE_DEVICE
from m2jax.train import chunks
from m2jax.train import hosts as hosts_lib
from m2jax.train import step as train_step
from tests import quick, row_model
from tests.rl import test_learner
from tests.train import test_step

CFG = dataclasses.replace(test_step.CFG, num_mtp_modules=1)
RATE, LENGTH, GROUPS = 0.1, 16, 3
SUCCESSES = (1.0, 0.0, 0.5, 0.25)
LAYOUTS = {
  # a group fits a row, but not with another one; chunks would be padded
  'rows': dict(row_tokens=20, row_terms=11, buckets=forest.Buckets((256,), (256,))),
  'chunks': dict(row_tokens=12, row_terms=12, buckets=forest.Buckets((6,), (24,), 3)),
}
SETTINGS = dict(clip_low=0.1, clip_high=0.15, reference_kl=0.3, entropy_bonus=0.2)


def group(index):
  """Trajectories of two turns that share a prompt, and turns between two of them."""
  rng, out = np.random.default_rng(index), []
  draw = lambda n: tuple(rng.integers(1, CFG.vocab_size, n).tolist())
  stem = draw(2 + 2 * index)
  first = draw(2)
  for rank, success in enumerate(SUCCESSES):
    session, ids, turns = f'{index}.{rank}', stem, []
    for turn in range(2):
      response = first if turn == 0 and rank < 2 else draw(1 + (rank + turn) % 3)
      whole = ids + response
      one = test_learner.completion(
        *(session, turn, ids, response), versions=(0,) * len(response)
      )
      logprobs = tuple(np.float32(rng.uniform(-3.4, -2.4, len(response))).tolist())
      turns.append(dataclasses.replace(one, logprobs=logprobs, experts=experts(whole)))
      ids = whole + draw(2)
    end = Trajectory(session, index, rank, 't', 'f', 'answer', success, 1.0, 1)
    out.append((end, turns))
  return out


def experts(tokens):
  """Ids that depend on the path alone, not the router's; -1 for the last token."""
  seeds = [zlib.crc32(bytes(tokens[: i + 1])) for i in range(len(tokens))]
  ids = [np.random.default_rng(s).permutation(4)[:2] for s in seeds[:-1]]
  return np.array([*ids, (-1, -1)], np.int16)[:, None]


@pytest.fixture
def float64():
  with jax.enable_x64():
    yield


@functools.cache
def samples():
  """All completions, each in a row of its own, and what belongs to each."""
  rows = []
  for index in range(GROUPS):
    for rank, (_, turns) in enumerate(group(index)):
      length = sum(len(c.response_ids) for c in turns)
      gain = (SUCCESSES[rank] - np.mean(SUCCESSES)) / np.std(SUCCESSES)
      for c in turns:
        row = dict(tokens=np.zeros(LENGTH, np.int32), trajectory=4 * index + rank)
        row |= {name: np.zeros(LENGTH) for name in ('old', 'weight')}
        row['experts'] = np.full((LENGTH, 1, 2), -1)
        start, end = len(c.prompt_ids), len(c.tokens)
        row['tokens'][:end], row['experts'][:end] = c.tokens, c.experts
        row['old'][start:end] = np.float32(c.logprobs)
        weight = 1 / (GROUPS * len(SUCCESSES) * length)
        row['weight'][start:end] = np.float32(weight)
        rows.append(row | {'advantage': np.float64(np.float32(gain))})
  return jax.tree.map(lambda *values: np.stack(values), *rows)


def scores(params, router, replay):
  """log p and entropy of each token [n, LENGTH] of the samples."""

  def one(tokens, ids):
    (trunk, *_), _, _ = row_model.states(
      {'params': params, 'router': router}, tokens, CFG, ids
    )
    scores = jax.nn.log_softmax(trunk[:-1] @ params['head'])
    logprob = jnp.take_along_axis(scores, tokens[1:, None], 1)[:, 0]
    entropy = -jnp.sum(jnp.exp(scores) * scores, axis=-1)
    return jnp.pad(logprob, (1, 0)), jnp.pad(entropy, (1, 0))

  ids = samples()['experts']
  return jax.vmap(one)(samples()['tokens'], ids if replay else np.full_like(ids, -1))


def dense_loss(params, router, reference, sequence, kl):
  """GSPO as the paper writes it, with s_i differentiable; and the ratios s_i."""
  of = samples()
  logprob, entropy = scores(params, router, True)
  live = of['weight'] > 0
  ids = of['trajectory'] if sequence == 'trajectory' else np.arange(len(live))
  total = lambda x: jax.ops.segment_sum(x, ids, ids.max() + 1)
  length = total(live.sum(1))
  ratio = jnp.exp(total(jnp.where(live, logprob - of['old'], 0).sum(1)) / length)
  gain = total(of['advantage'] * live.sum(1)) / length
  clipped = jnp.clip(ratio, 1 - SETTINGS['clip_low'], 1 + SETTINGS['clip_high'])
  of_sequence = jnp.minimum(ratio * gain, clipped * gain)
  loss = -jnp.sum(total(of['weight'].sum(1)) * of_sequence)
  d = reference - logprob
  penalty = jnp.exp(d) - d - 1 if kl == 'k3' else d**2 / 2
  mean = lambda x: jnp.sum(of['weight'] * jnp.where(live, x, 0))
  loss += SETTINGS['reference_kl'] * mean(penalty)
  return loss - SETTINGS['entropy_bonus'] * mean(entropy), (ratio, gain)


@functools.cache
def start(seed):
  """Weights, with router biases that matter."""
  return quick.variables(CFG, seed, noise=0.1, bias=0.05)


def learner_of(layout, estimator, distillation=None, teachers=(), **step):
  """A learner that began with the weights of seed 0 and now has those of seed 1."""
  step = train_step.StepConfig(
    micro_rows=2, detach_mtp=True, mtp_weight=0.0, bias_update_rate=0.0, **step
  )
  config = learner.LearnerConfig(
    estimator=estimator,
    reward=rewards.RewardConfig(alpha=0.0, beta=0.0, baseline_over='trajectory'),
    step=step,
    **({} if distillation is None else {'distillation': distillation}),
    **LAYOUTS[layout],
  )
  tx = optax.sgd(RATE)
  state = lambda seed: train_step.init_state(jax.tree.map(jnp.copy, start(seed)), tx)
  one = learner.Learner(CFG, config, tx, state(0), teachers=dict(teachers))
  one.state = train_step.place_state(state(1), CFG, tx, ONE_DEVICE)
  return one


@pytest.mark.long
@pytest.mark.parametrize(
  'layout, sequence, kl', [('rows', 'trajectory', 'k3'), ('chunks', 'completion', 'k2')]
)
def test_gspo_with_penalties_equals_unmerged(layout, sequence, kl):
  """Two passes: the loss of the second, and the weights after both, to 1e-10. Ratios
  are those of the weights of each pass, with replayed experts; the reference chooses
  its own. Some sequences are clipped and some are not."""
  with jax.enable_x64():
    estimator = estimators.make('gspo', sequence=sequence, kl_estimate=kl, **SETTINGS)
    one = learner_of(layout, estimator)
    credits_ = [one.credit(group(i)) for i in range(GROUPS)]
    batch = one.pack(credits_).batch
    if layout == 'rows':
      spread = {
        (t, row)
        for row, m in np.argwhere(batch.rows.weight != 0)
        for t in [int(batch.rows.term_trajectory[row, m])]
      }
      assert len(batch.rows.tokens) > 3  # micro-batches of two
      assert len(spread) > GROUPS * len(SUCCESSES)  # a trajectory in two rows
    else:
      kinds = [chunk.kind for chunk in batch.plan]
      assert batch.chunked >= 2 and kinds.count('push') > 1
    found = one.update(credits_, passes=2)

    reference = jax.jit(scores, static_argnums=2)(*start(0).values(), False)[0]
    loss = jax.jit(
      jax.value_and_grad(
        lambda params: dense_loss(params, start(1)['router'], reference, sequence, kl),
        has_aux=True,
      )
    )
    want = start(1)['params']
    for _ in range(2):
      (value, (ratio, gain)), gradient = loss(want)
      low = (gain < 0) & (ratio < 1 - SETTINGS['clip_low'])
      clipped = low | ((gain > 0) & (ratio > 1 + SETTINGS['clip_high']))
      assert 0 < clipped.sum() < len(clipped)
      want = jax.tree.map(lambda p, g: p - RATE * g, want, gradient)
    assert found['loss'] == pytest.approx(float(value), rel=1e-10)
    moved = jax.tree.map(np.subtract, want, start(1)['params'])
    got = jax.tree.map(np.subtract, one.state.variables['params'], start(1)['params'])
    for (path, a), b in zip(
      jax.tree.leaves_with_path(got), jax.tree.leaves(moved), strict=True
    ):
      if 'mtp' in str(path):
        assert not np.any(a)
      else:
        assert np.linalg.norm(a - b) <= 1e-10 * np.linalg.norm(b) > 0, path


def test_an_estimator_that_needs_nothing_adds_nothing(monkeypatch, float64):
  """CISPO's gradient programs, of rows and of a chunk, are to the letter those of its
  formula alone; its batches have no further array, and nothing is scored. One that asks
  for the entropy has another program."""

  def plain(logprob, batch):
    of = logprob, batch.old_logprob, batch.advantage, batch.weight
    metrics = cispo.metrics(*of) | agreement.measure(logprob, batch)
    return jnp.sum(cispo.loss(*of)), metrics

  one = learner_of('rows', cispo.Config())
  monkeypatch.setattr(one._inputs, '_passes', None)
  packed = one.pack([one.credit(group(i)) for i in range(GROUPS)])
  rows = packed.batch.rows
  given = {name for name, value in vars(rows).items() if value is not None}
  assert not given & {
    *('term_trajectory', 'reference_logprob', 'completion', 'trajectory'),
    *('returns', 'term_teacher', 'teacher_logprob', *forest.TEACHER_TOKENS),
  }
  assert one._inputs.of_reference(packed.batch) is packed.batch
  assert one._inputs.of_sequences(one.state, packed.batch) is packed.batch
  assert one._teachers.of(packed.batch) is packed.batch
  assert one._critic.advantages(one.state, packed.batch)[0] is packed.batch

  cfg = dataclasses.replace(CFG, num_mtp_modules=0)
  variables = quick.variables(cfg, 0)
  buckets = forest.Buckets((6,), (24,), 3)
  tree = forest.merge([forest.Sample(np.arange(12), 2), forest.Sample(np.arange(9), 2)])
  leaf = next(c for c in forest.cut(tree, buckets) if c.kind == 'leaf').batch

  def lowered(objective):
    config = train_step.StepConfig(micro_rows=1)
    micro = train_step.programs(cfg, optax.sgd(RATE), objective, config).micro
    parts = chunks.programs(cfg, objective, config)
    stack = parts.buffers(chunks.stack_slots(buckets))
    sums = parts.zeros(variables, leaf)
    return (
      micro.lower(variables, rows).as_text(),
      parts.leaf.lower(variables, sums, *stack, leaf).as_text(),
    )

  own = lowered(learner.Objective(cispo.Config()))
  assert own == lowered(plain)
  bonus = lowered(learner.Objective(cispo.Config(entropy_bonus=0.1)))
  assert bonus[0] != own[0] and bonus[1] != own[1]


def test_gspo_on_policy_and_on_padding():
  """At ratios of 1 it is the policy gradient; where the weight is 0 anything may be in
  the arrays; a ratio outside of its bounds stops the whole sequence."""
  gspo = estimators.make('gspo', clip_low=0.2, clip_high=0.2)
  logprob = jnp.array([-1.0, -2.0, -0.5, -3.0, jnp.nan])
  weight = jnp.array([0.25, 0.25, 0.25, 0.25, 0.0])
  advantage = jnp.array([1.0, 1.0, -1.0, -1.0, jnp.inf])

  def gradient(log_ratio, length):
    def loss(x):
      sums = terms_lib.OfSequence(jnp.array(log_ratio), jnp.array(length))
      terms = terms_lib.Terms(x, x - 1, advantage, weight, trajectory=sums)
      return gspo.loss(terms).sum(), gspo.metrics(terms)

    return jax.grad(loss, has_aux=True)(logprob)

  grads, _ = gradient([0.0] * 5, [2.0] * 4 + [0.0])
  np.testing.assert_allclose(grads, [-0.25, -0.25, 0.25, 0.25, 0])
  s = np.log(1.3)  # a geometric mean over two tokens
  grads, found = gradient([2 * s] * 4 + [np.nan], [2.0] * 4 + [np.nan])
  np.testing.assert_allclose(grads, [0, 0, 0.25 * 1.3, 0.25 * 1.3, 0], rtol=1e-5)
  assert found['ratio'] == pytest.approx(1.3, rel=1e-5)
  assert found['clip_fraction'] == 0.5
  assert found['abs_log_ratio'] == pytest.approx(1.0)  # of tokens


def test_a_hosts_rows_of_all():
  """The inverse of how a host's rows are placed: shard by shard."""
  where = types.SimpleNamespace(size=lambda axis: 4)
  got = hosts_lib.own(np.arange(16).reshape(8, 2), hosts_lib.Hosts(1, 2, (1, 3)), where)
  np.testing.assert_array_equal(got[:, 0] // 2, [2, 3, 6, 7])
