"""One update of the learner: from groups to weights and metrics."""

from __future__ import annotations

import copy
import dataclasses
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax import forest, model
from m2jax.records import Completion, Lineages, Trajectory
from m2jax.rl import learner, rewards
from m2jax.sharding import ONE_DEVICE
from m2jax.train import step as train_step
from tests import quick
from tests.train import test_step

CFG = dataclasses.replace(
  test_step.CFG, dtype='float32', param_dtype='float32', num_mtp_modules=0
)


def completion(session, turn, prompt, response, **fields):
  return Completion(
    id=f'{session}/{turn}',
    session=session,
    turn=turn,
    parent=None,
    fork_reason=None,
    prompt_ids=prompt,
    response_ids=response,
    logprobs=tuple(np.linspace(-2.5, -3.0, len(response))),
    finish_reason='stop',
    status='ok',
    **fields,
  )


class Pool:
  """The part of the data pool that the learner uses."""

  def __init__(self, successes, version=0):
    self.successes, self.version = successes, version

  def group(self, index):
    out = []
    for rank, success in enumerate(self.successes):
      session = f'{index}.{rank}'
      versions = (self.version, self.version)
      prompt, response = (1, 2, 3 + index), (7 + rank, 9)
      turn = completion(session, 0, prompt, response, versions=versions)
      end = Trajectory(session, index, rank, 't', 'f', 'answer', success, 1.0, 1)
      out.append((end, [turn]))
    return out


class Learner(learner.Learner):
  """Updates from items of a pool."""

  def __init__(self, cfg, config, optimizer, state, pool):
    super().__init__(cfg, config, optimizer, state)
    self.pool = pool

  def update(self, indices, passes=1):
    credits_ = [self.credit(self.pool.group(i)) for i in indices]
    return super().update(credits_, passes)


def test_a_wrong_loss_mask_shows():
  """The share of trained tokens that no response has, whatever made the samples."""
  pool = Pool([1.0, 0.0])
  credit = rewards.advantages(pool.group(0), rewards.RewardConfig())
  right = [forest.Sample((1, 2, 3, 7 + i, 9), 3) for i in range(2)]
  assert learner._trained(right, [credit])['trained/prompt'] == 0
  wide = [forest.Sample((1, 2, 3, 7, 9), 1), right[1]]
  found = learner._trained(wide, [credit])
  assert found['trained/prompt'] == pytest.approx(2 / 6)
  assert sum(found.values()) == pytest.approx(1)


@pytest.fixture(scope='module')
def make():
  """Learners over one compiled step, from the same weights."""
  config = learner.LearnerConfig(
    row_tokens=16,
    row_terms=16,
    reward=rewards.RewardConfig(alpha=0.0, beta=0.0),
    step=train_step.StepConfig(micro_rows=1),
  )
  optimizer = optax.sgd(0.1)

  def state(broken=False):
    variables = quick.variables(CFG, 5)
    if broken:
      variables['params']['head'] = variables['params']['head'].at[0, 0].set(jnp.nan)
    return train_step.init_state(variables, optimizer)

  first = Learner(CFG, config, optimizer, state(), None)

  def make(pool, broken=False):
    one = copy.copy(first)
    one.pool = pool
    one.state = train_step.place_state(state(broken), CFG, optimizer, ONE_DEVICE)
    return one

  return make


APPLY = jax.jit(model.M2(CFG).apply)


def probabilities(of, tokens):
  """log p of the last token after the others."""
  logits = APPLY(of.variables(), jnp.array([tokens]))
  return float(jax.nn.log_softmax(logits[0, -2])[tokens[-1]])


def test_update_learns_what_was_paid(make):
  """The response of the better trajectory gains on the other's, and the version goes up
  by one."""
  pool = Pool((1.0, 0.0))
  one = make(pool)
  paths = [(1, 2, 3, 7), (1, 2, 3, 8)]
  before = [probabilities(one, p) for p in paths]
  scalars = one.update([0, 1])
  after = [probabilities(one, p) for p in paths]
  assert one.version == 1
  assert after[0] - after[1] > before[0] - before[1]  # for any initial weights
  assert scalars['forest_tokens'] == 12 and np.isfinite(scalars['loss'])


def test_nothing_to_learn(make):
  """A group with equal rewards leaves the weights bit-identical, yet is a version."""
  one = make(Pool((1.0, 1.0)))
  before = jax.tree.map(np.asarray, one.variables())
  scalars = one.update([0])
  assert one.version == 1 and scalars['forest_tokens'] == 0
  for a, b in zip(
    jax.tree.leaves(one.variables()), jax.tree.leaves(before), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_lag_of_a_lost_lineage(make):
  """The lag of tokens sampled by rolled-back weights counts the updates back to the
  last common ancestor and from there to the current weights."""
  one = make(Pool((1.0, 0.0), version=5))
  one.lineages = Lineages(((-1, 0), (0, 3)))  # restarted from step 3
  one.state = dataclasses.replace(one.state, step=jnp.asarray(3, jnp.int32))
  scalars = one.update([0])
  assert scalars['policy/lag_mean'] == scalars['policy/lag_max'] == 2
  scalars = one.update([0])  # now at version 4: one update of this lineage
  assert scalars['policy/lag_max'] == 3


def test_several_passes_are_one_version(make):
  """Two passes change the weights like two optimizer steps with fixed old
  log-probabilities, but the version increases by one."""
  pool = Pool((1.0, 0.0))
  twice, once = make(pool), make(pool)
  scalars = twice.update([0], passes=2)
  assert twice.version == 1 and scalars['policy/lag_max'] == 0
  once.update([0])
  one_pass = jax.tree.map(np.asarray, once.variables())
  once.update([0])  # the same groups, with the same recorded log-probabilities
  assert once.version == 2
  for a, b in zip(
    *map(jax.tree.leaves, (twice.variables(), once.variables())), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  heads = [v['params']['head'] for v in (twice.variables(), one_pass)]
  assert not np.array_equal(*heads)


def test_shuffled_rewards_stay_in_their_group():
  """The control only breaks the association of behaviour and reward: each group has the
  same successes, so that one without advantage still has none, in the same order at
  every call, and in some group permuted."""
  config = learner.LearnerConfig(
    reward=rewards.RewardConfig(alpha=0.0), shuffle_rewards=True
  )
  one = Learner(CFG, config, optax.sgd(0.1), None, Pool((1.0, 1.0, 0.0, 0.0)))
  moved = 0
  for index in range(8):
    group = one.pool.group(index)
    credit = one.credit(group)
    got = [c.trajectory.success for c in credit.credits]
    assert sorted(got) == [0.0, 0.0, 1.0, 1.0] and credit.dropped == ''
    assert got == [c.trajectory.success for c in one.credit(group).credits]
    moved += got != [1.0, 1.0, 0.0, 0.0]
  assert moved
  one.pool = Pool((1.0, 1.0))
  assert one.credit(one.pool.group(0)).dropped == 'zero_advantage'


def test_shuffled_rewards_of_turns():
  """They stay in the group, too, at its paid turns."""
  config = learner.LearnerConfig(shuffle_rewards=True)
  one = Learner(CFG, config, optax.sgd(0.1), None, Pool((1.0, 0.0, 0.0, 0.0)))
  moved = 0
  for index in range(8):
    group = [
      (dataclasses.replace(t, rewards={cs[0].id: float(t.rank)}), cs)
      for t, cs in one.pool.group(index)
    ]
    earned = [c.trajectory.rewards for c in one.credit(group).credits]
    assert [list(e) for e in earned] == [[cs[0].id] for _, cs in group]
    values = [value for e in earned for value in e.values()]
    assert sorted(values) == [0.0, 1.0, 2.0, 3.0]
    moved += values != [0.0, 1.0, 2.0, 3.0]
  assert moved


def test_the_scale_of_a_batch_is_that_of_its_groups():
  """`normalise='batch'`: one factor for all terms of an update."""
  config = learner.LearnerConfig(
    reward=rewards.RewardConfig(alpha=0.0, normalise='batch')
  )
  one = Learner(CFG, config, optax.sgd(0.1), None, Pool((1.0, 0.0, 0.0, 0.0)))
  one.state = types.SimpleNamespace(step=0)
  credits_ = [one.credit(one.pool.group(index)) for index in (0, 1)]
  rows = one.pack(credits_).batch.rows
  found = np.unique(rows.advantage[rows.weight > 0].round(5))
  np.testing.assert_allclose(
    found, np.array([-0.25, 0.75]) / np.sqrt(3 / 16), rtol=1e-4
  )


def test_not_finite(make):
  """An update whose loss is not finite changes nothing, counts as a version, and says
  so."""
  learner = make(Pool((1.0, 0.0)), broken=True)
  before = jax.device_get(learner.state.variables)
  scalars = learner.update([0])
  assert scalars['skipped'] == 1 and learner.version == 1
  after = jax.device_get(learner.state.variables)
  jax.tree.map(np.testing.assert_array_equal, after, before)


class TreePool(Pool):
  """Item 0 fits a row of 12; item 1 has too many branches, item 2 too long paths."""

  def __init__(self, replay):
    super().__init__((1.0, 0.0, 0.5, 0.25))
    self.replay = replay

  def group(self, index):
    stem = tuple(range(1, (3, 9, 11)[index]))
    out = []
    for rank, success in enumerate(self.successes[: 2 if index == 0 else 4]):
      session, ids, turns = f'{index}.{rank}', stem, []
      for turn in range(1 + (index > 0)):
        response = (7 + rank, 10 + turn) + index * (11, rank)
        whole = ids + response
        experts = self.experts(whole) if self.replay else None
        versions = (0,) * len(response)
        turns.append(
          completion(session, turn, ids, response, versions=versions, experts=experts)
        )
        ids = whole + (3, 4)
      end = Trajectory(session, index, rank, 't', 'f', 'answer', success, 1.0, 1)
      out.append((end, turns))
    return out

  def experts(self, tokens):
    """Ids that depend on the path alone, not the router's; -1 for the last token."""
    seeds = [zlib.crc32(bytes(tokens[: i + 1])) for i in range(len(tokens))]
    ids = [np.random.default_rng(s).permutation(4)[:2] for s in seeds[:-1]]
    return np.array([*ids, (-1, -1)], np.int16)[:, None]


@pytest.mark.parametrize(
  'replay, modules', [(True, 0), pytest.param(False, 1, marks=pytest.mark.long)]
)
def test_trees_larger_than_a_row(replay, modules):
  """Groups that do not fit rows, by size or by a path longer than a row, give the same
  update as one huge row: weights, router biases from the expert loads, and every
  metric, in one optimizer step together with the rows."""
  sizes = {
    'rows': dict(row_tokens=256, row_terms=256, buckets=forest.Buckets((256,), (256,))),
    'chunks': dict(
      row_tokens=12,
      row_terms=12,
      buckets=forest.Buckets((8,), (24,), terms_per_token=2),
    ),
  }
  got = {}
  with jax.enable_x64():
    cfg = dataclasses.replace(test_step.CFG, num_mtp_modules=modules)
    start = quick.variables(cfg, 0)
    start['router'] = {k: v + 0.01 * jnp.arange(4) for k, v in start['router'].items()}
    optimizer = optax.sgd(0.1)
    for name, fields in sizes.items():
      config = learner.LearnerConfig(
        reward=rewards.RewardConfig(alpha=0.0, beta=0.0),
        step=train_step.StepConfig(micro_rows=1, detach_mtp=True),
        **fields,
      )
      state = train_step.init_state(jax.tree.map(jnp.copy, start), optimizer)
      one = Learner(cfg, config, optimizer, state, TreePool(replay))
      scalars = one.update([0, 1, 2])
      assert one.version == 1
      for timing in ('train_s', 'tokens_per_s'):
        del scalars[timing]
      got[name] = one.state.variables, scalars
  (variables, scalars), (want_variables, want) = got['chunks'], got['rows']
  assert (scalars.pop('chunked_trees'), want.pop('chunked_trees')) == (2, 0)
  assert scalars.pop('padding') != want.pop('padding')
  # one row also merges prefixes shared by the groups
  assert scalars.pop('forest_tokens') >= want.pop('forest_tokens')
  assert scalars.pop('replay/disagreement', None) == (0.0 if replay else None)
  want.pop('replay/disagreement', None)
  assert scalars == pytest.approx(want, rel=1e-9)
  moved = 0.0
  for a, b, c in zip(
    *map(jax.tree.leaves, (variables, want_variables, start)), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    moved = max(moved, float(np.max(np.abs(a - c))))
  assert moved > 1e-4


def test_disagreement_is_reported(make):
  """Both trajectories have records for the prompt's three tokens, and one token was
  routed differently: a third of the records disagree."""

  class Routed(Pool):
    def group(self, index):
      out = super().group(index)
      for rank, (_, turns) in enumerate(out):
        experts = np.zeros((5, 1, 2), np.int16) + np.array([0, 1], np.int16)
        experts[1] += rank
        turns[0] = dataclasses.replace(turns[0], experts=experts)
      return out

  scalars = make(Routed((1.0, 0.0))).update([0])
  assert scalars['replay/disagreement'] == pytest.approx(1 / 3)


def test_buckets_hold_what_rows_hold():
  """Otherwise a group that fits a row could fail in the middle of a run."""
  with pytest.raises(ValueError, match='LearnerConfig.buckets.stack_tokens'):
    learner.LearnerConfig(row_tokens=8192)
