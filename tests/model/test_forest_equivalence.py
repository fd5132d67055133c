"""Law 3: the merged forest's loss and gradient are those of the samples alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import forest, model
from m2jax.config import ModelConfig
from m2jax.moe import experts as experts_lib
from m2jax.rl import cispo
from m2jax.train import step as train_step
from tests import row_model

MTP_WEIGHT = 0.3
LENGTHS = (6, 11)


def config(dtype: str, **changes) -> ModelConfig:
  base = ModelConfig(
    vocab_size=23,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rotary_dim=4,
    num_experts=6,
    experts_per_token=2,
    expert_dim=8,
    rope_theta=100.0,
    num_mtp_modules=2,
    dtype=dtype,
    param_dtype=dtype,
    unroll_layers=True,
  )
  return dataclasses.replace(base, **changes)


def random_samples(rng, *, count: int, vocab: int) -> list[forest.Sample]:
  """Samples that branch off each other at random depths, with loss on their tails.

  Lengths come from a small set, so that the row side compiles a few times only.
  """
  paths = [rng.integers(1, vocab, rng.choice(LENGTHS)) for _ in range(2)]
  while len(paths) < count:
    base = paths[rng.integers(len(paths))]
    cut = rng.integers(1, len(base) + 1)
    length = rng.choice([n for n in (*LENGTHS, max(LENGTHS)) if n >= cut])
    paths.append(np.concatenate([base[:cut], rng.integers(1, vocab, length - cut)]))
  samples = []
  for path in paths:
    prompt = int(rng.integers(1, len(path)))
    n = len(path) - prompt
    samples.append(
      forest.Sample(
        path.astype(np.int32),
        prompt,
        old_logprobs=rng.normal(-3, 1, n).astype(np.float32),
        advantages=rng.normal(size=n).astype(np.float32),
        weights=rng.random(n).astype(np.float32),
      )
    )
  return samples


@functools.partial(jax.jit, static_argnames='cfg')
def variables_for(cfg: ModelConfig, seed: int):
  """Random variables, norms and router biases away from their initial values."""
  variables = model.M2(cfg).init(jax.random.key(seed), jnp.zeros((1, 2), jnp.int32))
  params = jax.tree.map(
    lambda a: a + 0.1 * jax.random.normal(jax.random.key(7), a.shape, a.dtype),
    dict(variables['params']),
  )
  router = {
    name: 0.05 * jax.random.normal(jax.random.key(3), bias.shape, bias.dtype)
    for name, bias in variables['router'].items()
  }
  return {'params': params, 'router': router}


@functools.partial(jax.jit, static_argnames='cfg')
def sample_loss(params, router, tokens, old, advantage, weight, experts, cfg):
  """CISPO and MTP sums of one sample in row form; columns are over all n tokens."""
  variables = {'params': params, 'router': router}
  trunk, modules, used, mtp_used = row_model.score(variables, tokens, cfg, experts)
  logprob = jnp.concatenate([jnp.zeros(1, trunk.dtype), trunk])
  ratio = jnp.exp(jax.lax.stop_gradient(logprob) - old)
  total = -jnp.sum(weight * jnp.minimum(ratio, 5.0) * advantage * logprob)
  mtp = 0.0
  for k, scores in enumerate(modules, start=1):
    mtp -= jnp.sum(weight[k + 1 :] * scores)
  return total, (mtp, used, mtp_used)


def row_loss(params, router, samples, cfg):
  """Σ over samples of CISPO terms + λ/mtp Σ_k of MTP terms, each sample on its own."""
  total, mtp = 0.0, 0.0
  for s in samples:
    columns = [
      np.pad(np.float64(c), (s.prompt_length, 0))
      for c in (s.old_logprobs, s.advantages, s.weights)
    ]
    tokens = jnp.asarray(s.tokens)
    loss, (extra, _, _) = sample_loss(params, router, tokens, *columns, s.experts, cfg)
    total, mtp = total + loss, mtp + extra
  return total + MTP_WEIGHT * mtp / max(cfg.num_mtp_modules, 1)


def objective(logprob, batch):
  terms = cispo.loss(logprob, batch.old_logprob, batch.advantage, batch.weight)
  return jnp.sum(terms), {}


@functools.partial(jax.jit, static_argnames='cfg')
def forest_loss(params, router, batch, cfg):
  config = train_step.StepConfig(mtp_weight=MTP_WEIGHT)
  return train_step.loss_and_loads(params, router, batch, cfg, objective, config)


def relative(a, b):
  return float(jnp.linalg.norm(a - b) / (jnp.linalg.norm(b) + 1e-300))


@pytest.mark.parametrize(
  'seed, modules, row_tokens, unroll', [(0, 3, 40, True), (1, 1, 256, False)]
)
def test_float64(seed, modules, row_tokens, unroll):
  """Loss and every gradient leaf agree to 1e-10, whether trees are split or whole."""
  with jax.enable_x64():
    cfg = config('float64', num_mtp_modules=modules, unroll_layers=unroll)
    rng = np.random.default_rng(seed)
    samples = random_samples(rng, count=9, vocab=cfg.vocab_size)
    variables = variables_for(cfg, seed)
    batch = forest.merge(samples, row_tokens=row_tokens)
    merged = jax.value_and_grad(forest_loss, has_aux=True)
    (loss, (_, loads)), grads = merged(*variables.values(), batch, cfg)
    want, want_grads = jax.value_and_grad(row_loss)(*variables.values(), samples, cfg)
    assert abs(loss - want) <= 1e-10 * abs(want)
    for path, leaf in jax.tree.leaves_with_path(grads):
      other = want_grads
      for key in path:
        other = other[key.key]
      assert relative(leaf, other) <= 1e-10, path
    counted = expected_loads(variables, samples, cfg)
    for name, load in loads.items():
      np.testing.assert_array_equal(load, counted[name])


def expected_loads(variables, samples, cfg):
  """Expert loads of the samples one by one: what multiplicity must reproduce."""
  loads = {name: np.zeros(bias.shape) for name, bias in variables['router'].items()}
  for s in samples:
    zeros = np.zeros(len(s.tokens))
    _, (_, used, mtp_used) = sample_loss(
      *variables.values(), jnp.asarray(s.tokens), zeros, zeros, zeros, s.experts, cfg
    )
    for name, ids in (('layers', used), ('mtp', mtp_used)):
      for layer, chosen in enumerate(ids):
        np.add.at(loads[name][layer], np.asarray(chosen).ravel(), 1)
  return loads


def test_float32_with_replay():
  """In fp32 with the expert ids recorded, the relative error stays below 1e-5."""
  cfg = config('float32', num_mtp_modules=0)
  samples = random_samples(np.random.default_rng(5), count=9, vocab=cfg.vocab_size)
  variables = variables_for(cfg, 5)
  replayed = []
  for sample in samples:
    zeros = np.zeros(len(sample.tokens))
    _, (_, used, _) = sample_loss(
      *variables.values(), jnp.asarray(sample.tokens), zeros, zeros, zeros, None, cfg
    )
    # record something else than the router's own choice, so that replay is what acts
    ids = (np.stack(used, 1) + np.array([0, 1])) % cfg.num_experts
    replayed.append(dataclasses.replace(sample, experts=ids.astype(np.int32)))
  batch = forest.merge(replayed, row_tokens=64)
  assert shared_paths_agree(replayed)
  (loss, _), grads = jax.value_and_grad(forest_loss, has_aux=True)(
    *variables.values(), batch, cfg
  )
  want, want_grads = jax.value_and_grad(row_loss)(*variables.values(), replayed, cfg)
  assert abs(loss - want) <= 1e-5 * abs(want)
  for (path, leaf), other in zip(
    jax.tree.leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
  ):
    assert relative(leaf, other) <= 1e-5, path


def shared_paths_agree(samples):
  """Whether recorded ids agree on shared paths: else no forest is exact."""
  for a in samples:
    for b in samples:
      n = min(len(a.tokens), len(b.tokens))
      differs = np.flatnonzero(a.tokens[:n] != b.tokens[:n])
      shared = differs[0] if len(differs) else n
      if not np.array_equal(a.experts[:shared], b.experts[:shared]):
        return False
  return True


def test_branches_do_not_touch():
  """Changing one branch leaves the log-probabilities of the others bit-identical."""
  cfg = config('float32')
  variables = variables_for(cfg, 1)
  stem = np.arange(1, 9)
  branches = [np.concatenate([stem, [k, 3, k, 5, 2]]) for k in (10, 12, 14)]

  def score(branches):
    batch = forest.merge([forest.Sample(b, 4) for b in branches], row_tokens=64)
    scores = model.token_logprobs(model.M2(cfg), variables, batch)
    return np.asarray(train_step.at_terms(scores, batch)), batch

  before, batch = score(branches)
  changed = [branches[0], np.concatenate([stem, [12, 7, 7, 7, 7]]), branches[2]]
  after, _ = score(changed)
  other = batch.term_sample != 1
  np.testing.assert_array_equal(before[other], after[other])
  assert not np.array_equal(before[~other], after[~other])


def test_row_split_does_not_matter():
  """The loss is the same however the samples fall into rows (to fp64 rounding)."""
  with jax.enable_x64():
    cfg = config('float64')
    samples = random_samples(np.random.default_rng(2), count=12, vocab=cfg.vocab_size)
    variables = variables_for(cfg, 2)
    losses = [
      forest_loss(*variables.values(), forest.merge(samples, row_tokens=n), cfg)[0]
      for n in (32, 57, 300)
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-12)


@pytest.mark.parametrize('scan', [True, False])
def test_scan_equals_unrolled(scan):
  """Scanned, unrolled and rematerialised layers are the same function."""
  cfg = config('float32')
  variables = variables_for(cfg, 4)
  batch = forest.causal(np.arange(1, 15).reshape(2, 7))
  other = dataclasses.replace(cfg, unroll_layers=not scan, remat=True)
  params, router = variables.values()
  merged = jax.value_and_grad(forest_loss, has_aux=True)
  (value, _), grads = merged(params, router, batch, cfg)
  (value2, _), grads2 = merged(params, router, batch, other)
  np.testing.assert_allclose(value, value2, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads2), strict=True):
    assert relative(a, b) < 1e-5


def test_experts_of_all_platforms_agree():
  """Tiled and grouped experts are the same function, gradients included."""
  rng = np.random.default_rng(0)
  x = jnp.array(rng.normal(size=(50, 16)), jnp.float32)
  ids = jnp.array(np.stack([rng.permutation(6)[:2] for _ in range(50)]))
  weights = jnp.array(rng.random((50, 2)), jnp.float32)
  shapes = [(6, 16, 8), (6, 16, 8), (6, 8, 16)]
  kernels = [jnp.array(0.3 * rng.normal(size=s), jnp.float32) for s in shapes]

  def value_and_grads(run):
    def loss(x, weights, kernels):
      return jnp.sum(jnp.sin(run(x, ids, weights, *kernels)))

    return jax.value_and_grad(loss, (0, 1, 2))(x, weights, kernels)

  on_cpu = value_and_grads(experts_lib.apply)
  elsewhere = value_and_grads(experts_lib.grouped)
  for a, b in zip(jax.tree.leaves(on_cpu), jax.tree.leaves(elsewhere), strict=True):
    assert relative(a, b) < 1e-5
