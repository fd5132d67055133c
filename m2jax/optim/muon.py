"""Muon on stacked parameters: momentum, orthogonalised matrix by matrix.

Leaves are [..., in, out] (y = x W); every axis but the last two is a batch axis
(layers, modules, experts), so that each matrix of a stacked weight gets the update that
it would get alone. The formulas are those of optax's `contrib.scale_by_muon`
(facts/algorithms.md §1.9), the reference in the tests. It is not called, for two
reasons: at tiny sizes on CPU it is slower, since its batched products do not fit the
cache, and the ε of its 'aol' is fixed at 1e-4 of the norm, above most gradients of RL.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from m2jax.axes import Array, Float, Int32
from m2jax.checks import require
from m2jax.optim.rule import UpdateRule
from m2jax.params import Kind

# Keller Jordan's quintic: steep at 0, singular values end in about [0.7, 1.2].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
PRECONDITIONINGS = ('frobenius', 'aol')


@dataclasses.dataclass(frozen=True)
class MuonConfig(UpdateRule):
  """Muon; the last two axes of each array are a matrix.

  Attributes:
    beta, nesterov, eps, ns_steps, preconditioning, consistent_rms: see
      `scale_by_muon`.
  """

  KINDS: ClassVar[tuple[Kind, ...]] = tuple(k for k in Kind if k != Kind.NORM)

  learning_rate: float = 0.02
  beta: float = 0.95
  nesterov: bool = True
  eps: float = 1e-15
  ns_steps: int = 5
  preconditioning: str = 'frobenius'
  consistent_rms: float | None = None

  def __post_init__(self):
    super().__post_init__()
    require(self, 0 <= self.beta < 1, 'beta', 'in [0, 1)')
    for field in ('eps', 'ns_steps'):
      require(self, getattr(self, field) > 0, field, 'positive')
    known = self.preconditioning in PRECONDITIONINGS
    require(self, known, 'preconditioning', f'one of {PRECONDITIONINGS}')

  def direction(self) -> optax.GradientTransformation:
    return scale_by_muon(
      beta=self.beta,
      nesterov=self.nesterov,
      eps=self.eps,
      ns_steps=self.ns_steps,
      preconditioning=self.preconditioning,
      consistent_rms=self.consistent_rms,
    )


class MuonState(NamedTuple):
  """Steps taken and the momentum, one array a parameter."""

  count: Int32[Array, '']
  mu: Any


def scale_by_muon(
  *,
  beta: float = 0.95,
  nesterov: bool = True,
  eps: float = 1e-15,
  ns_steps: int = 5,
  preconditioning: str = 'frobenius',
  consistent_rms: float | None = None,
) -> optax.GradientTransformation:
  """Muon's direction for trees whose every leaf is [..., in, out].

  Args:
    beta: decay of the momentum, an average with bias correction.
    nesterov: look ahead by one step of momentum.
    eps, ns_steps, preconditioning: see `orthogonalize`.
    consistent_rms: scales a matrix by sqrt(max(in, out)) times this, so that updates
      have Adam's size (0.2, arXiv 2502.16982); None scales by sqrt(max(1, out/in)).
  """

  def init(params):
    return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

  def update(gradients, state, params=None):
    del params
    count = optax.safe_increment(state.count)
    mu = optax.tree.update_moment(gradients, state.mu, beta, 1)
    if nesterov:
      ahead = optax.tree.bias_correction(mu, beta, count + 1)
      now = optax.tree.bias_correction(gradients, beta, count)
      direction = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
    else:
      direction = optax.tree.bias_correction(mu, beta, count)

    def one(x):
      x = orthogonalize(x, eps=eps, ns_steps=ns_steps, preconditioning=preconditioning)
      return x * _shape_scale(x.shape, consistent_rms)

    return jax.tree.map(one, direction), MuonState(count, mu)

  return optax.GradientTransformation(init, update)


def orthogonalize(
  x: Float[Array, '*batch fan_in fan_out'],
  *,
  eps: float = 1e-15,
  ns_steps: int = 5,
  preconditioning: str = 'frobenius',
) -> Float[Array, '*batch fan_in fan_out']:
  """Approximately U Vᵀ of each matrix U S Vᵀ of x; 0 for a zero matrix.

  Args:
    x: of any float dtype, which is the result's.
    eps: least norm that is scaled up to 1 before the iteration. As small as Adam's ε:
      gradients of RL are 1e-18 to 1e-5.
    ns_steps: Newton–Schulz iterations.
    preconditioning: 'frobenius', or 'aol' (arXiv 2512.04632), which scales rows and is
      with 4 iterations as exact as 'frobenius' with 5.
  """

  def one(y):  # [m, n] with m <= n
    a, b, c = COEFFICIENTS

    def iterate(y, gram):
      return a * y + (b * gram + c * gram @ gram) @ y

    steps = ns_steps
    if preconditioning == 'aol':
      gram = y @ y.T
      rows = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
      scale = jax.lax.rsqrt(jnp.maximum(rows, eps**2))
      y = iterate(y * scale, gram * scale * scale.T)
      steps -= 1
    else:
      y = y / (jnp.linalg.norm(y) + eps)
    return jax.lax.fori_loop(0, steps, lambda _, y: iterate(y, y @ y.T), y)

  def batched(x):  # one vmap an axis: each may be split over devices
    over = one if wide else lambda y: one(y.mT).mT
    for _ in range(x.ndim - 2):
      over = jax.vmap(over)
    return over(x)

  def in_turn(x):
    matrices = x.reshape(-1, *x.shape[-2:])
    matrices = matrices if wide else matrices.mT
    matrices = jax.lax.map(one, matrices)
    matrices = matrices if wide else matrices.mT
    return matrices.reshape(x.shape)

  wide = x.shape[-2] <= x.shape[-1]
  # On CPU one matrix at a time stays in cache; elsewhere the batch fills the device.
  return jax.lax.platform_dependent(x, cpu=in_turn, default=batched)


def _shape_scale(shape: tuple[int, ...], consistent_rms: float | None) -> float:
  fan_in, fan_out = shape[-2:]
  if consistent_rms is None:
    return max(1.0, fan_out / fan_in) ** 0.5
  return consistent_rms * max(fan_in, fan_out) ** 0.5
