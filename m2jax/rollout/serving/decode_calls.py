"""The host's side of a decode call: which sequence has which row, and the call itself.

Axes: p sequences of a call, g groups of devices with rows of their own, n pages of a
table.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from m2jax.rollout.engine.decode_state import DecodeState, Sampled
from m2jax.rollout.serving.drafting import Drafting, are_finite
from m2jax.rollout.serving.jobs import Job
from m2jax.rollout.serving.kept_contexts import KeptContexts
from m2jax.rollout.serving.sequences import Sequences, State


class Shape(NamedTuple):
  """A call's rows per group, pages per table, drafts per step, and steps.

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


@dataclasses.dataclass
class Call:
  """A dispatched decode call; the device may still be running it.

  Attributes:
    slots: [p] of its sequences.
    version: version of the weights.
    masked: whether it has masks.
    at, num_rows: their rows, see `lay`.
    found: Sampled, with drafts also Drafted, on the device.
    since: when it was made.
  """

  slots: np.ndarray
  shape: Shape
  version: int
  masked: bool
  at: np.ndarray
  num_rows: np.ndarray
  found: Any = None
  since: float = 0.0


class DecodeCalls:
  """The decode calls on one device state."""

  def __init__(self, engine, drafting: Drafting):
    self._engine = engine
    self._drafting = drafting
    self._kept = self._kept_masked = None
    if engine.keeps_contexts:
      self._kept, self._kept_masked = KeptContexts(engine), KeptContexts(engine, True)

  def start(
    self,
    variables: Any,
    version: int,
    state: DecodeState,
    table: Sequences,
    slots: np.ndarray,
    shape: Shape,
    masks: np.ndarray | None = None,
  ) -> tuple[DecodeState, Call]:
    """Decodes `slots` [p]; they must have pages for the call's tokens.

    Args:
      version: version of `variables`.
      masks: [p, W], of responses with a grammar.

    Returns:
      The state, and the call for `finish`.
    """
    size, n, *_ = shape
    kept, stale = self._contexts(masks is not None), None
    if kept is None:
      at, num_rows = lay(table.group(slots), self._engine.groups, size)
    else:
      order = table.started[slots], table.held[slots]
      at, num_rows, stale = kept.lay(size, n, slots, *order)
    call = Call(slots, shape, version, masks is not None, at, num_rows)
    return self._make(call, variables, state, table, stale, masks)

  def again(
    self, call: Call, variables: Any, state: DecodeState, table: Sequences
  ) -> tuple[DecodeState, Call]:
    """The same call once more, whatever it draws: a sequence that ends in it draws
    nothing in the next one. Without masks."""
    kept, stale = self._contexts(False), None
    if kept is not None:
      stale = kept.again(call.shape.rows, call.shape.pages)
    return self._make(dataclasses.replace(call), variables, state, table, stale, None)

  def _make(self, call: Call, variables, state, table, stale, masks):
    size, n, drafts, steps = call.shape
    slots, groups = call.slots, self._engine.groups
    rows = functools.partial(spread, at=call.at, rows=groups * size)
    in_group = (slots % self._engine.config.slots).astype(np.int32)
    tables = rows(table.tables[slots, :n])
    arguments = rows(in_group), call.num_rows, tables, np.int32(steps)
    if masks is not None:
      every = np.full((groups * size, masks.shape[1]), -1, np.int32)
      every[call.at] = masks
    kept = self._contexts(call.masked)
    if kept is not None:
      arguments = (*arguments, stale) if masks is None else (*arguments, stale, every)
      make, arguments = kept.generate, (size, n, arguments)
    elif masks is not None:
      make, arguments = self._engine.generate_masked, (*arguments, every)
    elif drafts:
      make, arguments = self._engine.speculate, (drafts, *arguments)
    else:
      make = self._engine.generate_many
    call.since = time.perf_counter()
    state, *call.found = make(variables, state, *arguments)
    return state, call

  def finish(self, call: Call, table: Sequences) -> tuple[Sampled, np.ndarray]:
    """Waits for a call: what each of its slots drew, and whether its logits were finite
    [p]."""
    found = jax.device_get(call.found)
    if call.masked:  # not a time to compare with those of calls with drafts
      sampled, finite = found[0], are_finite(found[0])
    else:
      seconds = time.perf_counter() - call.since
      sampled, finite = self._drafting.take(found, call.shape.drafts, seconds)
    sampled, finite = jax.tree.map(lambda x: x[call.at], (sampled, finite))
    kept = self._contexts(call.masked)
    if kept is not None:
      held = table.held[call.slots] + sampled.counts
      kept.done(call.shape.rows, call.shape.pages, call.at, held)
    return sampled, finite

  def _contexts(self, masked: bool) -> KeptContexts | None:
    return self._kept_masked if masked else self._kept


def may_repeat(
  call: Call, table: Sequences, jobs: Mapping[int, Job], ahead: int
) -> bool:
  """Whether `call`, not yet read, may be made once more; takes the pages for it.

  Reading a call's tokens, and making the next call, take the host's time, in which the
  device would wait. While the same sequences decode, only their page tables change from
  call to call, and these cover the tokens of two calls if the pages are taken in
  advance. A sequence that ends in a call samples nothing in the next one. Other work,
  such as placing a request, first waits for the call made ahead.

  `call` must have all sequences in slots. None of them may certainly end in it: another
  request would have to wait for its slot.

  Args:
    ahead: positions that a call can need after those of a sequence.
  """
  slots = call.slots
  all_ = np.array_equal(np.sort(slots), np.flatnonzero(table.state != State.IDLE))
  if call.masked or not all_:  # some may have ended in the call before
    return False
  held = table.held[slots]
  left = [
    _left(jobs[slot], int(n)) for slot, n in zip(slots.tolist(), held, strict=True)
  ]
  need = held + 2 * ahead
  most = min(call.shape.pages * table.page_tokens, table.tokens.shape[1])
  if min(left) <= call.shape.steps or need.max() > most:
    return False
  return all(
    table.reserve(slot, int(n)) for slot, n in zip(slots.tolist(), need, strict=True)
  )


def _left(job: Job, held: int) -> int:
  """Tokens that a request may still sample, with `held` positions stored."""
  return job.request.sampling.max_tokens - (held + 1 - len(job.prompt))
