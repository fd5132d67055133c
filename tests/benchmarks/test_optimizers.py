"""How benchmarks.optimizers adds up; it runs for minutes itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import optimizers
from m2jax import params
from m2jax.optim import optimizer as optimizer_lib


def result(variant, rate, seed, losses):
  """A run of 40 steps with four evaluations."""
  return {
    'variant': variant,
    'width': 32,
    'layers': 2,
    'rate': rate,
    'steps': 40,
    'seed': seed,
    'loss': losses[-1],
    'curve': list(zip((10, 20, 30, 40), losses, strict=True)),
    'max_violation': 1.0,
    'activation': 2.0,
    'evaluations': 0.0,
  }


def test_steps_to_a_loss():
  """Between evaluations by a line; infinite if never."""
  curve = [(10, 5.0), (20, 4.0), (30, 3.5)]
  assert optimizers.reached(curve, 4.5) == pytest.approx(15)
  assert optimizers.reached(curve, 3.5) == pytest.approx(30)
  assert optimizers.reached(curve, 3.0) == float('inf')


def test_rows_compare_with_adam_of_the_same_seed():
  """The best rate by the first seed; loss at Adam's time by the times of a step, where
  a faster optimizer gets no more steps than it had."""
  runs = [
    result('adam', 0.01, 0, [6, 5, 4.5, 4.0]),
    result('adam', 0.02, 0, [6, 5, 4.5, 4.2]),
    result('adam', 0.01, 1, [6, 5, 4.5, 4.1]),
    result('sso', 0.01, 0, [5, 4, 3.5, 3.0]),
    result('sso', 0.01, 1, [5, 4.1, 3.5, 3.2]),
  ]
  times = {'32x2': {'adam': 10.0, 'sso': 20.0}}
  adam, sso = optimizers.rows(runs, times)
  assert adam['rate'] == 0.01 and adam['loss'] == [4.0, 4.1]
  assert adam['steps_to_adams'] == [1.0, 1.0] and adam['at_adams_time'] == [4.0, 4.1]
  assert sso['at_adams_time'] == [4.0, 4.1] and sso['step'] == 2.0
  np.testing.assert_allclose(sso['steps_to_adams'], [0.5, 0.5])
  assert optimizers.table([adam, sso]).count('\n| 32 × 2 |') == 2 * 2


@pytest.mark.parametrize('best', [0.00125, 0.01, 0.32])
def test_the_grid_is_extended_at_its_ends(best):
  """Until the best rate has neighbours on both sides; each rate is tried once."""
  tried = []

  def run(rate):
    tried.append(rate)
    return {'rate': rate, 'loss': abs(np.log2(rate / best))}

  found = optimizers.search((0.005, 0.01, 0.02), run)
  rates = [result['rate'] for result in found]
  assert rates == sorted(set(tried)) and len(tried) == len(rates)
  assert min(found, key=lambda r: r['loss'])['rate'] == pytest.approx(best)
  assert rates[0] < best < rates[-1]


def test_the_rate_is_data():
  """The update of the optimizer that `settings` describe, at a rate in the state."""
  cfg = dataclasses.replace(optimizers.model(32, 1), vocab_size=16)
  like = params.shapes(cfg)['params']
  values = jax.tree.map(lambda x: jnp.full(x.shape, 0.1), like)
  config = optimizers.settings('muon', 0.5, 100)
  want = optimizer_lib.make(config, cfg)
  got = optimizers.with_rate(optimizers.settings('muon', 0.0, 100), cfg)
  state = got.init(values)._replace(rate=jnp.float32(0.5))
  updates = [
    jax.jit(tx.update)(values, state, values)[0]
    for tx, state in ((want, want.init(values)), (got, state))
  ]
  jax.tree.map(np.testing.assert_array_equal, *updates)
  assert np.any(updates[0]['layers']['q'])


def test_variants_differ_where_they_say():
  """Every optimizer has the hidden matrices and one rate there, and Adam the rest."""
  cfg = optimizers.model(32, 2)
  shapes = params.shapes(cfg)['params']
  for variant in optimizers.VARIANTS:
    config = optimizers.settings(variant, 0.5, 100)
    found = optimizer_lib.partition(config, shapes)
    rates = optimizer_lib.learning_rates(config, 5)
    rules = {kind: part.rule for kind, part in found.items()}
    assert {rules[kind] for kind in ('embedding', 'head', 'norm')} == {'adam'}
    assert rules['matrix'] == rules['expert'] != 'adam'
    assert float(rates[rules['matrix']]) == pytest.approx(0.5, rel=0.01)
  assert not optimizers.settings('joint_heads', 0.1, 100).sso.split_heads
  assert optimizers.settings('muon_spectral', 0.1, 100).muon.scale == 'spectral'
