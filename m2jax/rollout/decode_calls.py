"""The host's side of a decode call: which sequence has which row, and the call itself.

Axes: p sequences of a call, g groups of devices with rows of their own, n pages of a
table.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from m2jax.rollout.decode_state import DecodeState, Sampled
from m2jax.rollout.drafting import Drafting, are_finite
from m2jax.rollout.kept_contexts import KeptContexts
from m2jax.rollout.sequences import Sequences


class Shape(NamedTuple):
  """Of a call: rows of a group, pages of a table, drafts of a step, steps.

  A call with masks has no drafts and one step.
  """

  rows: int
  pages: int
  drafts: int
  steps: int


def lay(group: np.ndarray, groups: int, size: int) -> tuple[np.ndarray, np.ndarray]:
  """Rows [p] of sequences in groups `group` [p], and the number of each group [g].

  A call has `size` rows a group, of which the first ones are used.
  """
  counts = np.bincount(group, minlength=groups).astype(np.int32)
  at = np.empty(len(group), np.int64)
  for g in range(groups):
    at[group == g] = g * size + np.arange(counts[g])
  return at, counts


def spread(values: np.ndarray, at: np.ndarray, rows: int) -> np.ndarray:
  """values [p, …] in rows `at` [p] of `rows`; zeros elsewhere."""
  out = np.zeros((rows, *values.shape[1:]), np.int32)
  out[at] = values
  return out


class DecodeCalls:
  """The decode calls on one device state."""

  def __init__(self, engine, drafting: Drafting):
    self._engine = engine
    self._drafting = drafting
    self._kept = self._kept_masked = None
    if engine.keeps_contexts:
      self._kept, self._kept_masked = KeptContexts(engine), KeptContexts(engine, True)

  def run(
    self,
    variables: Any,
    state: DecodeState,
    table: Sequences,
    slots: np.ndarray,
    shape: Shape,
    masks: np.ndarray | None = None,
  ) -> tuple[DecodeState, Sampled, np.ndarray]:
    """Decodes `slots` [p]; they must have pages for the call's tokens.

    Args:
      masks: [p, W], of responses with a grammar.

    Returns:
      The state; what each slot drew; whether its logits were finite [p].
    """
    size, n, drafts, steps = shape
    groups, group = self._engine.groups, table.group(slots)
    kept = self._kept if masks is None else self._kept_masked
    if kept is None:
      at, num_rows = lay(group, groups, size)
    else:
      order = table.started[slots], table.held[slots]
      at, num_rows, stale = kept.lay(size, n, slots, *order)
    rows = functools.partial(spread, at=at, rows=groups * size)
    in_group = (slots % self._engine.config.slots).astype(np.int32)
    arguments = rows(in_group), num_rows, rows(table.tables[slots, :n]), np.int32(steps)
    if masks is not None:
      every = np.full((groups * size, masks.shape[1]), -1, np.int32)
      every[at] = masks
    if kept is not None:
      arguments = (*arguments, stale) if masks is None else (*arguments, stale, every)
      call, arguments = kept.generate, (size, n, arguments)
    elif masks is not None:
      call, arguments = self._engine.generate_masked, (*arguments, every)
    elif drafts:
      call, arguments = self._engine.speculate, (drafts, *arguments)
    else:
      call = self._engine.generate_many
    call = functools.partial(call, variables, state, *arguments)
    if masks is None:
      state, sampled, finite = self._drafting.decode(call, drafts)
    else:  # not a time to compare with those of calls with drafts
      state, sampled = call()
      sampled = jax.device_get(sampled)
      finite = are_finite(sampled)
    sampled, finite = jax.tree.map(lambda x: x[at], (sampled, finite))
    if kept is not None:
      kept.done(size, n, at, table.held[slots] + sampled.counts)
    return state, sampled, finite
