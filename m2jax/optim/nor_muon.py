"""NorMuon: Muon whose output neurons move by equal amounts on average.

With O the orthogonalised momentum of a matrix, and a mean square for each column (the
neuron of an output, y = x W):

  v ← β₂ v + (1 − β₂) mean over in of O²
  Ô = O / sqrt(v),   update = Ô · ‖O‖_F / ‖Ô‖_F · the scale of the shape

The norm of the update stays Muon's, so rates carry over; v needs no bias correction,
which would be a factor on the whole matrix.

Source: arXiv:2510.05491 and its published code, whose rows are these columns.

Axes: in, out of a matrix.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from m2jax.checks import require
from m2jax.optim import muon
from m2jax.optim.matrices import Matrices, transpose
from m2jax.optim.muon import MuonConfig, MuonState

_EPS = 1e-10  # of a root mean square whose mean is 1/sqrt(max(in, out))


@dataclasses.dataclass(frozen=True)
class NorMuonConfig(MuonConfig):
  """NorMuon: the settings of Muon and of the mean squares.

  Attributes:
    b2: β₂, decay of the mean squares.
  """

  b2: float = 0.95

  def __post_init__(self):
    super().__post_init__()
    require(self, 0 <= self.b2 < 1, 'b2', 'in [0, 1)')

  def matrix_direction(self, matrices: Matrices) -> optax.GradientTransformation:
    return scale_by_nor_muon(self, matrices)


class NorMuonState(NamedTuple):
  """Muon's state, and v of each matrix, [*stack, 1, out]."""

  muon: MuonState
  square: Any


def scale_by_nor_muon(
  config: NorMuonConfig, matrices: Matrices
) -> optax.GradientTransformation:
  """NorMuon's direction for trees whose every leaf is [*stack, in, out]."""

  def init(params):
    square = jax.tree.map(lambda x: jnp.zeros_like(x[..., :1, :]), params)
    return NorMuonState(muon.init(params), square)

  def one(x, square):
    x = config.orthogonal(x)
    now = jnp.mean(jnp.square(x), axis=-2, keepdims=True)
    square = config.b2 * square + (1 - config.b2) * now
    y = x / (jnp.sqrt(square) + _EPS)
    norm = jnp.linalg.norm(y)
    y = y * (jnp.linalg.norm(x) / jnp.where(norm > 0, norm, 1))
    return y * muon.shape_scale(x.shape, config.scale, config.consistent_rms), square

  def update(gradients, state: NorMuonState, params=None):
    del params
    direction, inner = muon.ahead(gradients, state.muon, config.beta, config.nesterov)
    found = matrices.map_tree(one, direction, state.square)
    updates, square = transpose(direction, found, 2)
    return updates, NorMuonState(inner, square)

  return optax.GradientTransformation(init, update)
