"""The top-K KL of the MTP modules against dense distributions of single samples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import forest
from m2jax.config import ModelConfig
from m2jax.layers import draft_loss
from m2jax.sharding import ONE_DEVICE
from m2jax.train import step as train_step
from tests import quick, row_model

MODULES, LENGTH, TOP_K = 2, 9, 4
CFG = ModelConfig(
  vocab_size=17,
  num_layers=1,
  embed_dim=8,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  rotary_dim=4,
  num_experts=4,
  experts_per_token=2,
  expert_dim=4,
  rope_theta=100.0,
  num_mtp_modules=MODULES,
  dtype='float64',
  param_dtype='float64',
)
WEIGHT = 0.7


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64():
    yield


def branching_samples():
  """Samples that branch off each other, at a prompt of one token, too: there module 2
  has no state for the first two tokens of a response."""
  rng = np.random.default_rng(0)
  samples = []
  for stem in (1, 1, 4, 6, 6):
    path = samples[-1].tokens[:stem] if samples else rng.integers(1, 17, stem)
    tokens = np.concatenate([path, rng.integers(1, 17, LENGTH - stem)])
    prompt = min(stem, 3)
    weights = rng.random(LENGTH - prompt).astype(np.float32)
    samples.append(forest.Sample(tokens.astype(np.int32), prompt, weights=weights))
  return samples


def dense(mtp, rest, tokens, weight):
  """Loss of one sample, and kl and overlap by module: full softmax, row by row."""
  params = {**rest['params'], 'mtp': mtp}
  (trunk, *modules), *_ = row_model.states(dict(rest, params=params), tokens, CFG)
  found = []
  for k, states in enumerate(modules, start=1):
    p, q = (jax.nn.softmax(x @ params['head']) for x in (trunk[k:-1], states[:-1]))
    most = jnp.argsort(-p, axis=1)[:, :TOP_K]
    p, q = (jnp.take_along_axis(x, most, 1) for x in (p, q))
    overlap = jnp.sum(jnp.minimum(p, q), axis=1)
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    kl = jnp.sum(p * (jnp.log(p) - jnp.log(q)), axis=1)
    found.append([weight[k + 1 :] @ kl, weight[k + 1 :] @ overlap])
  return sum(kl for kl, _ in found) / MODULES, found


def dense_sums(variables):
  """Over the samples: (loss, kl and overlap by module), gradient of the modules."""
  one = jax.jit(jax.value_and_grad(dense, has_aux=True))
  parts = [
    one(
      variables['params']['mtp'],
      variables,
      jnp.asarray(s.tokens),
      np.pad(np.float64(s.weights), (s.prompt_length, 0)),
    )
    for s in branching_samples()
  ]
  return jax.tree.map(lambda *x: np.sum(np.stack(x), axis=0), *parts)


def merged(variables):
  """(Loss, metrics), gradient of the samples as a forest, of the drafts alone."""
  config = train_step.StepConfig(
    mtp_weight=0.0,
    detach_mtp=True,
    draft_weight=WEIGHT,
    draft_top_k=TOP_K,
    draft_rest=False,
  )
  batch = forest.merge(branching_samples(), row_tokens=24)
  assert batch.num_tokens < 5 * LENGTH and len(batch.tokens) > 1

  def loss(params):
    nothing = lambda logprob, batch: (jnp.zeros((), logprob.dtype), {})
    value, (metrics, _) = train_step.loss_and_loads(
      params, variables['router'], batch, CFG, nothing, config
    )
    return value, metrics

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables['params'])


def relative(a, b):
  return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_forest_is_the_dense_kl_of_its_samples():
  """Value, and gradient of the modules; trunk, embedding, norm and head have a gradient
  of exactly 0."""
  variables = quick.variables(CFG, 0, noise=0.3, bias=0.05)
  (value, metrics), grads = merged(variables)
  (loss, found), gradients = dense_sums(variables)
  assert value == pytest.approx(WEIGHT * loss, rel=1e-10)
  for (path, got), want in zip(
    jax.tree.leaves_with_path(grads['mtp']), jax.tree.leaves(gradients), strict=True
  ):
    assert relative(got, WEIGHT * want) < 1e-10, path
  rest = {name: leaf for name, leaf in grads.items() if name != 'mtp'}
  assert len(jax.tree.leaves(rest)) > 10
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(rest))
  for k, (kl, overlap) in enumerate(found, start=1):
    assert metrics[f'draft_kl/{k}'] == pytest.approx(kl, rel=1e-10)
    assert metrics[f'draft_overlap/{k}'] == pytest.approx(overlap, rel=1e-10)


def with_rest(p, k):
  """Probabilities of the k most likely words of p, and the rest as one more."""
  best = np.argsort(-p, axis=-1)[..., :k]

  def of(x):
    x = np.take_along_axis(x, best, -1)
    return np.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1)

  return of


@pytest.mark.parametrize('rest', [False, True])
@pytest.mark.parametrize('top_k', [1, 5, 17])
def test_of_random_states(top_k, rest):
  """K = V is the plain KL of all words and overlap 1 − total variation; otherwise the
  KL with the rest is below it, and with one word renormalised there is none. The
  teacher has no gradient."""
  rng = np.random.default_rng(top_k)
  trunk, module = rng.normal(size=(2, 2, 6, 8))
  head = rng.normal(size=(8, 17))
  batch = forest.causal(rng.integers(0, 17, (2, 6)))
  comparison = draft_loss.Comparison(top_k, rest)

  def drafts(trunk, module):
    params = {'head': head}
    teacher = draft_loss.best_words(params, trunk, comparison, ONE_DEVICE)
    _, found = draft_loss.score(
      params, module, batch, ONE_DEVICE, depth=2, teacher=teacher
    )
    return jnp.sum(found.kl), found

  gradient = jax.jit(jax.grad(drafts, (0, 1), has_aux=True))
  (d_trunk, d_module), (kl, overlap) = jax.device_get(gradient(trunk, module))
  assert not np.any(d_trunk) and not np.any(d_module[:, :2])
  assert not np.any(kl[:, :2]) and not np.any(overlap[:, :2])
  p, q = (np.exp(x @ head)[:, 2:] for x in (trunk, module))
  p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
  plain = np.sum(p * np.log(p / q), axis=-1)
  kl, overlap, d_module = kl[:, 2:], overlap[:, 2:], d_module[:, 2:]
  if top_k == 17:
    np.testing.assert_allclose(kl, plain, rtol=1e-10)
    np.testing.assert_allclose(overlap, 1 - np.abs(p - q).sum(-1) / 2, rtol=1e-12)
    np.testing.assert_allclose(d_module, (q - p) @ head.T, atol=1e-12)
    return
  words = with_rest(p, top_k)
  want = np.minimum(words(p), words(q))[..., :-1].sum(-1)
  np.testing.assert_allclose(overlap, want, rtol=1e-12)
  if rest:
    want = np.sum(words(p) * np.log(words(p) / words(q)), axis=-1)
    np.testing.assert_allclose(kl, want, rtol=1e-10)
    assert np.all(kl < plain)
  elif top_k == 1:
    assert not np.any(kl) and not np.any(d_module)


def test_rest_of_nothing_is_finite():
  """In float32 the words' probabilities may add up to more than 1."""
  p = jax.nn.log_softmax(jnp.array([[3.0, 1.0, -200.0]], jnp.float32)) + 1e-6
  q = jax.nn.log_softmax(jnp.array([[1.0, 9.0, -50.0]], jnp.float32)) + 1e-6
  value, gradient = jax.value_and_grad(lambda q: draft_loss.with_rest(p, q)[0])(q)
  want = np.sum(np.exp(np.float64(p)) * np.float64(p - q))
  assert value == pytest.approx(want, rel=1e-5)
  np.testing.assert_allclose(gradient, -jnp.exp(p), atol=1e-6)
