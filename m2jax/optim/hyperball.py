"""Hyperball Muon: every matrix keeps its Frobenius norm R.

  W ← R · normalize(W − η R · normalize(U)),   R = ‖W‖_F

with U Muon's orthogonalised momentum and normalize(X) = X/‖X‖_F. The rate is a relative
change, so the scale of the shape does not matter, and weight decay would not either.

Source: Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them 2.1:
Hyperball Optimization", 2025; the form is that of NVIDIA's Emerging-Optimizers #89.

Axes: in, out of a matrix.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax

from m2jax.optim import muon
from m2jax.optim.matrices import Matrices
from m2jax.optim.msign import normalized
from m2jax.optim.muon import MuonConfig


@dataclasses.dataclass(frozen=True)
class HyperballConfig(MuonConfig):
  """Hyperball Muon; `scale` and `consistent_rms` have no effect."""

  def transformation(self, learning_rate, decay, matrices):
    """Hyperball Muon with the schedule inside; `decay` would have no effect."""
    del decay
    return hyperball(learning_rate, self, self.matrices(matrices))


def hyperball(
  learning_rate: optax.ScalarOrSchedule, config: HyperballConfig, matrices: Matrices
) -> optax.GradientTransformation:
  """Updates of trees whose every leaf is [*stack, in, out]; they need the parameters.

  Args:
    learning_rate: η, a number or by step: part of the norm that a step has.
    config: settings of the momentum and its orthogonalisation.
    matrices: heads of q, k and v by parameter's name, and where the parameters are.
  """

  def update(gradients, state, params=None):
    if params is None:
      raise ValueError('hyperball: update(gradients, state, params) needs params')
    count = state.count
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    direction, state = muon.ahead(gradients, state, config.beta, config.nesterov)

    def one(w, x, rate):
      radius = jnp.linalg.norm(w)
      moved = w - rate * radius * normalized(config.orthogonal(x))
      return (radius * normalized(moved) - w).astype(w.dtype)

    rates = matrices.each(params, rate)
    return matrices.map_tree(one, params, direction, rates), state

  return optax.GradientTransformation(muon.init, update)
