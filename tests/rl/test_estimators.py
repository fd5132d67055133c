"""Each estimator against its closed form, written apart in NumPy; law 3 for each."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import forest
from m2jax.rl import cispo, estimators, learner, ppo_clip
from tests.model import test_forest_equivalence as equivalence
from tests.rl import test_cispo

CLIPPED = ('grpo', 'dapo')
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


@pytest.mark.parametrize('kind', estimators.KINDS)
def test_closed_forms(kind):
  """Value and gradient of every term, on both sides of every bound and sign of Â."""
  logprob, old, advantage, weight = test_cispo.batch(spread=0.7)
  estimator = estimators.make(kind)
  loss = lambda x: estimator.loss(x, old, advantage, weight)
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
  for kind in estimators.KINDS:
    loss = estimators.make(kind).loss
    grad = jax.grad(lambda x, f=loss: f(x, logprob, advantage, weight).sum())(logprob)
    np.testing.assert_allclose(grad, -weight * advantage, rtol=1e-6)


def test_clip_fraction_counts_terms_without_gradient():
  """Of GRPO and DAPO; clipped_mass is the ratio that they lose."""
  logprob, old, advantage, weight = test_cispo.batch(spread=0.7)
  for kind in CLIPPED:
    estimator = estimators.make(kind)
    loss = lambda x, e=estimator: e.loss(x, old, advantage, weight).sum()
    stopped = np.asarray(jax.grad(loss)(logprob)) == 0
    found = estimator.metrics(logprob, old, advantage, weight)
    share = np.sum(weight * stopped)
    assert 0 < share < 1
    np.testing.assert_allclose(found['clip_fraction'], share, rtol=1e-5)
    mass = np.sum(weight * stopped * np.exp(logprob - old))
    np.testing.assert_allclose(found['clipped_mass'], mass, rtol=1e-5)
  none = estimators.make('policy_gradient').metrics(logprob, old, advantage, weight)
  assert none['clip_fraction'] == 0


@pytest.mark.parametrize('kind', estimators.KINDS)
def test_padding_and_extremes_are_finite(kind):
  """Any values where the weight is 0, and ratios that overflow float32."""
  junk = jnp.array([-0.1, -200.0, jnp.nan, -jnp.inf, -0.5])
  old = jnp.array([-200.0, -0.1, -1.0, jnp.nan, -0.5])
  advantage = jnp.array([-1.0, 1.0, jnp.inf, 1.0, 1.0])
  weight = jnp.array([0.5, 0.25, 0.0, 0.0, 0.25])
  estimator = estimators.make(kind)
  loss = lambda x: estimator.loss(x, old, advantage, weight).sum()
  value, grad = jax.value_and_grad(loss)(junk)
  assert np.isfinite(value) and np.isfinite(grad).all()
  assert (grad[2:4] == 0).all() and grad[4] == -0.25
  found = estimator.metrics(junk, old, advantage, weight)
  assert all(np.isfinite(v) for v in found.values())


def test_defaults_are_the_papers():
  """Bounds and averages of each; a given parameter replaces its default only."""
  shown = {k: dataclasses.astuple(estimators.make(k))[2:] for k in estimators.KINDS}
  assert shown['grpo'] == (0.2, 0.2, 'trajectory')
  assert shown['dapo'] == (0.2, 0.28, 'token')
  assert shown['cispo'][-1] == shown['policy_gradient'][-1] == 'prompt'
  config = learner.LearnerConfig(algorithm='dapo', clip_low=0.1)
  assert config.estimator == estimators.Estimator('dapo', 5.0, 0.1, 0.28, 'token')
  assert learner.LearnerConfig(normaliser='token').estimator.normaliser == 'token'


@pytest.mark.parametrize(
  'settings, field',
  [
    ({'algorithm': 'ppo'}, 'algorithm'),
    ({'algorithm': 'grpo', 'clip_low': 1.5}, 'clip_low'),
    ({'algorithm': 'dapo', 'clip_high': -0.1}, 'clip_high'),
    ({'is_weight_max': 0.2}, 'is_weight_max'),
    ({'normaliser': 'sample'}, 'normaliser'),
  ],
)
def test_bad_settings_are_refused(settings, field):
  """When the config is made, naming the field."""
  with pytest.raises(ValueError, match=field):
    learner.LearnerConfig(**settings)
  for function in (ppo_clip.loss, ppo_clip.metrics):
    with pytest.raises(ValueError, match='clip_low'):
      function(*test_cispo.batch(), clip_low=2.0)
  assert cispo.loss  # the public name (docs/design.md)


@functools.cache
def merged_case():
  """Branching samples whose terms are clipped in some branches only."""
  cfg = equivalence.config('float64', num_mtp_modules=0)
  rng = np.random.default_rng(3)
  samples = equivalence.random_samples(rng, count=6, vocab=cfg.vocab_size)
  return cfg, samples, equivalence.variables_for(cfg, 3)


@pytest.mark.parametrize('kind', ['grpo', 'dapo', 'policy_gradient'])
def test_merged_equals_unmerged(kind):
  """Law 3 in float64, value and gradient: each term is clipped by its own ratio."""
  with jax.enable_x64():
    cfg, samples, variables = merged_case()
    batch = forest.merge(samples, row_tokens=48)
    (loss, _), grads = equivalence.forest_grads(
      *variables.values(), batch, cfg, kind=kind
    )
    want, want_grads, _ = equivalence.by_rows(variables, samples, cfg, kind)
    assert abs(loss - want) <= 1e-10 * abs(want)
    for got, other in zip(
      jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True
    ):
      assert equivalence.relative(got, other) <= 1e-10
    if kind in CLIPPED:
      assert _shared_token_is_clipped_in_one_branch(batch, variables, cfg, kind)


def _shared_token_is_clipped_in_one_branch(batch, variables, cfg, kind):
  """Whether terms of one token differ in being clipped."""
  logprobs = np.asarray(equivalence.token_logprobs(variables, batch, cfg))
  low, high = BOUNDS[kind]
  for row in range(len(batch.tokens)):
    clipped = {}
    for m in np.flatnonzero(batch.weight[row]):
      token = int(batch.term_token[row, m])
      ratio = np.exp(logprobs[row, token] - batch.old_logprob[row, m])
      a = batch.advantage[row, m]
      cut = (a > 0 and ratio > high) or (a < 0 and ratio < low)
      clipped.setdefault(token, set()).add(bool(cut))
    if any(len(found) == 2 for found in clipped.values()):
      return True
  return False
