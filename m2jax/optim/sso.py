"""SSO, the Spectral Sphere Optimizer; with `solve=False` MuonSphere.

Every matrix has a spectral norm R of its own, c · sqrt(out/in). A step of rate η:

  M ← β M + (1 − β) G,   N = β M + (1 − β) G       momentum, looking ahead (Nesterov)
  σ, Θ = uvᵀ             of W, by power iteration from the last step's v
  Φ = msign(N + λΘ)      `sphere.direction`; λ = 0 for MuonSphere
  W ← W · R/σ − η R Φ

The retraction W · R/σ does not contain η, so this transformation applies the schedule
itself, and nothing may scale the updates after it. The dynamic retraction of the
paper's appendix is W ← W · (1 + κ η sign(R − σ)) instead. There is no weight decay:
under the retraction it would have no effect (facts/algorithms.md §1.5).

Source: arXiv:2601.08393, Algorithm 1 (facts/algorithms.md §1.2 to §1.7).

Axes: in, out of a matrix (y = x W); heads, experts and layers are stacks of matrices.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from m2jax.axes import Array, Float, Int32
from m2jax.checks import require
from m2jax.optim import msign, sphere
from m2jax.optim.matrices import PLAIN, Matrices, transpose
from m2jax.optim.rule import MatrixRule
from m2jax.params import Kind

RETRACTIONS = ('hard', 'dynamic')
STARTS = ('spectral', 'current')
COLD_ITERATIONS = 100  # of the power iteration from a random vector


@dataclasses.dataclass(frozen=True)
class SphereSettings:
  """What a step on the sphere is.

  Attributes:
    beta: β, decay of the momentum.
    nesterov: look ahead by one step of momentum.
    radius: c; R = c · sqrt(out/in).
    start_radius: 'spectral' for that R, or 'current' for ‖W‖₂ when the optimizer's
      state is made: for weights that were not trained on the sphere.
    retraction: 'hard' or 'dynamic'.
    retraction_rate: κ of the dynamic one.
    power_iterations: number per step, from the last vector.
    msign_steps: iterations of Polar Express.
    solve: whether to solve for λ; False is λ = 0, MuonSphere.
    tolerance: largest |h(λ)| that counts as solved.
    max_evaluations: limit on evaluations of msign in a step.
  """

  beta: float = 0.9
  nesterov: bool = True
  radius: float = 1.0
  start_radius: str = 'spectral'
  retraction: str = 'hard'
  retraction_rate: float = 0.1
  power_iterations: int = 3
  msign_steps: int = 8
  solve: bool = True
  tolerance: float = 2e-4
  max_evaluations: int = 20

  def __post_init__(self):
    if isinstance(self, MatrixRule):
      super().__post_init__()
    require(self, 0 <= self.beta < 1, 'beta', 'in [0, 1)')
    for field in ('radius', 'retraction_rate', 'tolerance'):
      require(self, getattr(self, field) > 0, field, 'positive')
    for field in ('power_iterations', 'max_evaluations'):
      require(self, getattr(self, field) >= 1, field, 'at least 1')
    most = len(msign.POLAR_EXPRESS)
    require(self, 1 <= self.msign_steps <= most, 'msign_steps', f'in [1, {most}]')
    for field, known in (('retraction', RETRACTIONS), ('start_radius', STARTS)):
      require(self, getattr(self, field) in known, field, f'one of {known}')


class Report(NamedTuple):
  """Statistics over all matrices of a step, for the log.

  Attributes:
    sigma_max, sigma_min: σ/R before the retraction.
    multiplier_max: largest |λ|.
    residual_max: largest |h(λ)|: |⟨Θ, Φ⟩|, also of MuonSphere.
    evaluations, evaluations_max: evaluations of msign, mean and largest.
  """

  sigma_max: Float[Array, '']
  sigma_min: Float[Array, '']
  multiplier_max: Float[Array, '']
  residual_max: Float[Array, '']
  evaluations: Float[Array, '']
  evaluations_max: Float[Array, '']


class SphereState(NamedTuple):
  """State between steps.

  Attributes:
    count: steps taken.
    momentum: a tree like the parameters.
    right: top right singular vector of each matrix, [*stack, 1, out].
    radius: R of each matrix, [*stack, 1, 1]; with heads [*stack, 1, heads]. A run that
      resumes keeps it, whatever its settings say.
    multiplier, slope: `sphere.Guess` of each matrix, as `radius`.
    report: the last step's report.
  """

  count: Int32[Array, '']  # type: ignore[assignment]  # tuples have a method count
  momentum: Any
  right: Any
  radius: Any
  multiplier: Any
  slope: Any
  report: Report


def sso(
  learning_rate: optax.ScalarOrSchedule,
  settings: SphereSettings = SphereSettings(),
  matrices: Matrices = PLAIN,
) -> optax.GradientTransformation:
  """SSO for trees whose every leaf is [*stack, in, out]; updates need the parameters.

  Args:
    learning_rate: η, a number or by step.
    settings: a step's settings.
    matrices: heads of q, k and v by parameter's name, and where the parameters are.

  Raises:
    ValueError: parameters of less than fp32, which would lose the retraction.

  Example:
    >>> tx = sso(5e-3)
    >>> params = on_sphere({'q': jax.random.normal(jax.random.key(0), (4, 8, 8))})
    >>> updates, state = tx.update(params, tx.init(params), params)
  """

  def init(params):
    jax.tree.map(_check_dtype, params)

    def one(w):
      at = sphere.top(w, _start(w), COLD_ITERATIONS)
      radius = _radius(w, settings)
      if settings.start_radius == 'current':
        radius = jnp.where(at.sigma > 0, at.sigma, radius)
      return at.right, radius

    right, radius = transpose(params, matrices.map_tree(one, params), 2)
    momentum = optax.tree.zeros_like(params)
    # arrays of their own, since a step donates each
    multiplier, slope = (optax.tree.zeros_like(radius) for _ in range(2))
    report = Report(*(jnp.zeros((), jnp.float32) for _ in Report._fields))
    count = jnp.zeros((), jnp.int32)
    return SphereState(count, momentum, right, radius, multiplier, slope, report)

  def update(gradients, state: SphereState, params=None):
    if params is None:
      raise ValueError('sso: update(gradients, state, params) needs params')
    rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
    momentum = optax.tree.update_moment(gradients, state.momentum, settings.beta, 1)
    ahead = momentum
    if settings.nesterov:
      ahead = optax.tree.update_moment(gradients, momentum, settings.beta, 1)

    def one(w, ahead, right, radius, rate, *guess):
      guess = sphere.Guess(*guess)
      return _step(w, ahead, right, radius, rate, guess, settings)

    rates, guess = matrices.each(params, rate), (state.multiplier, state.slope)
    found = matrices.map_tree(
      one, params, ahead, state.right, state.radius, rates, *guess
    )
    updates, right, guess, numbers = transpose(params, found, 4)
    multiplier, slope = transpose(params, guess, 2)
    state = SphereState(
      optax.safe_increment(state.count),
      momentum,
      right,
      state.radius,
      multiplier,
      slope,
      _report(jax.tree.leaves(numbers, is_leaf=_is_numbers)),
    )
    return updates, state

  return optax.GradientTransformation(init, update)


class _Numbers(NamedTuple):
  """σ/R, λ, h(λ) and evaluations of each matrix."""

  sigma: Any
  multiplier: Any
  residual: Any
  evaluations: Any


def _step(w, ahead, right, radius, rate, guess, settings: SphereSettings):
  """Update, right singular vector, next guess and numbers of one matrix."""
  at = sphere.top(w, right, settings.power_iterations)
  coefficients = msign.POLAR_EXPRESS[: settings.msign_steps]
  if settings.solve:
    found, guess = sphere.direction(
      ahead,
      at,
      guess,
      tolerance=settings.tolerance,
      max_evaluations=settings.max_evaluations,
      coefficients=coefficients,
    )
  else:
    found = sphere.straight(ahead, at, coefficients)
  ratio = jnp.where(at.sigma > 0, at.sigma / radius, 1)
  if settings.retraction == 'hard':
    factor = 1 / ratio - 1
  else:
    factor = settings.retraction_rate * rate * jnp.sign(1 - ratio)
  update = factor * w - rate * radius * found.direction
  numbers = _Numbers(
    ratio,
    found.multiplier[None, None],
    found.residual[None, None],
    found.evaluations.astype(w.dtype)[None, None],
  )
  # a zero matrix has no singular vectors: stay at the last ones
  right = jnp.where(at.sigma > 0, at.right, right)
  return update.astype(w.dtype), right, guess, numbers


def _report(numbers: list[_Numbers]) -> Report:
  def over(reduce, values):
    return reduce(jnp.stack([reduce(x) for x in values])).astype(jnp.float32)

  count = sum(x.evaluations.size for x in numbers)
  return Report(
    over(jnp.max, [x.sigma for x in numbers]),
    over(jnp.min, [x.sigma for x in numbers]),
    over(jnp.max, [jnp.abs(x.multiplier) for x in numbers]),
    over(jnp.max, [jnp.abs(x.residual) for x in numbers]),
    over(jnp.sum, [x.evaluations for x in numbers]) / count,
    over(jnp.max, [x.evaluations for x in numbers]),
  )


def metrics(state: Any) -> dict[str, jax.Array]:
  """Metrics of all reports in an optimizer's state; none without one."""
  is_report = lambda x: isinstance(x, Report)  # noqa: E731
  reports = [x for x in jax.tree.leaves(state, is_leaf=is_report) if is_report(x)]
  if not reports:
    return {}

  def over(reduce, field):
    return reduce(jnp.stack([getattr(x, field) for x in reports]))

  return {
    'sphere/sigma_max': over(jnp.max, 'sigma_max'),
    'sphere/sigma_min': over(jnp.min, 'sigma_min'),
    'sphere/multiplier_max': over(jnp.max, 'multiplier_max'),
    'sphere/residual_max': over(jnp.max, 'residual_max'),
    'sphere/evaluations': over(jnp.mean, 'evaluations'),
    'sphere/evaluations_max': over(jnp.max, 'evaluations_max'),
  }


def _is_numbers(x: Any) -> bool:
  return isinstance(x, _Numbers)


def on_sphere(
  params: Any,
  settings: SphereSettings = SphereSettings(),
  matrices: Matrices = PLAIN,
) -> Any:
  """Parameters whose matrices are scaled to ‖W‖₂ = c · sqrt(out/in)."""

  def one(w):
    sigma = sphere.top(w, _start(w), COLD_ITERATIONS).sigma
    return w * (_radius(w, settings) / jnp.where(sigma > 0, sigma, 1))

  return matrices.map_tree(one, params)


def _radius(w: jax.Array, settings: SphereSettings) -> jax.Array:
  fan_in, fan_out = w.shape
  return jnp.full((1, 1), settings.radius * (fan_out / fan_in) ** 0.5, w.dtype)


def _start(w: jax.Array) -> jax.Array:
  """A random vector [1, out]; the same for all matrices of a width."""
  return jnp.asarray(np.random.default_rng(0).normal(size=(1, w.shape[-1])), w.dtype)


def _check_dtype(x: jax.Array) -> None:
  if jnp.promote_types(x.dtype, jnp.float32) != x.dtype:
    raise ValueError(
      f'sso: parameters in {x.dtype} would lose the retraction, a factor near 1; use '
      "ModelConfig.param_dtype='float32'"
    )


@dataclasses.dataclass(frozen=True)
class SsoConfig(SphereSettings, MatrixRule):
  """SSO: the settings of a step, and the rate.

  As `OptimizerConfig.name` it updates the router too, as the published code does.
  Embedding and head, whose rows are looked up, are not for it.
  """

  KINDS: ClassVar[tuple[Kind, ...]] = (Kind.MATRIX, Kind.EXPERT, Kind.ROUTER)
  HIDDEN: ClassVar[tuple[Kind, ...]] = KINDS

  learning_rate: float = 5e-3
  split_heads: bool = True

  def transformation(self, learning_rate, decay, matrices):
    """SSO with the schedule inside; `decay` would have no effect on a sphere."""
    del decay
    return sso(learning_rate, self, self.matrices(matrices))

  def initialize(self, params, matrices):
    """Every matrix on its sphere."""
    if self.start_radius == 'current':
      return params
    return on_sphere(params, self, self.matrices(matrices))


@dataclasses.dataclass(frozen=True)
class MuonSphereConfig(SsoConfig):
  """SSO without the multiplier: one evaluation of msign a step, no tangent condition.

  `tolerance` and `max_evaluations` are not used.
  """

  solve: bool = False
