"""Muon on stacked parameters: momentum, orthogonalised matrix by matrix.

optax's `scale_by_muon` (facts/algorithms.md §1.9) with the dimension numbers spelled out
for every leaf: without them a stacked [L, in, out] or [L, E, in, out] weight would
silently be left to Adam. All axes but the last two are batch axes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from optax import contrib

# The last two axes of a leaf are a matrix (in, out): y = x W.
MATRIX = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)


def muon(
  *,
  beta: float,
  nesterov: bool,
  eps: float,
  ns_steps: int,
  preconditioning: str,
  consistent_rms: float | None,
) -> optax.GradientTransformation:
  """Muon's direction for trees whose every leaf is [..., in, out].

  Args:
    beta: decay of the momentum.
    nesterov: look ahead by one step of momentum.
    eps: least norm of a matrix that is still scaled to 1 before the iteration. Small,
      for the reason that Adam's ε is: gradients of RL span 1e-18…1e-5.
    ns_steps: Newton–Schulz iterations.
    preconditioning: 'frobenius', or 'aol' (arXiv 2512.04632), which reaches with 4
      iterations what 'frobenius' does with 5.
    consistent_rms: scales a matrix by sqrt(max(in, out)) times this, so that updates
      have Adam's size (0.2, arXiv 2502.16982); None scales by sqrt(max(1, out/in)).
  """

  def dimension_numbers(params):
    return jax.tree.map(lambda _: MATRIX, params)

  return optax.chain(
    contrib.scale_by_muon(
      ns_steps=ns_steps,
      beta=beta,
      eps=eps**2 if preconditioning == 'aol' else eps,  # AOL clips a squared norm
      nesterov=nesterov,
      preconditioning=preconditioning,
      weight_dimension_numbers=dimension_numbers,
    ),
    optax.stateless(
      lambda updates, params: jax.tree.map(
        lambda u: u * _shape_scale(u.shape, consistent_rms), updates
      )
    ),
  )


def _shape_scale(shape: tuple[int, ...], consistent_rms: float | None) -> float:
  fan_in, fan_out = shape[-2:]
  if consistent_rms is None:
    return max(1.0, fan_out / fan_in) ** 0.5
  return consistent_rms * max(fan_in, fan_out) ** 0.5
