"""AdamW and Muon against plain numpy, and what each kind of parameter gets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from m2jax import config
from m2jax import params as params_lib
from m2jax.optim import (
  AdamConfig,
  ByKind,
  MuonConfig,
  OptimizerConfig,
  ScheduleConfig,
  learning_rates,
  make,
)
from m2jax.optim.matrices import PLAIN
from m2jax.optim.muon import SCALES, orthogonalize, scale_by_muon
from m2jax.optim.optimizer import Part, describe, partition
from m2jax.params import Kind

MUON = OptimizerConfig(
  by_kind=ByKind(matrix='muon', expert='muon'),
  muon=MuonConfig(learning_rate=0.02),
  adam=AdamConfig(learning_rate=1e-3),
  clip_norm=None,
)
ADAM = dataclasses.replace(MUON, by_kind=ByKind())
MATRICES = {'q', 'k', 'v', 'o', 'proj', 'gate', 'up', 'down'}


def tree(seed: int, scale=1.0):
  """A small parameter tree with every kind, stacked over L = 2 layers and E = 3."""
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return np.float32(scale * rng.normal(size=shape))

  return {
    'embed': normal(16, 8),
    'head': normal(8, 16),
    'final_norm': normal(8),
    'layers': {
      'attn_norm': normal(2, 8),
      'q': normal(2, 8, 12),
      'o': normal(2, 12, 8),
      'router': normal(2, 8, 3),
      'gate': normal(2, 3, 8, 5),
      'down': normal(2, 3, 5, 8),
    },
  }


def muon_with(**fields) -> OptimizerConfig:
  return dataclasses.replace(MUON, muon=dataclasses.replace(MUON.muon, **fields))


@functools.cache
def compiled(config):
  tx = make(config)

  @jax.jit
  def step(params, state, gradient):
    updates, state = tx.update(gradient, state, params)
    return updates, optax.apply_updates(params, updates), state

  return jax.jit(tx.init), step


def run(config, params, gradients):
  """Updates of the last of several steps, and the parameters after it."""
  init, step = compiled(config)
  state = init(params)
  for gradient in gradients:
    updates, params, state = step(params, state, gradient)
  return updates, params


def newton_schulz(x):
  """Keller Jordan's quintic in float64, written for one matrix."""
  a, b, c = 3.4445, -4.7750, 2.0315
  x = x / np.linalg.norm(x)
  transposed = x.shape[0] > x.shape[1]
  x = x.T if transposed else x
  for _ in range(5):
    gram = x @ x.T
    x = a * x + (b * gram + c * gram @ gram) @ x
  return x.T if transposed else x


def muon_reference(config, param, gradients):
  """Muon with Nesterov momentum and optax's bias corrections, one matrix."""
  beta, momentum = config.muon.beta, np.zeros_like(param)
  for n, gradient in enumerate(gradients, 1):
    momentum = beta * momentum + (1 - beta) * gradient
    ahead = beta * momentum / (1 - beta ** (n + 1))
    ahead = ahead + (1 - beta) * gradient / (1 - beta**n)
    scale = max(1, param.shape[1] / param.shape[0]) ** 0.5
    rate = config.muon.learning_rate
    decay = config.weight_decay * param
    param = param - rate * (scale * newton_schulz(ahead) + decay)
  return param


def adamw_reference(config, param, gradients, decays):
  adam = config.adam
  m = v = np.zeros_like(param)
  for n, gradient in enumerate(gradients, 1):
    m = adam.b1 * m + (1 - adam.b1) * gradient
    v = adam.b2 * v + (1 - adam.b2) * gradient**2
    direction = m / (1 - adam.b1**n)
    direction = direction / (np.sqrt(v / (1 - adam.b2**n)) + adam.eps)
    decay = decays * config.weight_decay * param
    param = param - adam.learning_rate * (direction + decay)
  return param


def flat64(params):
  pairs = jax.tree_util.tree_leaves_with_path(params)
  return {path[-1].key: np.asarray(leaf, np.float64) for path, leaf in pairs}


@pytest.mark.parametrize('config', [ADAM, MUON], ids=['adam', 'muon'])
def test_three_steps_against_numpy(config):
  """Independent reference per leaf: momentum, bias correction, decay by kind, and for
  Muon each matrix of each layer and expert by itself, so that axes cannot be mixed."""
  config = dataclasses.replace(config, weight_decay=0.1)
  params = tree(0)
  gradients = [tree(seed, scale=0.01) for seed in (1, 2, 3)]
  _, after = run(config, params, gradients)
  gradients = [flat64(g) for g in gradients]
  start = flat64(params)
  for leaf_name, got in flat64(after).items():
    mine = [g[leaf_name] for g in gradients]
    if config.by_kind.matrix == 'muon' and leaf_name in MATRICES:
      want = np.empty_like(got)
      for index in np.ndindex(got.shape[:-2]):
        want[index] = muon_reference(
          config, start[leaf_name][index], [g[index] for g in mine]
        )
    else:
      decays = leaf_name in MATRICES | {'embed', 'head'}
      want = adamw_reference(config, start[leaf_name], mine, decays)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-5, err_msg=leaf_name)


def test_each_leaf_of_the_model_gets_the_right_optimizer():
  """Told from the updates, not from labels: Adam's first step is the gradient's sign
  times its rate, Muon's is nearly orthogonal with Muon's rate. optax's own rule would
  leave stacked leaves to Adam without a word."""
  small = {'num_layers': 2, 'num_experts': 3, 'vocab_size': 32}
  cfg = dataclasses.replace(config.tiny(), **small)
  shapes = params_lib.shapes(cfg)['params']
  rng = np.random.default_rng(0)
  grads = jax.tree.map(lambda s: np.float32(rng.normal(size=s.shape) + 0.1), shapes)
  params = jax.tree.map(np.zeros_like, grads)
  updates, _ = run(MUON, params, [grads])
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(grads), strict=True
  )
  for (path, update), grad in pairs:
    name = path[-1].key
    if name not in MATRICES:
      np.testing.assert_allclose(update, -1e-3 * np.sign(grad), rtol=1e-3, err_msg=name)
      continue
    fan_in, fan_out = update.shape[-2:]
    scale = 0.02 * max(1, fan_out / fan_in) ** 0.5
    singular = np.linalg.svd(np.asarray(update) / scale, compute_uv=False)
    assert np.quantile(singular, 0.05) > 0.4, name
    assert singular.max() < 1.25, name


@pytest.mark.parametrize('preconditioning', ['frobenius', 'aol'])
@pytest.mark.parametrize('scale', [1e-13, 1e-7, 1.0])
def test_tiny_gradients_are_not_lost(scale, preconditioning):
  """Gradients of RL lie mostly below 1e-14 (facts/algorithms.md §3.3): an ε of 1e-8
  in Adam or in Muon's normalisation would stop training."""
  optimizer = muon_with(preconditioning=preconditioning)
  updates, _ = run(optimizer, tree(0), [tree(1, scale)])
  whole, _ = run(optimizer, tree(0), [tree(1)])
  for small, full in zip(jax.tree.leaves(updates), jax.tree.leaves(whole), strict=True):
    assert np.linalg.norm(small) > 0.9 * np.linalg.norm(full)


@pytest.mark.parametrize('preconditioning', ['frobenius', 'aol'])
def test_an_expert_without_tokens_stays(preconditioning):
  """Its gradient is exactly 0: neither NaN nor a step."""
  params, grads = tree(0), tree(1)
  grads['layers']['gate'][:, 1] = 0
  optimizer = muon_with(preconditioning=preconditioning)
  updates, _ = run(optimizer, params, [grads, grads])
  np.testing.assert_array_equal(updates['layers']['gate'][:, 1], 0)
  gate = np.asarray(updates['layers']['gate'])
  assert np.all(np.isfinite(gate)) and np.all(np.any(gate[:, 0], axis=(-2, -1)))


@pytest.mark.parametrize('nesterov', [True, False])
def test_muon_is_optaxs(nesterov):
  """The published library, told every leaf's axes, gives the same updates."""
  leaves = {'q': tree(0)['layers']['q'], 'down': tree(0)['layers']['down']}
  axes = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
  reference = contrib.scale_by_muon(
    nesterov=nesterov, weight_dimension_numbers=jax.tree.map(lambda _: axes, leaves)
  )
  ours = scale_by_muon(nesterov=nesterov, consistent_rms=None)

  @jax.jit
  def step(grads, states):
    """Both updates, and the states after them."""
    pairs = zip((reference, ours), states, strict=True)
    found = [tx.update(grads, state) for tx, state in pairs]
    return tuple(zip(*found, strict=True))

  states = jax.jit(lambda leaves: (reference.init(leaves), ours.init(leaves)))(leaves)
  for seed in (1, 2, 3):
    grads = {name: tree(seed)['layers'][name] for name in leaves}
    (want, got), states = step(grads, states)
    np.testing.assert_allclose(got['q'], want['q'] * 1.5**0.5, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
      got['down'], want['down'] * 1.6**0.5, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize('way', [('frobenius', 5), ('aol', 4)])
@pytest.mark.parametrize('shape', [(24, 9), (9, 24), (16, 16)])
def test_batched_and_mapped_forms_agree(shape, way):
  """CPU maps over matrices, other platforms take them as a batch: the same values, and
  what comes out is near the polar factor."""
  x = np.float32(np.random.default_rng(0).normal(size=(2, 3, *shape)))
  kwargs = {'preconditioning': way[0], 'ns_steps': way[1]}
  run = functools.partial(PLAIN.map, 'q', functools.partial(orthogonalize, **kwargs))
  got = jax.jit(run)(x)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.lax, 'platform_dependent', lambda m, cpu, default: default(m))
    np.testing.assert_allclose(jax.jit(lambda x: run(x))(x), got, atol=1e-5)
  u, _, vt = np.linalg.svd(np.asarray(x), full_matrices=False)
  cosine = np.sum(u @ vt * got, axis=(-2, -1)) / np.linalg.norm(u @ vt, axis=(-2, -1))
  cosine /= np.linalg.norm(got, axis=(-2, -1))
  assert cosine.min() > 0.95


def test_consistent_rms_gives_muon_the_size_of_adam():
  """arXiv 2502.16982: every element moves by about 0.2 of the rate at any shape."""
  optimizer = muon_with(consistent_rms=0.2)
  shapes = {'q': (2, 128, 128), 'gate': (2, 2, 128, 48)}
  params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
  rng = np.random.default_rng(0)
  grads = jax.tree.map(lambda p: np.float32(rng.normal(size=p.shape)), params)
  updates, _ = run(optimizer, params, [grads])
  for update in jax.tree.leaves(updates):
    rms = np.sqrt(np.mean(np.square(np.asarray(update))))
    assert 0.15 < rms / 0.02 < 0.25


def test_clipping_is_by_the_norm_of_all_gradients():
  """Clipping each leaf alone would turn the gradient."""
  # with ε this large Adam is gradient descent with rate 1
  adam = AdamConfig(learning_rate=1e6, b1=0.0, b2=0.0, eps=1e6)
  plain = OptimizerConfig(adam=adam, clip_norm=0.5)
  grads = tree(1)
  updates, _ = run(plain, tree(0), [grads])
  norm = np.sqrt(sum(np.sum(grad**2) for grad in jax.tree.leaves(grads)))
  assert norm > 1
  for update, grad in zip(
    jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True
  ):
    np.testing.assert_allclose(update, -grad * 0.5 / norm, rtol=1e-4)


def test_schedule_scales_both_rates_and_is_what_is_logged():
  """The learning rate in the log must be the one that was applied."""
  schedule = ScheduleConfig('linear', total_steps=4)
  optimizer = dataclasses.replace(MUON, schedule=schedule)
  params, grads = tree(0), tree(1)
  first, _ = run(optimizer, params, [grads])
  third, _ = run(optimizer, params, [grads] * 3)
  rates = [learning_rates(optimizer, step) for step in (0, 2)]
  np.testing.assert_allclose([r['muon'] for r in rates], [0.02, 0.01], rtol=1e-6)
  np.testing.assert_allclose([r['adam'] for r in rates], [1e-3, 5e-4], rtol=1e-6)
  first, third = jax.tree.map(np.asarray, (first, third))
  np.testing.assert_allclose(third['embed'] / first['embed'], 0.5, rtol=1e-3)
  ratio = np.linalg.norm(third['layers']['q']) / np.linalg.norm(first['layers']['q'])
  np.testing.assert_allclose(ratio, 0.5, rtol=1e-2)


def test_the_partition_is_described():
  """Every kind with what updates it; a stacked weight is one array."""
  assert partition(MUON, tree(0)) == {
    'embedding': Part('adam', 1, 128),
    'expert': Part('muon', 2, 480),
    'head': Part('adam', 1, 128),
    'matrix': Part('muon', 2, 384),
    'norm': Part('adam', 2, 24),
    'router': Part('adam', 1, 48),
  }
  assert 'expert by muon (2 arrays, 480 parameters)' in describe(MUON, tree(0))


def test_an_unknown_parameter_is_an_error():
  """Left to a default it would train with the wrong optimizer without a word."""
  params = {'layers': {'gamma': jnp.ones((2, 8))}}
  for optimizer in (ADAM, MUON):
    for use in (make(optimizer).init, functools.partial(describe, optimizer)):
      with pytest.raises(ValueError, match='unknown parameter layers/gamma'):
        use(params)


def test_every_kind_has_a_rule():
  """A new kind of parameter needs a field in ByKind."""
  assert {field.name for field in dataclasses.fields(ByKind)} == set(Kind)


def test_hyperparameters_do_not_change_the_state():
  """A checkpoint must resume under another rate, decay, clipping or schedule."""
  other = dataclasses.replace(
    MUON,
    muon=MuonConfig(learning_rate=1.0, preconditioning='aol', ns_steps=4),
    adam=AdamConfig(learning_rate=1.0),
    weight_decay=0.1,
    clip_norm=1.0,
    schedule=ScheduleConfig('cosine', 1, 10),
  )
  shapes = [jax.eval_shape(make(c).init, tree(0)) for c in (MUON, other)]
  assert jax.tree.structure(shapes[0]) == jax.tree.structure(shapes[1])
  assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])


def test_precision_of_the_parameters_is_kept():
  """Law 8: updates in the parameters' own type; tests of exactness use float64."""
  with jax.enable_x64():
    params = {'embed': tree(0)['embed'], 'q': tree(0)['layers']['q']}
    params = jax.tree.map(np.float64, params)
    updates, after = run(MUON, params, [params])
    assert {x.dtype for x in jax.tree.leaves((updates, after))} == {np.dtype('float64')}


@pytest.mark.parametrize(
  ('make_config', 'fields', 'name'),
  [
    (OptimizerConfig, {'clip_norm': 0.0}, 'clip_norm'),
    (OptimizerConfig, {'weight_decay_kinds': ('matrixes',)}, 'weight_decay_kinds'),
    (OptimizerConfig, {'by_kind': ByKind(norm='muon')}, 'by_kind.norm'),
    (OptimizerConfig, {'by_kind': ByKind(head='sgd')}, 'by_kind.head'),
    (AdamConfig, {'learning_rate': -1.0}, 'learning_rate'),
    (AdamConfig, {'b2': 1.0}, 'b2'),
    (AdamConfig, {'eps': 0.0}, 'eps'),
    (MuonConfig, {'learning_rate': -1.0}, 'learning_rate'),
    (MuonConfig, {'preconditioning': 'spectral'}, 'preconditioning'),
  ],
)
def test_bad_fields_are_named(make_config, fields, name):
  """A broken config says which field and what it should be (law 9)."""
  with pytest.raises(ValueError, match=f'{make_config.__name__}.{name}='):
    make_config(**fields)


def nor_muon_reference(config, param, gradients):
  """NorMuon of one matrix: Muon's update with mean squares of columns divided out."""
  start, square = param, np.zeros((1, param.shape[1]))
  settings = dataclasses.replace(config, muon=config.nor_muon, weight_decay=0.0)
  for n in range(1, len(gradients) + 1):
    before = muon_reference(settings, start, gradients[: n - 1])
    step = before - muon_reference(settings, start, gradients[:n])
    square = 0.95 * square + 0.05 * np.mean(step**2, axis=0, keepdims=True)
    scaled = step / np.sqrt(square)
    param = param - scaled * np.linalg.norm(step) / np.linalg.norm(scaled)
  return param


def hyperball_reference(config, param, gradients):
  """Hyperball of one matrix, with Muon's directions."""
  start, rate = param, config.hyperball.learning_rate
  settings = dataclasses.replace(config, muon=config.hyperball, weight_decay=0.0)
  for n in range(1, len(gradients) + 1):
    step = muon_reference(settings, start, gradients[: n - 1])
    step = step - muon_reference(settings, start, gradients[:n])
    radius = np.linalg.norm(param)
    moved = param - rate * radius * step / np.linalg.norm(step)
    param = moved * radius / np.linalg.norm(moved)
  return param


@pytest.mark.parametrize(
  ('name', 'reference'),
  [('nor_muon', nor_muon_reference), ('hyperball', hyperball_reference)],
)
def test_muons_neighbours_against_numpy(name, reference):
  """Three steps, experts and layers by themselves; a stack is not one matrix."""
  config = OptimizerConfig(name=name, clip_norm=None)
  params = tree(0)
  gradients = [tree(seed, scale=0.01) for seed in (1, 2, 3)]
  _, after = run(config, params, gradients)
  gradients, start, after = (
    [flat64(g) for g in gradients],
    flat64(params),
    flat64(after),
  )
  for leaf_name in MATRICES & after.keys():
    for index in np.ndindex(after[leaf_name].shape[:-2]):
      mine = [g[leaf_name][index] for g in gradients]
      want = reference(config, start[leaf_name][index], mine)
      np.testing.assert_allclose(
        after[leaf_name][index], want, rtol=1e-3, atol=5e-5, err_msg=leaf_name
      )


def test_nor_muon_moves_neurons_alike():
  """After many alike steps every output neuron has moved as far as the others; Muon's
  move as their rows of the orthogonal matrix."""
  rng = np.random.default_rng(0)
  gradient = {'down': np.float32(rng.normal(size=(1, 4, 12)))}
  spread = {}
  for name in ('muon', 'nor_muon'):
    config = OptimizerConfig(name=name, clip_norm=None)
    updates, _ = run(config, gradient, [gradient] * 3)
    moved = np.linalg.norm(updates['down'][0], axis=0)
    spread[name] = moved.max() / moved.min()
  assert spread['nor_muon'] < 1.001 < 1.2 < spread['muon']


def test_spectral_scale():
  """sqrt(out/in) in both directions, where Muon's own is at least 1."""
  gradient = {'q': tree(1)['layers']['q'], 'down': tree(1)['layers']['o']}
  own, spectral = (
    jax.tree.map(np.asarray, run(muon_with(scale=s), gradient, [gradient])[0])
    for s in SCALES
  )
  for name, ratio in (('q', 1.0), ('down', (8 / 12) ** 0.5)):
    np.testing.assert_allclose(spectral[name], own[name] * ratio, rtol=1e-4, atol=1e-7)


def test_heads_are_matrices_of_their_own():
  """`split_heads` gives each head of q the update that it would get alone."""
  cfg = dataclasses.replace(
    config.tiny(), num_heads=3, num_kv_heads=1, head_dim=4, rotary_dim=2
  )
  q = tree(1)['layers']['q']
  update = jax.jit(lambda g, tx: tx.update(g, tx.init(g), g)[0], static_argnums=1)
  whole = update({'q': q}, make(muon_with(split_heads=True), cfg))['q']
  whole, muon = np.asarray(whole), make(MUON)
  for head in range(3):
    part = slice(4 * head, 4 * head + 4)
    alone = update({'q': q[..., part]}, muon)['q']
    np.testing.assert_allclose(whole[..., part], alone, rtol=1e-4, atol=1e-6)


def test_a_name_chooses_and_kinds_override():
  """The rule of the hidden matrices by one field; others by kind; what no rule can
  update is refused."""
  optimizer = OptimizerConfig(name='muon', by_kind=ByKind(head='muon', expert='adam'))
  rules = {kind: part.rule for kind, part in partition(optimizer, tree(0)).items()}
  muons = {kind for kind, rule in rules.items() if rule == 'muon'}
  assert muons == {'matrix', 'head'}
  with pytest.raises(ValueError, match=r"by_kind.embedding='sso'"):
    OptimizerConfig(by_kind=ByKind(embedding='sso'))
