"""Moving rows of a key/value cache: gather slots into a working copy, write back, copy.

A cache is any pytree that `model.init_cache` returns; where its slot and context axes lie
is found from shapes, so the model may choose the layout its attention reads fastest.
Rows move in loops of slices, whose count is a traced number: padding rows cost nothing,
and XLA updates the donated cache in place.

Axes: S slots of the cache, P rows of a working copy, C context positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

Cache = Any
Axes = Any  # a RowAxes per cache leaf


@dataclasses.dataclass(frozen=True)
class RowAxes:
  """Where a cache leaf's slot and context axes lie. No pytree: a leaf of one."""

  slot: int
  context: int


def axes(init_cache) -> Axes:
  """RowAxes of each leaf of `init_cache(slots, context_tokens)`.

  Raises:
    ValueError: a leaf lacks one of the two axes.
  """
  base, slots, context = (
    jax.eval_shape(lambda s=s, c=c: init_cache(s, c)) for s, c in ((1, 2), (3, 2), (1, 4))
  )

  def find(a, b):
    changed = [i for i, (m, n) in enumerate(zip(a.shape, b.shape)) if m != n]
    if len(changed) != 1:
      raise ValueError(
        f'KV cache leaf of shape {a.shape}: want one slot axis and one context axis'
      )
    return changed[0]

  return jax.tree.map(lambda a, s, c: RowAxes(find(a, s), find(a, c)), base, slots, context)


def _sizes(shape, axis: RowAxes, slots: int, context: int) -> tuple[int, ...]:
  shape = list(shape)
  shape[axis.slot], shape[axis.context] = slots, context
  return tuple(shape)


def _starts(ndim: int, axis: RowAxes, slot, context) -> list[jax.Array]:
  starts = [jnp.int32(0)] * ndim
  starts[axis.slot], starts[axis.context] = jnp.int32(slot), jnp.int32(context)
  return starts


def gather(
  cache: Cache, axis: Axes, rows: jax.Array, num_rows: jax.Array, context: int
) -> Cache:
  """First `context` positions of `rows` [P] as a new cache of P slots, zeros beyond
  num_rows."""

  def leaf(axis, x):
    sizes = _sizes(x.shape, axis, 1, context)

    def body(p, out):
      row = lax.dynamic_slice(x, _starts(x.ndim, axis, rows[p], 0), sizes)
      return lax.dynamic_update_slice(out, row, _starts(x.ndim, axis, p, 0))

    out = jnp.zeros(_sizes(x.shape, axis, rows.shape[0], context), x.dtype)
    return lax.fori_loop(0, num_rows, body, out)

  return jax.tree.map(leaf, axis, cache)


def write_back(
  cache: Cache,
  axis: Axes,
  work: Cache,
  rows: jax.Array,
  num_rows: jax.Array,
  starts: jax.Array,
  width: int,
) -> Cache:
  """Writes `width` positions from `starts` [P] of a working copy back to its rows.

  A window that would pass the working copy's end begins earlier: the copy holds the old
  entries too, so a wider window writes what is there already.
  """

  def leaf(axis, x, source):
    context = source.shape[axis.context]
    size = min(width, context)
    sizes = _sizes(x.shape, axis, 1, size)

    def body(p, x):
      start = jnp.clip(starts[p], 0, context - size)
      window = lax.dynamic_slice(source, _starts(x.ndim, axis, p, start), sizes)
      return lax.dynamic_update_slice(x, window, _starts(x.ndim, axis, rows[p], start))

    return lax.fori_loop(0, num_rows, body, x)

  return jax.tree.map(leaf, axis, cache, work)


def copy(
  cache: Cache,
  axis: Axes,
  sources: jax.Array,
  targets: jax.Array,
  num_rows: jax.Array,
  context: int,
) -> Cache:
  """Copies the first `context` positions of slots `sources` [P] to `targets` [P]."""

  def leaf(axis, x):
    sizes = _sizes(x.shape, axis, 1, context)

    def body(p, x):
      row = lax.dynamic_slice(x, _starts(x.ndim, axis, sources[p], 0), sizes)
      return lax.dynamic_update_slice(x, row, _starts(x.ndim, axis, targets[p], 0))

    return lax.fori_loop(0, num_rows, body, x)

  return jax.tree.map(leaf, axis, cache)
