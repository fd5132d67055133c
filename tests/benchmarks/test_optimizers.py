"""How benchmarks.optimizers adds up; it runs for minutes itself."""

from __future__ import annotations

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
  assert optimizers.table([adam, sso]).count('\n') == 3


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
