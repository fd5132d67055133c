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
from m2jax.rl.estimators import cispo
from m2jax.train import step as train_step
from tests import quick, row_model

MTP_WEIGHT = 0.3
LENGTHS = (6, 11)
MOST_SAMPLES = 14  # of one call of the row form


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
    unroll_layers=False,
  )
  return dataclasses.replace(base, **changes)


def random_samples(rng, *, count: int, vocab: int) -> list[forest.Sample]:
  """Samples that branch off each other at random depths, with loss on their tails.

  Lengths come from a small set, so that paths that end together are common.
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


def variables_for(cfg: ModelConfig, seed: int):
  """Random variables, norms and router biases away from their initial values."""
  return quick.variables(cfg, seed, noise=0.1, bias=0.05)


def sample_loss(params, router, tokens, columns, experts, cfg):
  """CISPO and λ times MTP of one sample in row form, and the expert ids used.

  `columns`: old log-probabilities, advantages and weights of all its tokens.
  """
  variables = {'params': params, 'router': router}
  trunk, modules, used, mtp_used = row_model.score(variables, tokens, cfg, experts)
  old, advantage, weight = columns
  logprob = jnp.concatenate([jnp.zeros(1, trunk.dtype), trunk])
  ratio = jnp.exp(jax.lax.stop_gradient(logprob) - old)
  total = -jnp.sum(weight * jnp.minimum(ratio, 5.0) * advantage * logprob)
  for k, scores in enumerate(modules, start=1):
    mtp = -jnp.sum(weight[k + 1 :] * scores)
    total += MTP_WEIGHT * mtp / cfg.num_mtp_modules
  return total, (used, mtp_used)


@functools.partial(jax.jit, static_argnames='cfg')
def row_grads(params, router, tokens, columns, experts, cfg):
  """The sum over samples, which are padded to one length, its gradient, and the ids."""

  def loss(params):
    of_one = functools.partial(sample_loss, params, router, cfg=cfg)
    totals, used = jax.vmap(of_one)(tokens, columns, experts)
    return jnp.sum(totals), used

  return jax.value_and_grad(loss, has_aux=True)(params)


def in_rows(variables, samples, cfg):
  """Loss, gradient and expert ids of the samples, each on its own: ids of trunk and of
  modules, by layer [samples, n, k]. Weights of 0 make padding count for nothing."""
  shape = MOST_SAMPLES, max(LENGTHS)
  tokens, columns = np.zeros(shape, np.int32), np.zeros((MOST_SAMPLES, 3, shape[1]))
  experts = np.full((*shape, cfg.num_layers, cfg.experts_per_token), -1, np.int32)
  for i, s in enumerate(samples):
    n = len(s.tokens)
    tokens[i, :n] = s.tokens
    columns[i, :, s.prompt_length : n] = s.old_logprobs, s.advantages, s.weights
    if s.experts is not None:
      experts[i, :n] = s.experts
  cfg = dataclasses.replace(cfg, unroll_layers=True, remat='none')  # not its business
  (loss, used), grads = row_grads(*variables.values(), tokens, columns, experts, cfg)
  return loss, grads, jax.device_get(used)


def by_rows(variables, samples, cfg):
  """Loss, its gradient and the expert loads of the samples, each on its own."""
  loss, grads, used = in_rows(variables, samples, cfg)
  loads = {name: np.zeros(bias.shape) for name, bias in variables['router'].items()}
  for name, layers in zip(('layers', 'mtp'), used, strict=True):
    for layer, chosen in enumerate(layers):
      ahead = layer + 1 if name == 'mtp' else 0
      for sample, ids in zip(samples, chosen, strict=False):
        counted = ids[: max(0, len(sample.tokens) - ahead)]
        np.add.at(loads[name][layer], counted.ravel(), 1)
  return loss, grads, loads


def recorded(variables, samples, cfg, replay=True):
  """The samples with expert ids that are not the router's own, so that replay acts;
  or with -1, which leaves the choice and needs no other program."""
  _, _, (used, _) = in_rows(variables, samples, cfg)
  out = []
  for i, sample in enumerate(samples):
    ids = np.stack(used, 2)[i, : len(sample.tokens)] + np.array([0, 1])
    ids = ids % cfg.num_experts if replay else np.full_like(ids, -1)
    out.append(dataclasses.replace(sample, experts=ids.astype(np.int32)))
  assert shared_paths_agree(out)
  return out


def objective(logprob, batch):
  terms = cispo.loss(logprob, batch.old_logprob, batch.advantage, batch.weight)
  return jnp.sum(terms), {}


@functools.partial(jax.jit, static_argnames='cfg')
def forest_loss(params, router, batch, cfg):
  config = train_step.StepConfig(mtp_weight=MTP_WEIGHT)
  return train_step.loss_and_loads(params, router, batch, cfg, objective, config)


@functools.partial(jax.jit, static_argnames='cfg')
def forest_grads(params, router, batch, cfg):
  grad = jax.value_and_grad(forest_loss.__wrapped__, has_aux=True)
  return grad(params, router, batch, cfg)


@functools.partial(jax.jit, static_argnames='cfg')
def token_logprobs(variables, batch, cfg):
  return model.token_logprobs(model.M2(cfg), variables, batch)


def relative(a, b):
  a, b = np.asarray(a), np.asarray(b)
  return float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-300))


def merged(samples, *, row_tokens=40, rows=None):
  return forest.merge(samples, row_tokens=row_tokens, rows=rows, row_terms=40)


def in_halves(samples):
  """Two forests of half of the samples, in shape that of all samples in six rows."""
  middle = len(samples) // 2
  halves = [merged(part, rows=3) for part in (samples[:middle], samples[middle:])]
  return jax.tree.map(lambda *x: np.concatenate(x), *halves)


def check(cfg, variables, batches, want, tolerance):
  """Loss, every gradient leaf and the loads of each forest are `want`, `by_rows`'s."""
  loss, grads, counted = want
  for batch in batches:
    (got, (_, loads)), got_grads = forest_grads(*variables.values(), batch, cfg)
    assert abs(got - loss) <= tolerance * abs(loss)
    for (path, leaf), other in zip(
      jax.tree.leaves_with_path(got_grads), jax.tree.leaves(grads), strict=True
    ):
      assert relative(leaf, other) <= tolerance, path
    for name, load in loads.items():
      np.testing.assert_array_equal(load, counted[name])


@pytest.mark.parametrize(
  'replay, numerics', [(False, 'ordinary'), (True, 'ordinary'), (True, 'invariant')]
)
def test_float64(replay, numerics):
  """Loss and every gradient leaf agree to 1e-10, however the samples are divided into
  rows, and with expert ids that are not the router's own."""
  with jax.enable_x64():
    cfg = config('float64')
    rng = np.random.default_rng(int(replay))
    samples = random_samples(rng, count=9, vocab=cfg.vocab_size)
    variables = variables_for(cfg, 0)
    samples = recorded(variables, samples, cfg, replay)
    batches = merged(samples, rows=6), in_halves(samples)
    want = by_rows(variables, samples, cfg)
    check(config('float64', numerics=numerics), variables, batches, want, 1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
  'seed, row_tokens, changes',
  [
    (0, 40, dict(num_mtp_modules=3, unroll_layers=True)),
    (1, 256, dict(num_mtp_modules=1)),
  ],
)
def test_float64_of_other_models(seed, row_tokens, changes):
  """The same with more modules, unrolled, and with trees that fill one row."""
  with jax.enable_x64():
    cfg = config('float64', **changes)
    rng = np.random.default_rng(seed)
    samples = random_samples(rng, count=9, vocab=cfg.vocab_size)
    variables = variables_for(cfg, seed)
    batch = forest.merge(samples, row_tokens=row_tokens)
    check(cfg, variables, [batch], by_rows(variables, samples, cfg), 1e-10)


def test_float32_with_replay():
  """In fp32 with the expert ids recorded, the relative error stays below 1e-5."""
  with jax.enable_x64():
    cfg = config('float64')
    samples = random_samples(np.random.default_rng(5), count=9, vocab=cfg.vocab_size)
    variables = variables_for(cfg, 5)
    samples = recorded(variables, samples, cfg)
    want = jax.device_get(by_rows(variables, samples, cfg))
  variables = jax.tree.map(np.float32, variables)
  check(config('float32'), variables, [merged(samples)], want, 1e-5)


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
    scores = token_logprobs(variables, batch, cfg)
    return np.asarray(train_step.at_terms(scores, batch)), batch

  before, batch = score(branches)
  changed = [branches[0], np.concatenate([stem, [12, 7, 7, 7, 7]]), branches[2]]
  after, _ = score(changed)
  other = batch.term_sample != 1
  np.testing.assert_array_equal(before[other], after[other])
  assert not np.array_equal(before[~other], after[~other])


@pytest.mark.long
def test_row_split_does_not_matter():
  """The loss is the same however the samples fall into rows (to fp64 rounding)."""
  with jax.enable_x64():
    cfg = config('float64', num_mtp_modules=1)
    samples = random_samples(np.random.default_rng(2), count=12, vocab=cfg.vocab_size)
    variables = variables_for(cfg, 2)
    losses = [
      forest_loss(*variables.values(), forest.merge(samples, row_tokens=n), cfg)[0]
      for n in (32, 57, 300)
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-12)


@pytest.mark.long
def test_scan_equals_unrolled():
  """Scanned, unrolled and rematerialised layers are the same function."""
  cfg = config('float32')
  variables = variables_for(cfg, 4)
  batch = forest.causal(np.arange(1, 15).reshape(2, 7))
  (value, _), grads = forest_grads(*variables.values(), batch, cfg)
  for unroll, remat in ((True, 'layer'), (False, 'attention')):
    other = dataclasses.replace(cfg, unroll_layers=unroll, remat=remat)
    (value2, _), grads2 = forest_grads(*variables.values(), batch, other)
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

  @functools.partial(jax.jit, static_argnames='run')
  @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
  def loss(x, weights, kernels, run):
    return jnp.sum(jnp.sin(run(x, ids, weights, *kernels)))

  on_cpu = loss(x, weights, kernels, run=experts_lib.apply)
  elsewhere = loss(x, weights, kernels, run=experts_lib.grouped)
  for a, b in zip(jax.tree.leaves(on_cpu), jax.tree.leaves(elsewhere), strict=True):
    assert relative(a, b) < 1e-5
