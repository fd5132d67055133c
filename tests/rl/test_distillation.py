"""On-policy distillation on merged trees: laws 2 and 3.

Updates of the learner in float64 against samples one by one, by dense models and
formulas written apart from m2jax.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import forest
from m2jax.rl import distillation, passes
from m2jax.rl.estimators import cispo
from tests import quick, row_model
from tests.rl import test_inputs

# One has the student's shape, the other another depth, width and number of experts.
OTHER = dataclasses.replace(
  test_inputs.CFG, num_layers=2, num_experts=6, num_mtp_modules=0
)
MODELS = {'': OTHER, 'b': test_inputs.CFG}
WEIGHT, REWARD, RATIO_MAX, TOP_K = 0.7, 0.4, 1.1, 3
DOMAINS = 'a', 'b', ''  # of the groups; a's teacher is that of the others


def config(form, **changes):
  settings = dict(teacher='one', teachers={'b': 'two'}, form=form, weight=WEIGHT)
  settings |= dict(reward_weight=REWARD, ratio_max=RATIO_MAX, top_k=TOP_K)
  return distillation.DistillationConfig(**settings | changes)


def teachers():
  return {
    name: distillation.Teacher(cfg, variables(name)) for name, cfg in MODELS.items()
  }


@functools.cache
def variables(name):
  return quick.variables(MODELS[name], 2 + len(name), noise=0.1, bias=0.05)


def group(index, equal=False):
  """The group of `test_inputs` in a domain."""
  family = f'{DOMAINS[index]}/f' if DOMAINS[index] else 'f'
  of_all = dict(success=0.5) if equal else {}
  return [
    (dataclasses.replace(end, family=family, **of_all), turns)
    for end, turns in test_inputs.group(index)
  ]


def log_softmax(cfg, params, router, ids):
  """Scores [n, LENGTH, V] of the word at each place, given those before it."""

  def one(tokens, ids):
    (trunk, *_), _, _ = row_model.states(
      {'params': params, 'router': router}, tokens, cfg, ids
    )
    scores = jax.nn.log_softmax(trunk[:-1] @ params['head'])
    return jnp.pad(scores, ((1, 0), (0, 0)))

  return jax.vmap(one)(test_inputs.samples()['tokens'], ids)


def dense_loss(params, scored_by, form):
  """CISPO's loss and the distillation's."""
  of = test_inputs.samples()
  scores = log_softmax(
    test_inputs.CFG, params, test_inputs.start(1)['router'], of['experts']
  )
  domain = np.array([DOMAINS[t // 4] for t in of['trajectory']])
  teacher = jnp.where((domain == 'b')[:, None, None], scored_by['b'], scored_by[''])
  at = lambda x: jnp.take_along_axis(x, of['tokens'][..., None], -1)[..., 0]
  live = of['weight'] > 0
  logprob = at(scores)
  const = jax.lax.stop_gradient
  ratio = const(jnp.exp(jnp.where(live, logprob - of['old'], 0)))
  successes = np.array(test_inputs.SUCCESSES)
  gain = np.float32(successes - successes.mean())[of['trajectory'] % 4]
  gain = np.float64(np.float32(REWARD) * gain)  # advantages are stored in float32
  reward = gain[:, None] * jnp.minimum(ratio, 5.0) * logprob
  if form == 'sampled':
    value = logprob - at(teacher)
    taught = const(jnp.minimum(ratio, RATIO_MAX) * value) * logprob
  else:
    words = jnp.argsort(-teacher, axis=-1)[..., :TOP_K]
    p, q = (jnp.take_along_axis(jnp.exp(x), words, -1) for x in (scores, teacher))
    p, q = (jnp.append(x, 1 - x.sum(-1, keepdims=True), -1) for x in (p, q))
    value = taught = jnp.sum(p * (jnp.log(p) - jnp.log(q)), -1)
  mean = lambda x: jnp.sum(of['weight'] * jnp.where(live, x, 0))
  b = jnp.array(domain == 'b')[:, None]
  kl = {
    name: mean(jnp.where(own, value, 0)) / mean(own * jnp.ones_like(value))
    for name, own in (('b', b), ('others', ~b))
  }
  return mean(WEIGHT * taught - reward), (kl, ratio[live])


@pytest.mark.long
@pytest.mark.parametrize('form', distillation.FORMS)
@pytest.mark.parametrize('layout', test_inputs.LAYOUTS)
def test_two_teachers_on_trees_equal_samples(layout, form, monkeypatch):
  """The loss, the metrics and the weights after an update, to 1e-10, beside CISPO; one
  teacher has another shape. A teacher reads no row without its terms."""
  scored = []
  of_rows = passes.Passes.of_rows

  def counted(self, weights, rows):
    scored.append(len(rows.tokens))
    return of_rows(self, weights, rows)

  monkeypatch.setattr(passes.Passes, 'of_rows', counted)
  with jax.enable_x64():
    estimator = cispo.Config(normaliser='trajectory')
    one = test_inputs.learner_of(layout, estimator, config(form), teachers())
    credits_ = [one.credit(group(i)) for i in range(test_inputs.GROUPS)]
    batch = one.pack(credits_).batch
    found = one.update(credits_)
    if layout == 'rows':
      of = batch.rows.term_teacher
      assert scored == [np.sum((of == i).any(1)) for i in range(2)]
      assert max(scored) < len(of)
    else:
      assert batch.chunked >= 2 and not scored

    none = lambda cfg: np.full(
      (*test_inputs.samples()['tokens'].shape, cfg.num_layers, 2), -1
    )
    scored_by = {
      name: jax.jit(functools.partial(log_softmax, cfg))(
        *variables(name).values(), none(cfg)
      )
      for name, cfg in MODELS.items()
    }
    loss = functools.partial(dense_loss, scored_by=scored_by, form=form)
    start = test_inputs.start(1)['params']
    (value, (kl, ratio)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
      start
    )
    assert 0 < np.mean(ratio > RATIO_MAX) < 1
    assert found['loss'] == pytest.approx(float(value), rel=1e-10)
    for name, want in kl.items():
      assert found[f'distillation_kl/{name}'] == pytest.approx(float(want), rel=1e-10)
    got = jax.tree.map(np.subtract, one.state.variables['params'], start)
    for (path, a), g in zip(
      jax.tree.leaves_with_path(got), jax.tree.leaves(gradient), strict=True
    ):
      b = -test_inputs.RATE * g
      if 'mtp' in str(path):
        assert not np.any(a)
      else:
        assert np.linalg.norm(a - b) <= 1e-10 * np.linalg.norm(b) > 0, path


def test_the_gradients_are_those_of_the_reverse_kl():
  """Over all tokens of π with their probabilities: 'sampled' has the gradient of
  KL(π ‖ τ) on-policy."""
  with jax.enable_x64():
    rng = np.random.default_rng(0)
    logits, teacher = rng.normal(size=(2, 7)), jax.nn.log_softmax(rng.normal(size=7))
    own = jax.nn.log_softmax(logits[0])
    shape = dict(dtype=np.int32, shape=(1, 7))
    batch = dataclasses.replace(
      forest.merge([forest.Sample(np.arange(8), 1)]),
      term_teacher=np.zeros(**shape),
      weight=np.exp(own)[None],
      old_logprob=np.asarray(own)[None],
      teacher_logprob=np.asarray(teacher)[None],
    )
    alone = dict(teachers={}, weight=1.0)

    def sampled(x):
      logprob = jax.nn.log_softmax(x)[None]
      return distillation.loss(config('sampled', **alone), logprob, batch, None)[0]

    def kl(x):
      p = jax.nn.log_softmax(x)
      return jnp.sum(jnp.exp(p) * (p - teacher))

    want = jax.grad(kl)(logits[0])
    np.testing.assert_allclose(jax.grad(sampled)(logits[0]), want, atol=1e-12)


def test_padding_and_terms_without_a_teacher_count_nothing():
  batch = dataclasses.replace(
    forest.merge([forest.Sample(np.arange(5), 1)]),
    term_teacher=np.array([[0, -1, 1, 0]], np.int32),
    weight=np.float32([[0.5, 0.5, 0.5, 0]]),
    old_logprob=np.float32([[-1, np.nan, -1, np.nan]]),
    teacher_logprob=np.float32([[-2, np.nan, -1.5, np.inf]]),
  )
  logprob = jnp.array([[-1.0, -1, -1, jnp.nan]])

  def loss(x):
    total, sums = distillation.loss(config('sampled', weight=1.0), x, batch, None)
    return total, sums

  gradient, sums = jax.grad(loss, has_aux=True)(logprob)
  np.testing.assert_allclose(gradient, [[0.5, 0, 0.25, 0]], rtol=1e-6)
  found = distillation.finish({name: float(x) for name, x in sums.items()})
  assert found == pytest.approx({'distillation_kl/others': 1, 'distillation_kl/b': 0.5})


def test_a_token_of_two_teachers():
  """Of terms at one token, those of one teacher count with its words."""
  rows = forest.merge(
    [
      forest.Sample(np.arange(4), 2, teachers=np.full(2, 0)),
      forest.Sample(np.array([0, 1, 2, 7]), 2, teachers=np.full(2, 1)),
    ]
  )
  one = object.__new__(distillation.Teachers)
  one._teachers, one._best, one._dtype = [None, None], 2, np.float32

  def score(index, batch):
    shape = *batch.tokens.shape, 2
    words = np.full(shape, 10 + index), np.full(shape, -1.0 - index)
    return np.arange(1), dict(zip(passes.BEST, words, strict=True))

  found = one._fill(rows, score)
  shared = rows.tokens[0].tolist().index(2)
  assert found.teacher_words[0, shared].tolist() == [11, 11]
  assert sorted(found.term_teacher[0].tolist()) == [-1, 0, 1, 1]
  at, teacher = found.teacher_words[0, found.term_token[0], 0], found.term_teacher[0]
  np.testing.assert_array_equal(at[teacher >= 0] - 10, teacher[teacher >= 0])


def test_groups_of_equal_rewards_are_trained_if_they_have_a_teacher():
  one = functools.partial(test_inputs.learner_of, 'rows', cispo.Config())
  with jax.enable_x64():
    assert one().credit(group(0, equal=True)).dropped == 'zero_advantage'
    b_only = config('sampled', teacher='', reward_weight=0.0)
    taught = one(b_only, {'b': teachers()['b']})
    assert taught.credit(group(0, equal=True)).dropped == 'zero_advantage'
    assert not taught.credit(group(1, equal=True)).dropped


@pytest.mark.parametrize(
  'settings, message',
  [
    (dict(form='forward'), "form='forward'"),
    (dict(weight=0.0), 'weight=0.0'),
    (dict(top_k=0), 'top_k=0'),
    (dict(teachers={'': 'x'}), 'teachers='),
    (dict(teacher='', teachers={}, reward_weight=0.0), 'reward_weight=0.0'),
  ],
)
def test_settings_out_of_range(settings, message):
  with pytest.raises(ValueError, match=message):
    config(**dict(form='sampled') | settings)


def test_a_teacher_that_does_not_fit():
  other = dataclasses.replace(OTHER, vocab_size=OTHER.vocab_size + 1)
  found = {'': distillation.Teacher(other, {}), 'b': distillation.Teacher(OTHER, {})}
  with jax.enable_x64():
    with pytest.raises(ValueError, match='the teacher one has vocab_size'):
      test_inputs.learner_of('rows', cispo.Config(), config('sampled'), found)
    with pytest.raises(ValueError, match='top_k=999: must be at most'):
      test_inputs.learner_of(
        *('rows', cispo.Config(), config('top_k', top_k=999)), teachers()
      )
