"""Contiguous rows that decode calls on a CPU reuse (`engine.contexts`).

A sequence keeps its row of a call's shape as long as it decodes in calls of that shape,
so its pages are not copied again. A row is stale if another sequence, or the same one
in calls of another shape, has decoded since.

Axes: p sequences of a call, g groups of devices with rows of their own, R = g · rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from m2jax.rollout.engine.contexts import Contexts

_UNUSED = 8  # calls after which a shape's contexts are given up


@dataclasses.dataclass
class _Shape:
  """Contexts of one shape of calls, and the sequence of each row.

  Attributes:
    contexts: None during a call, and after one that failed.
    slot, started, held: [R] slot of a row or -1, its sequence, positions in contexts.
    used: number of the latest call.
  """

  contexts: Contexts | None
  slot: np.ndarray
  started: np.ndarray
  held: np.ndarray
  used: int = 0


class KeptContexts:
  """The contexts of an engine with `keeps_contexts`.

  Args:
    masked: whether the calls are for requests with a grammar.
  """

  def __init__(self, engine, masked: bool = False):
    self._engine, self._masked = engine, masked
    self._shapes: dict[tuple[int, int], _Shape] = {}
    self._calls = 0

  def lay(self, size: int, n: int, slots, started, held):
    """Rows for the sequences of a call.

    Args:
      size, n: rows of a group and pages of a table, of the call.
      slots, started, held: [p] of each sequence: slot, when it got it, positions
        stored.

    Returns:
      Rows [p], number of rows of each group [g] (the first ones), stale [R] bool.
    """
    shape = self._shape(size, n)
    groups = self._engine.groups
    group = slots // self._engine.config.slots
    counts = np.bincount(group, minlength=groups).astype(np.int32)
    row_of = np.full(groups * self._engine.config.slots, -1)
    rows = np.flatnonzero(shape.slot >= 0)
    row_of[shape.slot[rows]] = rows
    at = row_of[slots]
    kept = (at >= 0) & (at % size < counts[group])
    kept &= (shape.started[at] == started) & (shape.held[at] == held)
    free = np.arange(groups * size) % size < np.repeat(counts, size)
    free[at[kept]] = False
    for g in range(groups):
      new = np.flatnonzero(~kept & (group == g))
      at[new] = g * size + np.flatnonzero(free[g * size : (g + 1) * size])[: len(new)]
    stale = np.zeros(groups * size, bool)
    stale[at[~kept]] = True
    shape.slot[:] = -1
    shape.slot[at], shape.started[at] = slots, started
    return at, counts, stale

  def again(self, size: int, n: int) -> np.ndarray:
    """Stale rows [R] of a call with the rows of the one made before: none."""
    self._shape(size, n)
    return np.zeros(self._engine.groups * size, bool)

  def generate(self, variables, state, size: int, n: int, arguments):
    """`generate_kept` or `generate_masked` on the contexts of the rows that `lay` gave.

    Args:
      arguments: the call's arguments after the contexts.
    """
    shape = self._shapes[size, n]
    contexts, shape.contexts = shape.contexts, None  # donated
    engine = self._engine
    call = engine.generate_masked if self._masked else engine.generate_kept
    found = call(variables, state, contexts, *arguments)
    *rest, shape.contexts = found
    return rest

  def done(self, size: int, n: int, at, held) -> None:
    """Takes the positions stored of rows `at` after the call."""
    self._shapes[size, n].held[at] = held

  def _shape(self, size: int, n: int) -> _Shape:
    """The shape's, new if need be; drops what was not used for long."""
    self._calls += 1
    rows = self._engine.groups * size
    shape = self._shapes.get((size, n))
    if shape is None or shape.contexts is None:
      none = np.full(rows, -1)
      contexts = self._engine.new_contexts(size, n)
      shape = _Shape(contexts, none, none.copy(), none.copy())
      self._shapes[size, n] = shape
    shape.used = self._calls
    old = [key for key, s in self._shapes.items() if s.used < self._calls - _UNUSED]
    for key in old:
      del self._shapes[key]
    return shape
