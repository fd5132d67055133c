"""Expert iteration: only successes are imitated, by maximum likelihood."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import forest
from m2jax.rl import estimators, learner, rewards, samples
from m2jax.train import step as train_step
from tests.rl import test_learner, test_rewards

ESTIMATOR = estimators.make('expert_iteration')
EPISODES = {'success': 1.0, 'failure': 0.0, 'broken': 0.0}


def credit(*kinds):
  group = [
    test_rewards.episode(
      rank,
      EPISODES[kind],
      ('ok', 'ok'),
      end_reason='infrastructure' if kind == 'broken' else 'answer',
    )
    for rank, kind in enumerate(kinds)
  ]
  return ESTIMATOR.credit(rewards.advantages(group, rewards.RewardConfig()))


def trained(group):
  return [len(c.completions) for c in group.credits]


def test_only_successes_are_imitated():
  """Every turn of a success, with advantage 1; nothing of a failure."""
  group = credit('failure', 'success', 'broken')
  assert trained(group) == [0, 2, 0] and not group.dropped
  np.testing.assert_array_equal(group.credits[1].advantages, [1.0, 1.0])


def test_a_group_of_successes_is_trained_and_one_of_failures_is_not():
  """Unlike with CISPO, a group of successes is trained and one of failures dropped."""
  assert trained(credit('success', 'success')) == [2, 2]
  assert not credit('success', 'success').dropped
  assert credit('failure', 'failure').dropped == 'zero_advantage'
  assert credit('broken').dropped == 'masked'


def test_the_update_is_that_of_sft_on_the_successes():
  """Value and gradient, by log-probability, against the mean log-likelihood of SFT,
  whatever was sampled."""
  pool = test_learner.Pool((1.0, 0.0, 1.0))
  group = rewards.advantages(pool.group(0), rewards.RewardConfig())
  (found,) = samples.from_groups([ESTIMATOR.credit(group)])
  batch = jax.tree.map(jnp.asarray, forest.merge(found, row_tokens=16, row_terms=16))
  plain = [dataclasses.replace(s, weights=None, advantages=None) for s in found]
  reference = forest.merge(plain, row_tokens=16, row_terms=16)
  share = reference.weight / np.sum(reference.weight)
  reference = jax.tree.map(jnp.asarray, dataclasses.replace(reference, weight=share))
  objective = learner.Objective(ESTIMATOR)
  logprob = -np.random.default_rng(0).random(batch.weight.shape, np.float32)

  def value_and_grad(objective, of):
    return jax.value_and_grad(lambda x: objective(x, of)[0])(jnp.asarray(logprob))

  got = value_and_grad(objective, batch)
  want = value_and_grad(train_step.nll, reference)
  assert got[0] > 0
  assert np.count_nonzero(got[1]) == np.count_nonzero(reference.weight) > 0
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
