"""What the Pallas kernels of several ops share."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def dot(a, b, axis_a, axis_b):
  """Sum over one axis of each matrix, in fp32 whatever the default precision."""
  fp32 = a.dtype == jnp.float32
  return lax.dot_general(
    a,
    b,
    (((axis_a,), (axis_b,)), ((), ())),
    precision=lax.Precision.HIGHEST if fp32 else lax.Precision.DEFAULT,
    preferred_element_type=jnp.float32,
  )


def edges(ids, step, steps):
  """Whether this step is the first, and the last, in a row of steps with its id."""
  before, after = ids[jnp.maximum(step - 1, 0)], ids[jnp.minimum(step + 1, steps - 1)]
  return (step == 0) | (before != ids[step]), (step == steps - 1) | (after != ids[step])
