"""One update of the learner: groups in, weights and metrics out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax import model
from m2jax.rl import learner, rewards
from m2jax.rl.records import Completion, Trajectory
from m2jax.train import step as train_step
from tests.train import test_step

CFG = dataclasses.replace(
  test_step.CFG, dtype='float32', param_dtype='float32', num_mtp_modules=0
)


class Pool:
  """What the learner asks of the data pool."""

  def __init__(self, successes, version=0):
    self.successes, self.version, self.rewarded = successes, version, {}

  def group(self, index):
    out = []
    for rank, success in enumerate(self.successes):
      session = f'{index}.{rank}'
      completion = Completion(
        id=session,
        session=session,
        turn=0,
        parent=None,
        fork_reason=None,
        prompt_ids=(1, 2, 3 + index),
        response_ids=(7 + rank, 9),
        logprobs=(-2.5, -3.0),
        versions=(self.version, self.version),
        finish_reason='stop',
        status='ok',
      )
      end = Trajectory(session, index, rank, 't', 'f', 'answer', success, 1.0, 1)
      out.append((end, [completion]))
    return out

  def set_rewards(self, by_session):
    self.rewarded |= by_session


@pytest.fixture(scope='module')
def make():
  """Learners over one compiled shape, from the same weights."""
  config = learner.LearnerConfig(
    row_tokens=16,
    row_terms=16,
    reward=rewards.RewardConfig(alpha=0.0, beta=0.0),
    step=train_step.StepConfig(micro_rows=1),
  )
  optimizer = optax.sgd(0.1)

  def make(pool, broken=False):
    init = jax.jit(train_step.init_variables, static_argnums=0)
    variables = init(CFG, test_step.KEY)
    if broken:
      variables['params']['head'] = variables['params']['head'].at[0, 0].set(jnp.nan)
    state = train_step.init_state(variables, optimizer)
    return learner.Learner(CFG, config, optimizer, state, pool)

  return make


def probabilities(of, tokens):
  """log p of the last token after the others."""
  logits = model.M2(CFG).apply(of.variables(), jnp.array([tokens]))
  return float(jax.nn.log_softmax(logits[0, -2])[tokens[-1]])


def test_update_learns_what_was_paid(make):
  """The response of the better trajectory becomes likelier, the other's less; the
  version goes up by one, and the pool gets every trajectory's reward."""
  pool = Pool((1.0, 0.0))
  one = make(pool)
  paths = [(1, 2, 3, 7), (1, 2, 3, 8)]
  before = [probabilities(one, p) for p in paths]
  scalars = one.update([0, 1])
  after = [probabilities(one, p) for p in paths]
  assert one.version == 1
  assert after[0] > before[0] and after[1] < before[1]
  assert set(pool.rewarded) == {'0.0', '0.1', '1.0', '1.1'}
  assert scalars['forest_tokens'] == 12 and np.isfinite(scalars['loss'])


def test_nothing_to_learn(make):
  """Where all of a group did alike the weights stay bit for bit, yet it is a step."""
  one = make(Pool((1.0, 1.0)))
  before = jax.tree.map(np.asarray, one.variables())
  scalars = one.update([0])
  assert one.version == 1 and scalars['forest_tokens'] == 0
  for a, b in zip(
    jax.tree.leaves(one.variables()), jax.tree.leaves(before), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_lag_of_a_rolled_back_policy(make):
  """Tokens of a policy that a restart undid may say a version to come: lag 0, never
  negative."""
  scalars = make(Pool((1.0, 0.0), version=5)).update([0])
  assert scalars['policy/lag_mean'] == scalars['policy/lag_max'] == 0


def test_not_finite(make):
  """Broken weights stop the run before they reach engine or checkpoint; the message
  names the step."""
  with pytest.raises(FloatingPointError, match='rl step 1: loss is nan'):
    make(Pool((1.0, 0.0)), broken=True).update([0])
