"""The train step against plain arithmetic on the samples one by one (laws 2, 3)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax import forest
from m2jax.config import ModelConfig
from m2jax.train import feeds
from m2jax.train import step as train_step
from tests import quick, row_model

CFG = ModelConfig(
  vocab_size=19,
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
  num_mtp_modules=2,
  dtype='float64',
  param_dtype='float64',
  unroll_layers=True,
)
SGD = optax.sgd(1.0)  # the update is the gradient
LENGTH, DOCUMENTS, RATE = 7, 6, 1e-2
ROW = 36  # S and M of every batch here: one compiled shape
CONFIG = train_step.StepConfig(
  micro_rows=2,
  mtp_weight=0.3,
  bias_update_rate=RATE,
  activation_max=True,
)


@pytest.fixture(autouse=True)
def float64():
  """Exactness, not rounding, is what these tests are about."""
  with jax.enable_x64():
    yield


def fresh_variables():
  variables = quick.variables(CFG, 0)
  # zero biases would hide an update that overwrites instead of adding
  router = {k: v + 0.01 * jnp.arange(4.0) for k, v in variables['router'].items()}
  return {'params': variables['params'], 'router': router}


@functools.cache
def step_of(micro_rows: int):
  config = dataclasses.replace(CONFIG, micro_rows=micro_rows)
  return train_step.make_step(CFG, SGD, train_step.nll, config)


def documents():
  rng = np.random.default_rng(0)
  return [rng.integers(1, CFG.vocab_size, LENGTH) for _ in range(DOCUMENTS)]


def chains():
  """Rows of five documents and of one."""
  return forest.chain(documents(), row_tokens=ROW, row_terms=ROW)


def after_step(batch, micro_rows=2):
  """variables and metrics after one step from the fresh state."""
  state = train_step.init_state(fresh_variables(), SGD)
  state, metrics = step_of(micro_rows)(state, batch)
  assert int(state.step) == 1
  return state.variables, {k: float(v) for k, v in metrics.items()}


def test_nll_is_the_language_model_loss():
  """On packed documents the step is one of plain next-token training: loss, MTP loss,
  every gradient leaf, and the router bias from the loads of the whole batch."""
  variables = fresh_variables()
  bias = variables['router']

  terms = DOCUMENTS * (LENGTH - 1)

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def one(params, tokens):
    trunk, modules, used, mtp_used = row_model.score(
      {'params': params, 'router': bias}, tokens, CFG
    )
    nll, *mtp = (-jnp.sum(scores) / terms for scores in (trunk, *modules))
    mtp = sum(mtp) / len(mtp)
    return nll + CONFIG.mtp_weight * mtp, (nll, mtp, used[0], mtp_used[0])

  parts = jax.device_get([one(variables['params'], d) for d in documents()])
  grads = jax.tree.map(lambda *leaves: sum(leaves), *[grad for grad, _ in parts])
  nll, mtp = (sum(aux[i] for _, aux in parts) for i in (0, 1))
  used = [aux[2:] for _, aux in parts]
  after, metrics = after_step(chains())
  assert metrics['loss'] == pytest.approx(float(nll), rel=1e-6)  # weights are fp32
  assert metrics['mtp_loss'] == pytest.approx(float(mtp), rel=1e-6)
  for path, new in jax.tree.leaves_with_path(after['params']):
    old, grad = variables['params'], grads
    for key in path:
      old, grad = old[key.key], grad[key.key]
    error = np.linalg.norm((old - new) - grad) / (np.linalg.norm(grad) + 1e-12)
    assert error < 1e-6, path
  for name, ids in (('layers', [u[0] for u in used]), ('mtp', [u[1] for u in used])):
    load = np.bincount(np.concatenate(ids).ravel(), minlength=CFG.num_experts)
    want = bias[name] + RATE * np.sign(load.mean() - load)
    np.testing.assert_allclose(after['router'][name][0], want[0], 1e-6, 1e-9)


def samples():
  """RL-like samples on one stem: shared tokens, several terms on a token."""
  rng = np.random.default_rng(1)
  stem = rng.integers(1, CFG.vocab_size, 5)
  out = []
  for _ in range(5):
    tail = rng.integers(1, 4, 6)
    out.append(
      forest.Sample(
        np.concatenate([stem, tail]), 5, weights=rng.random(6).astype(np.float32)
      )
    )
  return out


def split_rows():
  """The samples as three rows, which cut their tree apart."""
  groups = samples()[:2], samples()[2:3], samples()[3:]
  rows = [forest.merge(group, row_tokens=ROW, row_terms=ROW) for group in groups]
  return jax.tree.map(lambda *parts: np.concatenate(parts), *rows)


def assert_same(a, b):
  for x, y in zip(jax.tree.leaves(a[0]), jax.tree.leaves(b[0]), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-14)
  assert a[1] == pytest.approx(b[1], rel=1e-10)


def test_micro_batches_do_not_matter():
  """Three rows in one pass or two (the last filled with padding) give the same update,
  router biases and metrics: nothing is normalised per micro-batch."""
  assert len(split_rows().tokens) == 3
  assert_same(after_step(split_rows(), 4), after_step(split_rows(), 2))


def test_rows_do_not_matter():
  """The update is the same whether the tree lies in one row or is split over three:
  loads count with multiplicity, so also the router bias (law 3)."""
  whole = forest.merge(samples(), row_tokens=ROW, row_terms=ROW)
  assert len(whole.tokens) == 1 and whole.num_tokens < split_rows().num_tokens
  assert_same(after_step(whole), after_step(split_rows()))


def test_activation_max_is_of_the_residual_stream():
  """The largest |x| before the first norm, where blocks add next to nothing, or before
  the last, where they add most; padding, which is token 0, does not count."""
  step, batch = step_of(2), chains()

  def measured(embed_scale, out_scale):
    variables = fresh_variables()
    params = variables['params']
    params['embed'] = (embed_scale * params['embed']).at[0].set(1e9)
    params['layers']['down'] = out_scale * params['layers']['down']
    state = train_step.init_state(variables, SGD)
    return float(step(state, batch)[1]['activation_max'])

  used = np.unique(np.concatenate(documents()))
  largest = np.max(np.abs(np.asarray(fresh_variables()['params']['embed'])[used]))
  assert measured(1e5, 1.0) == pytest.approx(1e5 * largest, rel=1e-3)
  assert measured(1.0, 1e6) == pytest.approx(10 * measured(1.0, 1e5), rel=1e-3)
  assert measured(1.0, 1e5) > 100 * largest


def test_detach_mtp():
  """Detached, the MTP loss moves the modules alone; trunk, embedding, final norm and
  head get exactly 0. (That it moves them otherwise, the first test shows.)"""

  def nothing(logprob, batch):
    del batch
    return 0.0 * jnp.sum(logprob), {}

  config = dataclasses.replace(CONFIG, mtp_weight=1.0, detach_mtp=True)

  @jax.jit
  def grads_of(variables, batch):
    loss = functools.partial(
      train_step.loss_and_loads, cfg=CFG, objective=nothing, config=config
    )
    return jax.grad(loss, has_aux=True)(*variables.values(), batch)[0]

  grads = grads_of(fresh_variables(), split_rows())
  assert all(np.any(leaf) for leaf in jax.tree.leaves(grads['mtp']['layers']))
  del grads['mtp']
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_state_is_donated_and_goes_on():
  """Steps chain although each destroys the state before it; NumPy and jax batches are
  the same; nothing of the batch is kept."""
  step = step_of(2)
  state = train_step.init_state(fresh_variables(), SGD)
  first = state.variables['params']['embed']
  batch = chains()
  state, metrics = step(state, batch)
  assert first.is_deleted()
  state, again = step(state, jax.tree.map(jnp.asarray, batch))
  assert int(state.step) == 2
  assert float(again['loss']) != float(metrics['loss'])


def test_the_mean_is_over_the_whole_batch():
  """Only the ratio of weights counts, over all micro-batches together; a batch without
  terms gives no gradient, and no division by zero."""
  batch = split_rows()
  scaled = dataclasses.replace(batch, weight=8 * batch.weight)
  assert_same(after_step(scaled, 4), after_step(batch, 2))
  empty = dataclasses.replace(batch, weight=np.zeros_like(batch.weight))
  assert after_step(empty)[1]['grad_norm'] == 0.0


def test_micro_batches_are_padding_to_the_end():
  """Slices hold every row once; what fills the last is seen by none and weighs 0."""
  batch = forest.chain(documents()[:3], row_tokens=LENGTH)
  parts = list(feeds.micro_batches(batch, 2))
  assert [p.tokens.shape for p in parts] == [(2, LENGTH)] * 2
  for field in dataclasses.fields(forest.Forest):
    if getattr(batch, field.name) is not None:
      joined = np.concatenate([getattr(p, field.name) for p in parts])
      np.testing.assert_array_equal(joined[:3], getattr(batch, field.name))
  fill = parts[1]
  assert not np.any(fill.subtree_end[1]) and not np.any(fill.weight[1])
  assert np.all(fill.parent[1] == -1) and np.all(fill.term_sample[1] == -1)
  assert not np.any(fill.multiplicity[1])


def test_a_step_that_is_not_finite_changes_nothing():
  """But counters, which schedules go by: weights, router biases and the moments of the
  optimizer are those of before, bit for bit. The next step trains."""
  optimizer = optax.adam(optax.constant_schedule(0.1))
  step = train_step.make_step(CFG, optimizer, train_step.nll, CONFIG)
  state, _ = step(train_step.init_state(fresh_variables(), optimizer), chains())
  before = jax.device_get(state)
  weight = np.array(chains().weight)
  weight[0, 3] = np.nan
  state, metrics = step(state, dataclasses.replace(chains(), weight=weight))
  after = jax.device_get(state)
  assert metrics['skipped'] == 1 and np.isnan(metrics['loss'])
  assert after.step == 2 and {int(c.count) for c in after.opt_state} == {2}
  moments = [x.opt_state[0]._replace(count=0) for x in (before, after)]
  jax.tree.map(np.testing.assert_array_equal, *moments)
  jax.tree.map(np.testing.assert_array_equal, before.variables, after.variables)
  _, metrics = step(state, chains())
  assert metrics['skipped'] == 0 and np.isfinite(metrics['grad_norm'])


def test_compiler_options_reach_the_compiler():
  """A pod's step has to be compiled as it was planned: an option that got lost would
  show nowhere."""
  config = dataclasses.replace(CONFIG, compiler_options={'xla_no_such_option': True})
  assert isinstance(hash(config), int)  # jitted functions are kept by it
  step = train_step.make_step(CFG, SGD, train_step.nll, config)
  state = train_step.init_state(fresh_variables(), SGD)
  with pytest.raises(jax.errors.JaxRuntimeError, match='xla_no_such_option'):
    step(state, chains())


@pytest.mark.parametrize(
  'settings, modules, message',
  [
    (dict(draft_weight=-1.0), 1, 'StepConfig.draft_weight=-1.0'),
    (dict(draft_top_k=-1), 1, 'StepConfig.draft_top_k=-1'),
    (dict(draft_weight=1.0, detach_mtp=True), 1, 'draft_top_k=0: must be at least 1'),
    (dict(draft_weight=1.0, draft_top_k=4), 1, 'detach_mtp=False: must be True'),
    (dict(draft_top_k=20), 1, 'draft_top_k=20: must be at most 19 .*vocab_size=19'),
    (dict(draft_top_k=4), 0, 'draft_top_k=4: must be at most 0 .*num_mtp_modules=0'),
  ],
)
def test_settings_of_drafts_are_checked(settings, modules, message):
  cfg = dataclasses.replace(CFG, num_mtp_modules=modules)
  with pytest.raises(ValueError, match=message):
    config = train_step.StepConfig(**settings)
    train_step.make_step(cfg, SGD, train_step.nll, config)
