"""GNMR in the train step: the route is data, and each layer takes its path.

The low path is 'activations_int4', whose forward pass and gradient of activations are
exact: only the gradients of a layer's own matrices differ between its paths. So with
any route, each layer's gradient is that of the model which is on its path everywhere.
"""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax import config, forest
from m2jax.optim import OptimizerConfig
from m2jax.optim import optimizer as optimizer_lib
from m2jax.train import chunks
from m2jax.train import step as train_step
from tests import quick
from tests.train import gnmr_worker, test_step

_ROOT = pathlib.Path(__file__).parents[2]
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
def on_one_path():
  """Gradients of the layers where all are on one path: low, recovery."""
  batch = test_step.chains()
  cfgs = [dataclasses.replace(CFG, matmuls=path) for path in CFG.paths]
  return [layers(programs(cfg).micro(variables(cfg), batch)) for cfg in cfgs]


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
    dict(remat='layer'),
    pytest.param(dict(remat='attention'), marks=pytest.mark.long),
    pytest.param(dict(unroll_layers=True), marks=pytest.mark.long),
  ],
)
def test_each_layer_takes_its_path(changes, on_one_path):
  """In one program, which has a branch."""
  cfg, batch = dataclasses.replace(CFG, **changes), test_step.chains()
  run = programs(cfg).micro
  for route in [False, False], [True, False], [True, True]:
    sums = run({**variables(cfg), 'route': jnp.array(route)}, batch)
    assert_on_paths(layers(sums), route, on_one_path)
  assert run._cache_size() == 1
  compiled = run.lower({**variables(cfg), 'route': jnp.array(route)}, batch).compile()
  assert branches(compiled) >= 2  # forward and backward


def branches(compiled) -> int:
  """Branches between paths: those of kernels have other names."""
  return len(gnmr_worker.BRANCH.findall(compiled.as_text()))


def test_without_a_controller_there_is_no_branch():
  shapes = jax.eval_shape(lambda: variables())
  compiled = programs(CFG).micro.lower(shapes, test_step.chains()).compile()
  assert not branches(compiled)


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
def test_on_a_mesh():
  """4 devices take the same routes as one, in one program with collectives in its
  branches."""
  child = subprocess.run(
    [sys.executable, '-m', 'tests.train.gnmr_worker'],
    cwd=_ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert child.returncode == 0, child.stderr[-2000:]
  found = json.loads(child.stdout.splitlines()[-1])
  on_mesh, on_one = found['routes']
  assert on_mesh == on_one and any(map(any, on_mesh))
  assert found['worst'][1] < 1e-5, found['worst']
  assert found['programs'] == 1
  assert len(found['in_branches']) >= 2
  assert all(min(numbers) > 0 for numbers in found['in_branches'])
