"""What an op is to benchmarks/kernels.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Op:
  """An op and its cases.

  Attributes:
    name: the op's name.
    cases: platform → name of the case → shape.
    make: make(**shape) returns the arrays of the op, then a cotangent of its output.
    ours: m2jax's implementation, a function of the arrays.
    reference: the op's reference implementation.
    peers: peers(platform, **shape) returns other implementations by name.
    cost: cost(arrays, both) returns operations and bytes; `both` includes gradients.
    wrt: gradients are with respect to the first `wrt` arrays; 0: forward only.
    small: replaces sizes of a shape so that float64 is fast.
  """

  name: str
  cases: dict[str, dict[str, dict]]
  make: Callable
  ours: Callable
  reference: Callable
  peers: Callable
  cost: Callable
  wrt: int
  small: dict


def arrays_of(dtype, *shapes, seed=0):
  rng = np.random.default_rng(seed)
  return [jnp.array(rng.standard_normal(s, np.float32), dtype) for s in shapes]


def bytes_of(*arrays):
  return sum(x.nbytes for x in arrays)
