"""Muon on stacked parameters: momentum, orthogonalised matrix by matrix.

Leaves are [*stack, in, out] (y = x W), and `matrices` determines which matrices they
contain, so that each gets the update that it would get alone, on one device or many.
The formulas are those of optax's `contrib.scale_by_muon` (facts/algorithms.md §1.9),
the reference in the tests. It is not called, for three reasons: it takes a stack as one
batch, which a mesh would gather; at tiny sizes on CPU that batch does not fit the
cache; and the ε of its 'aol' is fixed at 1e-4 of the norm, above most gradients of RL.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from m2jax.axes import Array, Float, Int32
from m2jax.checks import require
from m2jax.optim import msign
from m2jax.optim.matrices import PLAIN, Matrices
from m2jax.optim.rule import MatrixRule

PRECONDITIONINGS = ('frobenius', 'aol')
SCALES = ('kaiming', 'spectral')


@dataclasses.dataclass(frozen=True)
class MuonConfig(MatrixRule):
  """Muon; the last two axes of each array are a matrix, or heads side by side.

  Attributes:
    beta, nesterov, eps, ns_steps, preconditioning, scale, consistent_rms: see
      `scale_by_muon`.
  """

  learning_rate: float = 0.02
  beta: float = 0.95
  nesterov: bool = True
  eps: float = 1e-15
  ns_steps: int = 5
  preconditioning: str = 'frobenius'
  scale: str = 'kaiming'
  consistent_rms: float | None = None

  def __post_init__(self):
    super().__post_init__()
    require(self, 0 <= self.beta < 1, 'beta', 'in [0, 1)')
    for field in ('eps', 'ns_steps'):
      require(self, getattr(self, field) > 0, field, 'positive')
    known = self.preconditioning in PRECONDITIONINGS
    require(self, known, 'preconditioning', f'one of {PRECONDITIONINGS}')
    require(self, self.scale in SCALES, 'scale', f'one of {SCALES}')

  def orthogonal(self, x: jax.Array) -> Array:
    """`orthogonalize` with these settings."""
    return orthogonalize(
      x, eps=self.eps, ns_steps=self.ns_steps, preconditioning=self.preconditioning
    )

  def matrix_direction(self, matrices: Matrices) -> optax.GradientTransformation:
    return scale_by_muon(
      beta=self.beta,
      nesterov=self.nesterov,
      eps=self.eps,
      ns_steps=self.ns_steps,
      preconditioning=self.preconditioning,
      scale=self.scale,
      consistent_rms=self.consistent_rms,
      matrices=matrices,
    )


class MuonState(NamedTuple):
  """Steps taken and the momentum, one array a parameter."""

  count: Int32[Array, '']  # type: ignore[assignment]  # tuples have a method count
  mu: Any


def scale_by_muon(
  *,
  beta: float = 0.95,
  nesterov: bool = True,
  eps: float = 1e-15,
  ns_steps: int = 5,
  preconditioning: str = 'frobenius',
  scale: str = 'kaiming',
  consistent_rms: float | None = None,
  matrices: Matrices = PLAIN,
) -> optax.GradientTransformation:
  """Muon's direction for trees whose every leaf is [*stack, in, out].

  Args:
    beta: decay of the momentum, an average with bias correction.
    nesterov: look ahead by one step of momentum.
    eps, ns_steps, preconditioning: see `orthogonalize`.
    scale, consistent_rms: see `shape_scale`.
    matrices: heads of q, k and v by parameter's name, and where the parameters are.
  """

  def one(x):
    x = orthogonalize(x, eps=eps, ns_steps=ns_steps, preconditioning=preconditioning)
    return x * shape_scale(x.shape, scale, consistent_rms)

  def update(gradients, state, params=None):
    del params
    direction, state = ahead(gradients, state, beta, nesterov)
    return matrices.map_tree(one, direction), state

  return optax.GradientTransformation(init, update)


def init(params: Any) -> MuonState:
  """No steps, no momentum."""
  return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))


def ahead(
  gradients: Any, state: MuonState, beta: float, nesterov: bool
) -> tuple[Any, MuonState]:
  """The momentum to follow, bias-corrected, and the next state."""
  count = optax.safe_increment(state.count)
  mu = optax.tree.update_moment(gradients, state.mu, beta, 1)
  if nesterov:
    later = optax.tree.bias_correction(mu, beta, count + 1)
    now = optax.tree.bias_correction(gradients, beta, count)
    direction = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, later, now)
  else:
    direction = optax.tree.bias_correction(mu, beta, count)
  return direction, MuonState(count, mu)


def orthogonalize(
  x: Float[Array, '*batch in out'],
  *,
  eps: float = 1e-15,
  ns_steps: int = 5,
  preconditioning: str = 'frobenius',
) -> Float[Array, '*batch in out']:
  """Approximately U Vᵀ of each matrix U S Vᵀ of x; 0 for a zero matrix.

  At the default precision of products: singular values end in about [0.7, 1.2] in any.
  `msign.msign` is the exact form.

  Args:
    x: matrices of any float dtype; the result has the same.
    eps: least norm that is scaled up to 1 before the iteration. As small as Adam's ε:
      gradients of RL are 1e-18 to 1e-5.
    ns_steps: Newton–Schulz iterations.
    preconditioning: 'frobenius', or 'aol' (arXiv 2512.04632), which scales rows and is
      with 4 iterations as exact as 'frobenius' with 5.
  """
  wide = x.shape[-2] <= x.shape[-1]
  y, steps = x if wide else x.mT, ns_steps
  if preconditioning == 'aol':
    gram = y @ y.mT
    rows = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
    scale = lax.rsqrt(jnp.maximum(rows, eps**2))
    a, b, c = msign.QUINTIC
    y, gram = y * scale, gram * scale * scale.mT
    y, steps = a * y + (b * gram + c * gram @ gram) @ y, steps - 1
  else:
    y = y / (jnp.linalg.norm(y, axis=(-2, -1), keepdims=True) + eps)
  y = msign.iterate(y, (msign.QUINTIC,) * steps, precision=None) if steps else y
  return y if wide else y.mT


def shape_scale(
  shape: tuple[int, ...], scale: str, consistent_rms: float | None
) -> float:
  """Factor on an orthogonal matrix of a shape [in, out].

  Args:
    shape: the matrix's shape.
    scale: 'kaiming', sqrt(max(1, out/in)), or 'spectral', sqrt(out/in): spectral µP's,
      and that of SSO with c = 1.
    consistent_rms: instead sqrt(max(in, out)) times this, so that updates have Adam's
      size (0.2, arXiv 2502.16982).
  """
  fan_in, fan_out = shape[-2:]
  if consistent_rms is not None:
    return consistent_rms * max(fan_in, fan_out) ** 0.5
  ratio = fan_out / fan_in
  return (ratio if scale == 'spectral' else max(1.0, ratio)) ** 0.5
