"""Helpers shared by the Pallas kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class Blocked(NamedTuple):
  """An operand or result of a kernel, and the block of it that one grid step sees."""

  array: Any  # a pytree of arrays, or of ShapeDtypeStruct for a result
  spec: Any  # its BlockSpecs


def blocked(arrays, specs) -> list[Blocked]:
  return [Blocked(*pair) for pair in zip(arrays, specs, strict=True)]


def dot(a, b, axis_a, axis_b):
  """Contracts one axis of each matrix, in fp32 whatever the default precision."""
  fp32 = a.dtype == jnp.float32
  return lax.dot_general(
    a,
    b,
    (((axis_a,), (axis_b,)), ((), ())),
    precision=lax.Precision.HIGHEST if fp32 else lax.Precision.DEFAULT,
    preferred_element_type=jnp.float32,
  )


def edges(ids, step, steps):
  """Whether this step is the first, and the last, of consecutive steps with its id."""
  before, after = ids[jnp.maximum(step - 1, 0)], ids[jnp.minimum(step + 1, steps - 1)]
  return (step == 0) | (before != ids[step]), (step == steps - 1) | (after != ids[step])
