"""How benchmarks.gnmr routes layers and adds up; it runs for minutes itself."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gnmr


def test_policies():
  rng = np.random.default_rng(0)
  norms = np.arange(gnmr.LAYERS) % 5
  chosen = np.arange(gnmr.LAYERS) == 3

  def route(policy, share=0.0):
    return gnmr.route_of(policy, rng, norms, chosen, share)

  assert not route('low').any() and route('high').all()
  assert route('gnmr 2').tolist() == chosen.tolist()
  assert route('static').sum() == gnmr.ACTIVE
  assert norms[route('static')].min() >= norms[~route('static')].max()
  drawn = np.mean([route('random 2', share=0.3) for _ in range(500)])
  assert drawn == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize('scenario', ['wrong_scale', 'saturation'])
def test_faults_are_of_one_layer_at_a_time(scenario):
  found = gnmr.faults(scenario, 0, 64)
  assert found.sum() == 3 * 4 and found.sum(axis=1).max() == 1
  assert found.any(axis=0).sum() == 3 and not found[:16].any()
  assert not gnmr.faults('activations', 0, 64).any()


def test_a_wrong_scale_is_of_one_layers_quantised_weights():
  layers = {'q': jnp.ones((gnmr.LAYERS, 2)), 'attn_norm': jnp.ones((gnmr.LAYERS, 2))}
  scale = jnp.ones(gnmr.LAYERS).at[3].set(8.0)
  paths = jnp.zeros(gnmr.LAYERS, jnp.int32)
  given = gnmr.scaled({'params': {'layers': layers}, 'router': {}}, paths, scale)
  after = given['params']['layers']
  np.testing.assert_array_equal(after['q'][:, 0], scale)
  np.testing.assert_array_equal(after['attn_norm'], layers['attn_norm'])


def test_thresholds_are_the_papers():
  """α 1.5 → 1.1, β 1.5, and at most a quarter of the layers."""
  paper = gnmr.gnmr_config('gnmr 1.1', 120)
  assert (paper.alpha, paper.first_steps, paper.max_active) == (1.1, 3, 2)
  assert paper.first_alpha == pytest.approx(1.5) == paper.beta
  assert gnmr.gnmr_config('gnmr 2.2', 120).beta == pytest.approx(3.0)


def test_paths_of_each_scenario():
  """A layer without a fault has the same low path in all scenarios of block FP8."""
  for scenario in gnmr.RATES:
    paths = gnmr.model(scenario).paths
    assert paths[gnmr.LOW] != paths[gnmr.HIGH]
    assert (paths[gnmr.FAULTY] != paths[gnmr.LOW]) == (scenario == 'saturation')


def test_rows_compare_with_the_same_seed():
  def result(policy, seed, loss, step_ms, cap_hits=None):
    return {
      'scenario': 'activations',
      'policy': policy,
      'seed': seed,
      'loss': loss,
      'promoted': 0.5,
      'cap_hits': cap_hits,
      'recovered': None,
      'step_ms': step_ms,
    }

  runs = [
    result('low', 0, 5.0, 10.0),
    result('low', 1, 6.0, 10.0),
    result('high', 0, 4.5, 20.0),
    result('high', 1, 5.0, 40.0),
    result('gnmr 2', 0, 4.75, 30.0, 0.25),
  ]
  low, high, controlled = gnmr.rows(runs)
  assert low['from_low'] == [0, 0] and low['step'] == [0.5, 0.25]
  assert high['from_low'] == [-0.5, -1] and high['cap_hits'] == []
  assert controlled['from_low'] == [-0.25] and controlled['step'] == [1.5]
  assert gnmr.cell([1.0, 3.0, 2.0], 1) == '2.0 [1.0, 3.0]'
  assert gnmr.table([low, high, controlled]).count('\n') == 4
