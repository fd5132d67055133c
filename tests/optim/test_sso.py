"""SSO and MuonSphere against numpy, and what makes a sphere a sphere.

The reference works on one matrix at a time in float64, with SVDs for the singular
vectors and msign, and Brent's method for λ.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import optimize

from m2jax import config, sharding
from m2jax import params as params_lib
from m2jax.optim import OptimizerConfig, ScheduleConfig, SsoConfig, initializer, make
from m2jax.optim import optimizer as optimizer_lib
from m2jax.optim.matrices import Matrices
from m2jax.optim.sso import MuonSphereConfig, SphereSettings, on_sphere, sso
from m2jax.train import step as train_step
from tests import quick

HEADS = {'q': 2}
# many power iterations: the reference has exact vectors
EXACT = SphereSettings(power_iterations=60, tolerance=1e-5)
RATE = 0.02


def tree(seed, scale=1.0):
  """Heads side by side, experts in stacks, each over two layers; one tall, one wide."""
  rng = np.random.default_rng(seed)
  shapes = {'q': (2, 8, 12), 'gate': (2, 3, 8, 5), 'down': (2, 3, 5, 8)}
  return {
    name: np.float32(scale * rng.normal(size=shape)) for name, shape in shapes.items()
  }


def matrices_of(params):
  """(name, index) → matrix in float64, heads apart."""
  found = {}
  for name, leaf in params.items():
    parts = np.split(np.asarray(leaf, np.float64), HEADS.get(name, 1), axis=-1)
    for head, part in enumerate(parts):
      for index in np.ndindex(part.shape[:-2]):
        found[name, head, *index] = part[index]
  return found


@functools.cache
def compiled(settings, rate=RATE):
  tx = sso(rate, settings, Matrices(HEADS))

  @jax.jit
  def step(params, state, gradient):
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(tx.init), step


@functools.cache
def projected(settings=EXACT):
  found = jax.jit(lambda p: on_sphere(p, settings, Matrices(HEADS)))(tree(0))
  return jax.tree.map(np.asarray, found)


def run(settings, params, gradients, rate=RATE):
  """Parameters and state after steps."""
  init, step = compiled(settings, rate)
  state = init(params)
  for gradient in gradients:
    params, state = step(params, state, gradient)
  return jax.tree.map(np.asarray, params), state


def polar(x):
  u, s, vt = np.linalg.svd(x, full_matrices=False)
  return u @ np.diag(s > 1e-9 * max(s[0], 1e-30)) @ vt


def reference(settings, w, gradients, rate=RATE):
  """The steps of one matrix."""
  beta, momentum = settings.beta, np.zeros_like(w)
  radius = settings.radius * (w.shape[1] / w.shape[0]) ** 0.5
  for gradient in gradients:
    momentum = beta * momentum + (1 - beta) * gradient
    ahead = (1 - beta) * gradient + beta * momentum
    ahead = ahead / np.linalg.norm(ahead)
    u, s, vt = np.linalg.svd(w)
    theta = np.outer(u[:, 0], vt[0])

    def h(multiplier, ahead=ahead, theta=theta):
      return np.sum(theta * polar(ahead + multiplier * theta))

    multiplier = optimize.brentq(h, -8, 8, xtol=1e-13) if settings.solve else 0.0
    if settings.retraction == 'hard':
      w = w * radius / s[0]
    else:
      w = w * (1 + settings.retraction_rate * rate * np.sign(radius - s[0]))
    w = w - rate * radius * polar(ahead + multiplier * theta)
  return w


@pytest.mark.parametrize(
  'settings',
  [
    EXACT,
    dataclasses.replace(EXACT, solve=False, radius=2.0),
    dataclasses.replace(EXACT, solve=False, retraction='dynamic'),
  ],
  ids=['sso', 'muon_sphere', 'dynamic'],
)
def test_three_steps_against_numpy(settings):
  """Momentum, heads and experts by themselves, radius, multiplier and retraction: from
  off the sphere, since at R the sign of R − σ is rounding."""
  start = jax.tree.map(lambda w: 1.3 * w, projected())
  gradients = [tree(seed, 0.01) for seed in (1, 2, 3)]
  after, _ = run(settings, start, gradients)
  got, gradients = matrices_of(after), [matrices_of(g) for g in gradients]
  for name, w in matrices_of(start).items():
    want = reference(settings, w, [g[name] for g in gradients])
    np.testing.assert_allclose(got[name], want, atol=0.01 * RATE, err_msg=name)


def spectral_ratios(params, c=1.0):
  """‖W‖₂/R of each matrix, by an SVD."""
  return np.array(
    [
      np.linalg.norm(w, 2) / (c * (w.shape[1] / w.shape[0]) ** 0.5)
      for w in matrices_of(params).values()
    ]
  )


def test_the_norm_stays_on_the_sphere():
  """‖W‖₂ ≤ R (1 + 2η) after each of many steps with three warm power iterations, and R
  after the retraction that a step without a gradient is."""
  settings = SphereSettings()
  params = projected()
  init, step = compiled(settings)
  state = init(params)
  for seed in range(30):
    params, state = step(params, state, tree(seed))
    ratios = spectral_ratios(params)
    assert np.all(ratios <= 1 + 2 * RATE) and np.all(ratios > 1 - 2 * RATE)
  zero = jax.tree.map(np.zeros_like, params)
  after, _ = run(settings, params, [zero])
  np.testing.assert_allclose(spectral_ratios(after), 1, atol=2e-3)
  assert not np.allclose(ratios, 1, atol=2e-3)


def test_the_retraction_is_not_scaled_by_the_rate():
  """From far off the sphere, a step of rate 0 is the whole way back; a later
  scale_by_learning_rate would have removed it."""
  settings = dataclasses.replace(EXACT, radius=2.0)
  schedule = lambda step: jnp.where(step == 0, 0.0, 0.1)  # noqa: E731
  after, state = run(settings, tree(0), [tree(1)], schedule)
  np.testing.assert_allclose(spectral_ratios(after, 2.0), 1, atol=1e-3)
  assert state.report.sigma_max > 2
  again, state = run(settings, tree(0), [tree(1)] * 2, schedule)
  assert state.count == 2
  moved = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), again, after)
  assert all(x > 0.01 for x in jax.tree.leaves(moved))


def test_heads_and_experts_are_alone():
  """Another gradient of one head or expert leaves the others bit for bit."""
  settings = SphereSettings()
  start, gradient = projected(), tree(1)
  other = tree(1)
  other['q'][:, :, :6] = tree(2)['q'][:, :, :6]
  other['gate'][:, 1] = tree(2)['gate'][:, 1]
  one, two = (run(settings, start, [g])[0] for g in (gradient, other))
  np.testing.assert_array_equal(one['q'][..., 6:], two['q'][..., 6:])
  np.testing.assert_array_equal(one['gate'][:, [0, 2]], two['gate'][:, [0, 2]])
  assert np.all(np.any(one['q'][..., :6] != two['q'][..., :6], axis=(1, 2)))


def test_an_expert_without_tokens_and_tiny_gradients():
  """No gradient: only the retraction, no NaN. RL's gradients of 1e-18 count in full."""
  settings = SphereSettings()
  start, gradient = projected(), tree(1)
  idle = tree(1)
  idle['gate'][:, 1] = 0
  after, _ = run(settings, start, [idle, idle])
  np.testing.assert_allclose(after['gate'][:, 1], start['gate'][:, 1], rtol=2e-3)
  tiny = jax.tree.map(lambda x: x * np.float32(1e-18), gradient)
  whole, small = (run(settings, start, [g])[0] for g in (gradient, tiny))
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(small), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_current_radius_keeps_trained_weights():
  """Weights that were trained off the sphere keep their norms instead of the model its
  function."""
  settings = dataclasses.replace(EXACT, start_radius='current')
  start = tree(5)
  zero = jax.tree.map(np.zeros_like, start)
  after, _ = run(settings, start, [zero])
  for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(start), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3)


CFG = dataclasses.replace(
  config.tiny(),
  vocab_size=16,
  num_layers=1,
  embed_dim=8,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  rotary_dim=2,
  num_experts=2,
  experts_per_token=1,
  expert_dim=6,
  num_mtp_modules=0,
)


def test_a_model_starts_on_the_sphere():
  """Every matrix, router and head of q, k and v that the rule updates; the others are
  unchanged."""
  optimizer = OptimizerConfig(name='sso')
  start = quick.variables(CFG, 0)['params']
  params = jax.jit(initializer(optimizer, CFG))(start)
  heads = params_lib.heads(CFG)
  assert heads == {'q': 2, 'k': 1, 'v': 1}
  for name, leaf in params['layers'].items():
    if name.endswith('norm'):
      continue
    for matrix in np.split(np.asarray(leaf), heads.get(name, 1), axis=-1):
      fan_in, fan_out = matrix.shape[-2:]
      norms = np.linalg.norm(matrix, 2, axis=(-2, -1))
      np.testing.assert_allclose(norms, (fan_out / fan_in) ** 0.5, rtol=1e-3)
  np.testing.assert_array_equal(params['embed'], start['embed'])
  partition = optimizer_lib.partition(optimizer, params)
  rules = {kind: part.rule for kind, part in partition.items()}
  assert rules == {
    'embedding': 'adam',
    'expert': 'sso',
    'head': 'adam',
    'matrix': 'sso',
    'norm': 'adam',
    'router': 'sso',
  }


def test_weight_decay_has_no_effect_on_the_sphere():
  """It would be divided out by the next retraction, so it is not applied; the kinds
  that Adam updates have it."""
  params = {'q': tree(0)['gate'][0], 'embed': tree(1)['down'][0, 0]}
  after = []
  for decay in (0.0, 0.1):
    rule = MuonSphereConfig(split_heads=False)
    tx = make(OptimizerConfig(name='muon_sphere', muon_sphere=rule, weight_decay=decay))
    after.append(jax.jit(lambda p, tx=tx: tx.update(p, tx.init(p), p)[0])(params))
  np.testing.assert_array_equal(after[0]['q'], after[1]['q'])
  assert np.any(np.asarray(after[0]['embed']) != np.asarray(after[1]['embed']))
  w = matrices_of({'q': tree(0)['q']})['q', 0, 0]
  settings, gradient = dataclasses.replace(EXACT, solve=False), np.ones_like(w)
  one, two = (reference(settings, w * scale, [gradient]) for scale in (1.0, 0.9))
  np.testing.assert_allclose(one, two, atol=1e-12)


def test_state_is_sharded_and_resumes():
  """Singular vectors are split as the parameter; another tolerance, rate or schedule
  has the same state."""
  optimizer = OptimizerConfig(name='sso')
  other = OptimizerConfig(
    name='sso',
    sso=SsoConfig(learning_rate=1.0, tolerance=1.0, power_iterations=9, solve=False),
    schedule=ScheduleConfig('cosine', 1, 10),
  )
  like = params_lib.shapes(CFG)['params']
  states = [jax.eval_shape(make(o, CFG).init, like) for o in (optimizer, other)]
  assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
  assert jax.tree.leaves(states[0]) == jax.tree.leaves(states[1])
  rules = sharding.PRESETS['fsdp_ep']
  specs = train_step.state_specs(CFG, make(optimizer, CFG), rules)
  found = {
    jax.tree_util.keystr(path): spec
    for path, spec in jax.tree.leaves_with_path(specs.opt_state)
  }
  (right,) = (s for p, s in found.items() if 'right' in p and p.endswith("['gate']"))
  assert tuple(right) == (None, 'expert', None, 'tensor')


@pytest.mark.parametrize(
  ('make_config', 'fields', 'name'),
  [
    (SsoConfig, {'radius': 0.0}, 'radius'),
    (SsoConfig, {'retraction': 'soft'}, 'retraction'),
    (SsoConfig, {'msign_steps': 9}, 'msign_steps'),
    (SsoConfig, {'learning_rate': -1.0}, 'learning_rate'),
    (MuonSphereConfig, {'start_radius': 'any'}, 'start_radius'),
    (OptimizerConfig, {'name': 'sgd'}, 'name'),
  ],
)
def test_bad_fields_are_named(make_config, fields, name):
  """A broken config says which field and what it should be (law 9)."""
  with pytest.raises(ValueError, match=f'{make_config.__name__}.{name}='):
    make_config(**fields)


def test_what_would_be_wrong_without_a_word():
  """Parameters that lose the retraction; heads that are not known; a missing W."""
  bf16 = {'q': jnp.ones((4, 4), jnp.bfloat16)}
  with pytest.raises(ValueError, match='bfloat16 would lose the retraction'):
    sso(0.1).init(bf16)
  with pytest.raises(ValueError, match='split_heads=True: needs the numbers of heads'):
    make(OptimizerConfig(name='sso'))
  with pytest.raises(ValueError, match='needs params'):
    sso(0.1).update(bf16, sso(0.1).init({'q': jnp.ones((4, 4))}))
