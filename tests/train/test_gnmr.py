"""GNMR in the train step: the route is data, and each layer takes its path.

The low path is 'activations_int4', whose forward pass and gradient of activations are
exact: only the gradients of a layer's own matrices differ between its paths. So with
any route, each layer's gradient is that of the model which is on its path everywhere.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax import config, forest
from m2jax.observe import metrics as metrics_lib
from m2jax.optim import AdamConfig, GnmrConfig, OptimizerConfig, gnmr
from m2jax.optim import optimizer as optimizer_lib
from m2jax.sharding import ONE_DEVICE
from m2jax.train import chunks, loop, pretrain
from m2jax.train import step as train_step
from tests import processes, quick
from tests.train import gnmr_worker, test_loop, test_pretrain, test_step

INT4, INT8 = (config.Matmuls(f'activations_int{bits}') for bits in (4, 8))
CFG = dataclasses.replace(
  test_step.CFG,
  num_layers=2,
  num_mtp_modules=0,
  unroll_layers=False,
  dtype='float32',
  param_dtype='float32',
  matmuls=INT4,
  recovery=INT8,
)
# makes candidates of all layers while norms are near their mean
SENSITIVE = GnmrConfig(max_active=1, alpha=0.9)
CONFIG = dataclasses.replace(test_step.CONFIG, micro_rows=1)
QUANTISED = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')


def programs(cfg, **optimizer):
  tx = optax.sgd(1.0)
  if optimizer:
    tx = optimizer_lib.make(OptimizerConfig(**optimizer), cfg)
  return train_step.programs(cfg, tx, train_step.nll, CONFIG)


def variables(cfg=CFG):
  return quick.variables(cfg, 0)


def layers(sums):
  return jax.device_get(sums.gradients['layers'])


@pytest.fixture(scope='module')
def without_controller():
  """The pass over a batch that has no route: the low path everywhere."""
  shapes = jax.eval_shape(lambda: variables())
  return programs(CFG).micro.lower(shapes, test_step.chains()).compile()


@pytest.fixture(scope='module')
def on_one_path(without_controller):
  """Gradients of the layers where all are on one path: low, recovery."""
  recovery = programs(dataclasses.replace(CFG, matmuls=CFG.recovery)).micro
  passes = without_controller, recovery
  return [layers(one(variables(), test_step.chains())) for one in passes]


def assert_on_paths(got, route, on_one_path, tolerance=1e-5):
  for name, leaf in got.items():
    for layer, promoted in enumerate(route):
      mine, other = (on_one_path[i][name][layer] for i in (promoted, not promoted))
      error = np.linalg.norm(leaf[layer] - mine) / np.linalg.norm(mine)
      assert error < tolerance, (name, layer)
      if name in QUANTISED:  # and the paths do differ
        assert np.linalg.norm(mine - other) > 1e-2 * np.linalg.norm(mine), name


@pytest.mark.parametrize(
  'changes',
  [
    {},
    pytest.param(dict(remat='layer'), marks=pytest.mark.long),
    pytest.param(dict(remat='attention'), marks=pytest.mark.thorough),
    pytest.param(dict(unroll_layers=True), marks=pytest.mark.thorough),
  ],
)
def test_each_layer_takes_its_path(changes, on_one_path):
  """In one program, which has a branch."""
  cfg, batch = dataclasses.replace(CFG, **changes), test_step.chains()
  routed = lambda *route: {**variables(cfg), 'route': jnp.array(route)}
  compiled = programs(cfg).micro.lower(routed(True, True), batch).compile()
  for route in [False, False], [True, False], [True, True]:
    assert_on_paths(layers(compiled(routed(*route), batch)), route, on_one_path)
  assert branches(compiled) >= 2  # forward and backward


def branches(compiled) -> int:
  """Branches between paths: those of kernels have other names."""
  return len(gnmr_worker.BRANCH.findall(compiled.as_text()))


def test_without_a_controller_there_is_no_branch(without_controller):
  assert not branches(without_controller)


@pytest.mark.long
def test_chunks_take_the_route():
  """Push, leaf and pop have the gradient of rows with the same route."""
  sample = forest.Sample(test_step.documents()[0], 1, weights=np.ones(6, np.float32))
  tree = forest.merge([sample])
  plan = forest.cut(tree, forest.Buckets((4,), (8,), terms_per_token=1))
  assert {chunk.kind for chunk in plan} == {'push', 'leaf', 'pop'}
  given = {**variables(), 'route': jnp.array([False, True])}
  parts = chunks.programs(CFG, train_step.nll, CONFIG)
  got = layers(chunks.gradients(parts, given, plan))
  want = layers(programs(CFG).micro(given, tree))
  for name, leaf in want.items():
    np.testing.assert_allclose(got[name], leaf, atol=1e-5 * np.abs(leaf).max())


@pytest.mark.long
def test_with_sso_router_bias_and_block_fp8(tmp_path):
  """All four in one run: it learns, layers recover, and a killed run continues bit for
  bit, the controller's state included."""
  cfg = dataclasses.replace(
    CFG, matmuls=config.Matmuls('block_fp8'), recovery=config.PLAIN
  )
  settings = OptimizerConfig(
    name='sso', adam=AdamConfig(learning_rate=1e-2), gnmr=SENSITIVE
  )
  optimizer = optimizer_lib.make(settings, cfg)
  step = train_step.make_step(cfg, optimizer, train_step.nll, CONFIG)
  budget = loop.LoopConfig(steps=8, checkpoint_every=3, log_every=1)

  def start():
    return train_step.init_state(variables(cfg), optimizer)

  whole = test_loop.fit(tmp_path / 'whole', start(), step, budget)
  with pytest.raises(test_loop.Killed):
    dying = test_loop.dying(step, 5)
    test_loop.fit(tmp_path / 'killed', start(), dying, budget)
  resumed = test_loop.fit(tmp_path / 'killed', start(), step, budget)
  for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(a, b)

  controller = gnmr.find(whole.opt_state)
  assert int(controller.steps) == 8 and np.all(np.isfinite(controller.mean))
  assert np.any(whole.variables['router']['layers'])
  records = metrics_lib.read(tmp_path / 'killed')
  losses = [r['loss'] for r in records]
  assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]
  shares = [r['gnmr/promoted'] for r in records]
  assert max(shares) == 0.5  # of two layers, by the cap
  assert max(r['gnmr/cap_hit'] for r in records) == 1
  assert shares[0] == 0.5  # α below 1 makes candidates of all layers in the first step


@pytest.mark.parametrize('matmuls', [config.PLAIN, INT8])
def test_a_model_with_one_path_is_an_error(matmuls):
  cfg = dataclasses.replace(CFG, matmuls=matmuls, recovery=matmuls)
  with pytest.raises(ValueError, match=r'GnmrConfig\.max_active=1.*matmuls.*recovery'):
    optimizer_lib.make(OptimizerConfig(gnmr=SENSITIVE), cfg)


def test_frozen_layers_have_no_controller():
  """Where only MTP modules learn there is nothing to monitor."""
  cfg = dataclasses.replace(CFG, num_mtp_modules=1)
  settings = test_pretrain.config(optimizer=OptimizerConfig(gnmr=SENSITIVE))
  params = variables(cfg)['params']
  for only_mtp in (False, True):
    trainer = pretrain.make_trainer(settings, cfg, only_mtp)
    state = jax.eval_shape(trainer.optimizer(ONE_DEVICE).init, params)
    assert (gnmr.find(state) is None) == only_mtp


@pytest.mark.long
def test_on_a_mesh():
  """4 devices take the same routes as one, in one program with collectives in its
  branches."""
  child = processes.run('tests.train.gnmr_worker', timeout_s=300)
  assert child.returncode == 0, child.stderr[-2000:]
  found = json.loads(child.stdout.splitlines()[-1])
  on_mesh, on_one = found['routes']
  assert on_mesh == on_one and any(map(any, on_mesh))
  assert found['worst'][1] < 1e-5, found['worst']
  assert found['programs'] == 1
  assert len(found['in_branches']) >= 2
  assert all(min(numbers) > 0 for numbers in found['in_branches'])
