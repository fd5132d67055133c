"""Each estimator against its closed form, written apart in NumPy; law 3 for each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import forest, model
from m2jax.rl import estimators, learner, ppo_clip, rewards
from m2jax.rl.estimators import cispo
from m2jax.rl.terms import Terms
from m2jax.train import step as train_step
from tests.model import test_forest_equivalence as equivalence
from tests.rl import test_cispo

CLIPPED = ('grpo', 'dapo')
BY_TOKEN = (*CLIPPED, 'cispo', 'policy_gradient', 'expert_iteration')
# Value and gradient of a term of weight 1, by its ratio, Â and log π.
BOUNDS = {'grpo': (0.8, 1.2), 'dapo': (0.8, 1.28)}


def by_hand(kind, logprob, ratio, advantage):
  if kind == 'cispo':
    factor = min(ratio, 5.0)
    return -factor * advantage * logprob, -factor * advantage
  if kind in CLIPPED:
    low, high = BOUNDS[kind]
    clipped = min(max(ratio, low), high)
    if clipped * advantage < ratio * advantage:
      return -clipped * advantage, 0.0
    return -ratio * advantage, -ratio * advantage
  return -advantage * logprob, -advantage


@pytest.mark.parametrize('kind', BY_TOKEN)
def test_closed_forms(kind):
  """Value and gradient of every term, on both sides of every bound and sign of Â."""
  logprob, old, advantage, weight = test_cispo.batch(spread=0.7)
  estimator = estimators.make(kind)
  loss = lambda x: estimator.penalised(Terms(x, old, advantage, weight))
  value, grad = loss(logprob), jax.grad(lambda x: loss(x).sum())(logprob)
  ratio = np.exp(np.float64(logprob) - np.float64(old))
  arrays = np.float64(logprob), ratio, np.float64(advantage)
  want = np.array([by_hand(kind, *term) for term in zip(*arrays, strict=True)])
  np.testing.assert_allclose(value, weight * want[:, 0], rtol=1e-4, atol=1e-8)
  np.testing.assert_allclose(grad, weight * want[:, 1], rtol=1e-4, atol=1e-8)
  if kind in CLIPPED:
    for sign in (-1, 1):
      stopped = want[:, 1][sign * arrays[2] > 0] == 0
      assert 0 < stopped.mean() < 1


def test_on_policy_gradients_are_equal():
  """At r = 1 all are the policy gradient: they differ in off-policy terms only."""
  logprob, _, advantage, weight = test_cispo.batch()
  for kind in BY_TOKEN:
    loss = estimators.make(kind).loss
    of = lambda x, f=loss: f(Terms(x, logprob, advantage, weight)).sum()
    grad = jax.grad(of)(logprob)
    np.testing.assert_allclose(grad, -weight * advantage, rtol=1e-6)


def test_clip_fraction_counts_terms_without_gradient():
  """Of GRPO and DAPO; clipped_mass is the ratio that they lose."""
  logprob, old, advantage, weight = test_cispo.batch(spread=0.7)
  for kind in CLIPPED:
    estimator = estimators.make(kind)
    loss = lambda x, e=estimator: e.loss(Terms(x, old, advantage, weight)).sum()
    stopped = np.asarray(jax.grad(loss)(logprob)) == 0
    found = estimator.metrics(Terms(logprob, old, advantage, weight))
    share = np.sum(weight * stopped)
    assert 0 < share < 1
    np.testing.assert_allclose(found['clip_fraction'], share, rtol=1e-5)
    mass = np.sum(weight * stopped * np.exp(logprob - old))
    np.testing.assert_allclose(found['clipped_mass'], mass, rtol=1e-5)
  terms = Terms(logprob, old, advantage, weight)
  none = estimators.make('policy_gradient').metrics(terms)
  assert none['clip_fraction'] == 0


@pytest.mark.parametrize('kind', BY_TOKEN)
def test_padding_and_extremes_are_finite(kind):
  """Any values where the weight is 0, and ratios that overflow float32."""
  junk = jnp.array([-0.1, -200.0, jnp.nan, -jnp.inf, -0.5])
  old = jnp.array([-200.0, -0.1, -1.0, jnp.nan, -0.5])
  advantage = jnp.array([-1.0, 1.0, jnp.inf, 1.0, 1.0])
  weight = jnp.array([0.5, 0.25, 0.0, 0.0, 0.25])
  estimator = estimators.make(kind)
  loss = lambda x: estimator.loss(Terms(x, old, advantage, weight)).sum()
  value, grad = jax.value_and_grad(loss)(junk)
  assert np.isfinite(value) and np.isfinite(grad).all()
  assert (grad[2:4] == 0).all() and grad[4] == -0.25
  found = estimator.metrics(Terms(junk, old, advantage, weight))
  assert all(np.isfinite(v) for v in found.values())


def test_defaults_are_the_papers():
  """Bounds, averages and scale of each; a parameter replaces its default only."""
  of = {kind: estimators.make(kind) for kind in estimators.KINDS}
  shown = {k: (of[k].clip_low, of[k].clip_high, of[k].normaliser) for k in CLIPPED}
  assert shown == dict(grpo=(0.2, 0.2, 'trajectory'), dapo=(0.2, 0.28, 'token'))
  assert of['cispo'].normaliser == of['policy_gradient'].normaliser == 'prompt'
  dapo = estimators.make('dapo', clip_low=0.1)
  assert (dapo.clip_low, dapo.clip_high) == (0.1, 0.28)
  batch = test_cispo.batch()
  bounds = dict(is_weight_min=0.8, is_weight_max=2.0)
  bounded = estimators.make('cispo', **bounds)
  np.testing.assert_array_equal(
    bounded.loss(Terms(*batch)), cispo.loss(*batch, **bounds)
  )
  assert bounded.metrics(Terms(*batch)) == cispo.metrics(*batch, **bounds)
  scales = {k: learner.LearnerConfig(estimator=of[k]) for k in of}
  scales = {k: v.reward_of_estimator.normalise for k, v in scales.items()}
  grouped = dict.fromkeys((*CLIPPED, 'gspo'), 'group')
  assert scales == dict.fromkeys(of, 'none') | grouped
  given = rewards.RewardConfig(normalise='batch')
  config = learner.LearnerConfig(estimator=of['grpo'], reward=given)
  assert config.reward_of_estimator == given


@pytest.mark.parametrize(
  'settings, field',
  [
    ({'kind': 'ppo'}, r"kind='ppo': .*cispo, dapo, .*policy_gradient\)"),
    ({'kind': 'grpo', 'clip_low': 1.5}, 'clip_low'),
    ({'kind': 'dapo', 'clip_high': -0.1}, 'clip_high'),
    ({'kind': 'cispo', 'is_weight_max': 0.2}, 'is_weight_max'),
    ({'kind': 'cispo', 'is_weight_min': 1.1}, 'is_weight_min'),
    ({'kind': 'cispo', 'normaliser': 'sample'}, 'normaliser'),
    ({'kind': 'cispo', 'reference_kl': -1.0}, 'reference_kl'),
    ({'kind': 'cispo', 'kl_estimate': 'k1'}, 'kl_estimate'),
    ({'kind': 'gspo', 'sequence': 'group'}, 'sequence'),
  ],
)
def test_bad_settings_are_refused(settings, field):
  """When the config is made, naming the field."""
  with pytest.raises(ValueError, match=field):
    estimators.make(**settings)
  for function in (ppo_clip.loss, ppo_clip.metrics):
    with pytest.raises(ValueError, match='clip_low'):
      function(*test_cispo.batch(), clip_low=2.0)


KINDS = 'cispo', 'grpo', 'dapo', 'policy_gradient'


def row_losses(logprob, old, advantage, weight):
  """The sum of the terms of each kind, by cases and apart from m2jax."""
  ratio = jnp.exp(logprob - old)
  capped = jax.lax.stop_gradient(jnp.where(ratio > 5, 5, ratio))

  def surrogate(low, high):
    up = jnp.where(ratio > high, high, ratio) * advantage
    down = jnp.where(ratio < low, low, ratio) * advantage
    return jnp.where(advantage > 0, up, down)

  terms = [
    capped * advantage * logprob,
    *(surrogate(*BOUNDS[kind]) for kind in CLIPPED),
    advantage * logprob,
  ]
  return -jnp.stack([jnp.sum(weight * x) for x in terms])


def test_merged_equals_unmerged():
  """Law 3 in float64, value and gradient, each sample a row of its own against trees:
  every term is clipped by its own ratio, so a shared token in one branch only."""
  with jax.enable_x64():
    cfg = dataclasses.replace(
      equivalence.config('float64', num_mtp_modules=0), num_layers=1
    )
    rng = np.random.default_rng(3)
    samples = equivalence.random_samples(rng, count=8, vocab=cfg.vocab_size)
    variables = equivalence.variables_for(cfg, 3)
    batch = forest.merge(samples, row_tokens=48)
    shape = len(samples), max(len(s.tokens) for s in samples)
    tokens, old, advantage, weight = np.zeros((4, *shape))
    for i, s in enumerate(samples):
      tokens[i, : len(s.tokens)] = s.tokens
      terms = np.s_[i, s.prompt_length : len(s.tokens)]
      old[terms], advantage[terms] = s.old_logprobs, s.advantages
      weight[terms] = s.weights
    tokens, m2 = jnp.asarray(tokens, jnp.int32), model.M2(cfg)

    def rows(params):
      logits = m2.apply({**variables, 'params': params}, tokens)
      found = jax.nn.log_softmax(logits[:, :-1])
      found = jnp.take_along_axis(found, tokens[:, 1:, None], -1)[..., 0]
      found = jnp.pad(found, ((0, 0), (1, 0)))
      return row_losses(found, old, advantage, weight), found

    def merged(params):
      found = model.token_logprobs(m2, {**variables, 'params': params}, batch)
      found = train_step.at_terms(found, batch)
      of = [estimators.make(kind) for kind in KINDS]
      losses = [learner.Objective(e)(found, batch)[0] for e in of]
      return jnp.stack(losses), found

    params = variables['params']
    got_of, want_of = (_sum_and_grad(f) for f in (merged, rows))
    for k in range(len(KINDS)):
      chosen = jnp.eye(len(KINDS))[k]
      (got, at_terms), grads = got_of(params, chosen)
      (want, _), want_grads = want_of(params, chosen)
      assert abs(got - want) <= 1e-10 * abs(want)
      for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert equivalence.relative(a, b) <= 1e-10
    assert clipped_in_one_branch(batch, np.asarray(at_terms), *BOUNDS['dapo'])


def _sum_and_grad(losses):
  """(params, which) -> (losses · which, log-probabilities) and the gradient."""

  def total(params, which):
    values, logprob = losses(params)
    return values @ which, logprob

  return jax.jit(jax.value_and_grad(total, has_aux=True))


def clipped_in_one_branch(batch, logprob, low, high):
  """Whether terms of one token differ in being clipped."""
  ratio = np.exp(logprob - batch.old_logprob)
  above = (batch.advantage > 0) & (ratio > high)
  clipped = above | ((batch.advantage < 0) & (ratio < low))
  seen = {}
  for row, m in np.argwhere(np.asarray(batch.weight) != 0):
    token = row, int(batch.term_token[row, m])
    seen.setdefault(token, set()).add(bool(clipped[row, m]))
  return any(len(found) == 2 for found in seen.values())
