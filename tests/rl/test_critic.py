"""Values, GAE and their loss on merged trees: laws 2 and 3.

Updates of the learner in float64 against samples one by one, by a dense model and the
sums of GAE's definition, written apart from m2jax.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax.checkpoint.manager import CheckpointManager
from m2jax.forge.config import RlConfig
from m2jax.optim import OptimizerConfig
from m2jax.rl import critic, estimators, learner, rewards
from m2jax.sharding import ONE_DEVICE
from m2jax.train import step as train_step
from tests import quick, row_model
from tests.rl import test_inputs

CFG, RATE, GROUPS = test_inputs.CFG, test_inputs.RATE, test_inputs.GROUPS
WITH_HEAD = dataclasses.replace(CFG, value_head=True)
GAMMA, LAMBDA, WEIGHT = 0.5, 0.75, 0.7  # returns are exact in float32


def group(index):
  """The group of `test_inputs`, whose first turns are paid."""
  return [
    (dataclasses.replace(end, rewards={turns[0].id: 0.25 * rank}), turns)
    for rank, (end, turns) in enumerate(test_inputs.group(index))
  ]


@functools.cache
def start(cfg, seed=1):
  return quick.variables(cfg, seed, noise=0.1, bias=0.05)


def passes_of(kind):
  return 2 if kind == 'separate' else 1


def config(kind='shared', steps='turn', layout='rows', estimator='cispo', **reward):
  reward = rewards.RewardConfig(alpha=0.0, gamma=GAMMA, **reward)
  return learner.LearnerConfig(
    estimator=estimators.make(estimator, normaliser='trajectory'),
    reward=reward,
    critic=critic.CriticConfig(
      kind, weight=WEIGHT, lam=LAMBDA, steps=steps, passes=passes_of(kind)
    ),
    step=train_step.StepConfig(
      micro_rows=2, detach_mtp=True, mtp_weight=0.0, bias_update_rate=0.0
    ),
    **test_inputs.LAYOUTS[layout],
  )


def learner_of(settings, tx=None):
  """A learner whose critic has values."""
  tx = tx or optax.sgd(RATE)
  state = critic.begin(settings.critic, copy(start(CFG)), CFG, tx, ONE_DEVICE)
  if settings.critic.kind == 'separate':
    own = train_step.init_state(copy(start(critic.own_model(CFG), 2)), tx)
    state = dataclasses.replace(state, critic=own)
  else:
    value = start(WITH_HEAD)['params']['value']
    assert not np.any(state.variables['params']['value']) and np.any(value)
    params = {**state.variables['params'], 'value': jnp.copy(value)}
    state = dataclasses.replace(state, variables={**state.variables, 'params': params})
  return learner.Learner(CFG, settings, tx, state)


def copy(tree):
  return jax.tree.map(jnp.copy, tree)


def states(cfg, variables, replay):
  """log p and V of each token [n, LENGTH] of the samples, 0 at the first."""
  of, params = test_inputs.samples(), variables['params']

  def one(tokens, ids):
    (trunk, *_), _, _ = row_model.states(variables, tokens, cfg, ids)
    scores = jax.nn.log_softmax(trunk[:-1] @ params['head'])
    logprob = jnp.take_along_axis(scores, tokens[1:, None], 1)[:, 0]
    return jnp.pad(logprob, (1, 0)), trunk[:-1]

  ids = of['experts'] if replay else np.full_like(of['experts'], -1)
  logprob, before = jax.vmap(one)(of['tokens'], ids)
  return logprob, before


def value(before, params):
  return jnp.pad((before @ params['value'])[..., 0], ((0, 0), (1, 0)))


def credit(values, steps):
  """G and Â at each token of the samples, by r, V and the sum over what follows."""
  of = test_inputs.samples()
  live = of['weight'] > 0
  returns, gains = np.zeros(live.shape), np.zeros(live.shape)
  for t in range(of['trajectory'].max() + 1):
    rank, rows = t % 4, np.flatnonzero(of['trajectory'] == t)
    places = [(row, i) for row in rows for i in np.flatnonzero(live[row])]
    ends = [(row, np.flatnonzero(live[row])[-1]) for row in rows]
    paid = dict(zip(ends, (0.25 * rank, test_inputs.SUCCESSES[rank]), strict=True))
    gamma = [GAMMA if p in ends else 1.0 for p in places]
    lam = [LAMBDA if p in ends or steps == 'token' else 1.0 for p in places]
    v = [*(values[p] for p in places), 0.0]
    delta = [paid.get(p, 0) + gamma[i] * v[i + 1] - v[i] for i, p in enumerate(places)]
    for i, place in enumerate(places):
      after = range(i, len(places))
      returns[place] = sum(np.prod(gamma[i:k]) * paid.get(places[k], 0) for k in after)
      gains[place] = sum(
        np.prod(np.multiply(gamma, lam)[i:k]) * delta[k] for k in after
      )
  return returns, gains


def policy_loss(logprob, gains):
  of = test_inputs.samples()
  ratio = jnp.exp(jnp.where(of['weight'] > 0, logprob - of['old'], 0))
  ratio = jax.lax.stop_gradient(jnp.minimum(ratio, 5.0))
  return -jnp.sum(of['weight'] * ratio * gains * logprob)


def value_loss(values, returns):
  return WEIGHT * jnp.sum(test_inputs.samples()['weight'] * (values - returns) ** 2)


def moved(after, before):
  return jax.tree.map(np.subtract, after, before)


def assert_close(got, want, unmoved=()):
  """Every leaf to 1e-10, and none of them 0 but those of `unmoved`."""
  leaves = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
  for (path, a), b in leaves:
    if any(name in str(path) for name in unmoved):
      assert not np.any(a), path
    else:
      assert np.linalg.norm(a - b) <= 1e-10 * np.linalg.norm(b) > 0, path


CASES = [
  ('shared', 'turn', 'rows'),
  ('shared', 'token', 'chunks'),
  ('detached', 'token', 'rows'),
  ('detached', 'turn', 'chunks'),
  ('separate', 'turn', 'rows'),
  ('separate', 'token', 'chunks'),
]


@pytest.mark.long
@pytest.mark.parametrize('kind, steps, layout', CASES)
def test_critic_on_trees_equals_unmerged(kind, steps, layout):
  """Two passes: metrics of values, and the weights of policy and critic after both, to
  1e-10. Trajectories of different returns share states; values are those of before the
  first pass in both."""
  with jax.enable_x64():
    one = learner_of(config(kind, steps, layout))
    own = kind == 'separate'
    before = start(CFG if own else WITH_HEAD)
    theirs = start(critic.own_model(CFG), 2) if own else before
    assert one.state.critic is None or own
    credits_ = [one.credit(group(i)) for i in range(GROUPS)]
    batch = one.pack(credits_).batch
    assert (batch.rows is None) == (layout == 'chunks')
    found = one.update(credits_, passes=2)

    cfg = critic.own_model(CFG) if own else WITH_HEAD
    with_replay = not own

    def values_of(params, router):
      variables = {'params': params, 'router': router}
      return value(states(cfg, variables, with_replay)[1], params)

    values = np.asarray(jax.jit(values_of)(*theirs.values()))
    returns, gains = credit(values, steps)
    of = test_inputs.samples()
    mean = lambda x: np.sum(of['weight'] * x)
    total = mean(np.ones_like(values))
    want_loss = mean((values - returns) ** 2) / total
    assert found['value/loss'] == pytest.approx(want_loss, rel=1e-10)
    assert found['value/mean'] == pytest.approx(mean(values) / total, rel=1e-10)

    def loss(params):
      logprob, hidden = states(
        CFG, {'params': params, 'router': before['router']}, True
      )
      total = policy_loss(logprob, gains)
      if not own:
        hidden = jax.lax.stop_gradient(hidden) if kind == 'detached' else hidden
        total += value_loss(value(hidden, params), returns)
      return total

    gradient = jax.jit(jax.grad(loss))
    want = before['params']
    for _ in range(2):
      want = jax.tree.map(lambda p, g: p - RATE * g, want, gradient(want))
    got = moved(one.state.variables['params'], before['params'])
    assert_close(got, moved(want, before['params']), unmoved=('mtp',))

    if own:
      theirs_loss = lambda p: value_loss(values_of(p, theirs['router']), returns)
      gradient, want = jax.jit(jax.grad(theirs_loss)), theirs['params']
      for _ in range(2 * passes_of(kind)):
        want = jax.tree.map(lambda p, g: p - RATE * g, want, gradient(want))
      got = moved(one.state.critic.variables['params'], theirs['params'])
      # The vocabulary's head is a copy that values do not use.
      assert_close(got, moved(want, theirs['params']), unmoved=("'head'",))


def test_states_are_shared_and_returns_are_not():
  """What the fixture is for: one token with terms of different returns."""
  with jax.enable_x64():
    one = learner_of(config())
    rows = one.pack([one.credit(group(i)) for i in range(GROUPS)]).batch.rows
  live, spread = rows.weight[0] != 0, {}
  for at, gain in zip(rows.term_token[0][live], rows.advantage[0][live], strict=True):
    spread.setdefault(int(at), set()).add(float(gain))
  assert any(len(gains) > 1 for gains in spread.values())


def test_one_rollout_per_prompt_learns():
  """Each group has one trajectory: values approach the returns, the better response
  becomes likelier than the worse one, and an engine gets no head."""
  with jax.enable_x64():
    one = learner_of(
      dataclasses.replace(config(), critic=critic.CriticConfig('shared'))
    )
    groups = [[group(0)[2]], [group(0)[3]]]
    credits_ = [one.credit(g) for g in groups]
    assert [c.dropped for c in credits_] == ['', '']
    assert credits_[0].credits[0].advantages.tolist() == [0.5 + GAMMA * 0.5, 0.5]
    first = one.update(credits_)
    for _ in range(5):
      last = one.update(credits_)
    assert last['value/loss'] < first['value/loss']
    assert last['value/explained_variance'] > first['value/explained_variance']
    assert last['groups_zero_advantage'] == last['dropped_fraction'] == 0
    assert 'value' not in one.variables()['params']


@pytest.mark.parametrize('kind', ['detached', 'separate'])
def test_a_checkpoint_has_the_critic(kind, tmp_path):
  """Its weights and its optimizer's state: the next update is the same after a restart,
  and so are its values."""
  with jax.enable_x64():
    one = learner_of(config(kind), optax.adam(RATE))
    credits_ = [one.credit(group(0))]
    one.update(credits_)
    with CheckpointManager(tmp_path) as manager:
      manager.save(1, one.state)
      manager.wait()
      like = jax.tree.map(jnp.zeros_like, one.state)
      first = one.update(credits_)
      after = copy(one.state)
      one.state = manager.restore(like=like).state
    again = one.update(credits_)
    assert again['value/loss'] == first['value/loss']
    jax.tree.map(np.testing.assert_array_equal, one.state, after)


def test_no_return_is_trained_too():
  """A failure is below what the critic expects; an infrastructure failure is not."""
  end, turns = test_inputs.group(0)[1]
  broken = dataclasses.replace(end, end_reason='infrastructure')
  with jax.enable_x64():
    one = learner_of(config())
    failed = one.credit([(end, turns)])
    assert not failed.dropped and failed.credits[0].trained
    assert rewards.summary([failed])['dropped_fraction'] == 0
    assert one.credit([(broken, turns)]).dropped == 'masked'
    both = one.credit([(end, turns), (broken, turns)])
    assert not both.dropped and not both.credits[1].trained


@pytest.mark.parametrize('lam, want', [(1.0, [5, 4, 3]), (0.0, [1, 4, 3])])
def test_lambda_of_one_is_the_return_minus_the_value(lam, want):
  """And 0 is the difference of two values and what is paid between them."""
  settings = critic.CriticConfig('shared', lam=lam)
  turn, one = np.array([0, 1, 1]), np.zeros(3, int)
  got = critic.gae(np.array([5.0, 4, 3]), one, turn, 1.0, settings)
  np.testing.assert_array_equal(got, want)


def test_the_scale_of_a_batch():
  with jax.enable_x64():
    one, scaled = (learner_of(config(normalise=x)) for x in (None, 'batch'))
    plain, divided = (
      x._critic.advantages(x.state, x.pack([x.credit(group(0))]).batch)[0].rows
      for x in (one, scaled)
    )
  live = plain.weight != 0
  want = plain.advantage[live] / plain.advantage[live].std()
  np.testing.assert_allclose(divided.advantage[live], want, rtol=1e-12)
  np.testing.assert_array_equal(plain.returns, divided.returns)


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(kind='big'), "kind='big'"),
    (dict(lam=1.1), 'lam=1.1'),
    (dict(weight=0.0), 'weight=0.0'),
    (dict(steps='episode'), "steps='episode'"),
    (dict(kind='shared', passes=2), 'passes=2'),
  ],
)
def test_settings_out_of_range(settings, message):
  with pytest.raises(ValueError, match=message):
    critic.CriticConfig(**settings)


def test_a_group_of_one():
  """Needs a critic, or what compares nothing; and a scale of its speed."""

  def rl(**changes):
    whole = dict(steps=1, seconds=0.0, groups_per_step=1, group_size=1, capacity=1)
    whole |= dict(window=None, checkpoint_every=1, optimizer=OptimizerConfig())
    return RlConfig(**whole, learner=dataclasses.replace(config(), **changes))

  none = critic.CriticConfig()
  assert rl().learner.learns_from_one
  rl(critic=none, estimator=estimators.make('expert_iteration'))
  with pytest.raises(ValueError, match='group_size=1.*without learner.critic'):
    rl(critic=none)
  fast = rewards.RewardConfig(beta=0.5)
  with pytest.raises(ValueError, match='group_size=1.*speed_baseline'):
    rl(reward=fast)
  rl(reward=dataclasses.replace(fast, speed_baseline=1.0))


def test_what_does_not_go_with_a_critic():
  with pytest.raises(ValueError, match=r"normalise='group'.*with a critic"):
    config(normalise='group')
  with pytest.raises(ValueError, match=r"kind='expert_iteration'.*with a critic"):
    config(estimator='expert_iteration')
  assert config(estimator='grpo').reward_of_estimator.normalise == 'none'
