"""Helpers shared by the Pallas kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
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


def halves(ids, count):
  """[3] int32: where two cores' parts of a table begin and end.

  The cut is as near to the middle as it can be without dividing a run of one id, so
  that each result is written by one core. There must be two ids.

  Args:
    ids: [entries] sorted; those past `count` are unspecified.
    count: entries in use.
  """
  at = jnp.arange(len(ids), dtype=jnp.int32)
  begins = (ids != jnp.roll(ids, 1)) & (at > 0) & (at < count)
  distance = jnp.where(begins, jnp.abs(2 * at - count), jnp.iinfo(jnp.int32).max)
  cut = jnp.argmin(distance).astype(jnp.int32)
  return jnp.stack([jnp.zeros_like(cut), cut, jnp.asarray(count, jnp.int32)])


class Entry(NamedTuple):
  """The entry of a core's part of a table that a grid step works on."""

  at: Any  # its index; that of the part's last in steps past the part
  live: Any  # whether the step is not past the part
  begin: Any  # of the part
  end: Any


def entry(parts, lead, step) -> Entry:
  """The entry of a grid whose first axis, `lead`, is blocks x parts of a table.

  `parts` [parts + 1] are the bounds of the parts.
  """
  part = part_of(parts, lead)
  begin, end = parts[part], parts[part + 1]
  at = begin + step
  return Entry(jnp.minimum(at, end - 1), at < end, begin, end)


def part_of(parts, lead):
  return lax.rem(lead, np.int32(parts.shape[0] - 1))


def block_of(parts, lead):
  return lax.div(lead, np.int32(parts.shape[0] - 1))


def edges(ids, e: Entry):
  """Whether an entry is the first, and the last, of its part with its id."""
  before = ids[jnp.maximum(e.at - 1, e.begin)]
  after = ids[jnp.minimum(e.at + 1, e.end - 1)]
  first = (e.at == e.begin) | (before != ids[e.at])
  last = (e.at == e.end - 1) | (after != ids[e.at])
  return e.live & first, e.live & last
