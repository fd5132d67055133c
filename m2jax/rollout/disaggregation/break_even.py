"""How many missing tokens the decode engine should prefill itself: measured.

Prefilling on the decode engine makes its other sequences wait for a prefill call;
taking pages over makes them wait while pages are written. A short prefill still pays,
because it saves a trip to another engine and the wait in its queue: it is worth up to
one decode call. So the decode engine prefills n tokens itself if

  prefill call of n tokens  <=  writing the pages of n tokens + one decode call

with times measured on it, at its full batch and its full context.

Axes: S slots of a group.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from m2jax.rollout.disaggregation import handover
from m2jax.rollout.engine.decode_state import DecodeState, make_slots
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.engine.pages import UNUSED, Pages

_RUNS = 3  # of which the fastest counts


@dataclasses.dataclass(frozen=True)
class Rates:
  """Seconds of the decode engine's calls.

  Attributes:
    prefill_s: time of a call with one sequence per group, by the tokens of its chunk.
    decode_s: time of a call with all slots decoding.
    part_s: time to write a part of `part_pages` pages.
  """

  prefill_s: dict[int, float]
  decode_s: float
  part_s: float
  part_pages: int
  page_tokens: int

  def write_s(self, tokens: int) -> float:
    """Time to write the pages of this many tokens."""
    return -(-tokens // (self.part_pages * self.page_tokens)) * self.part_s

  def local_tokens(self) -> int:
    """The most tokens that the decode engine should prefill itself; 0 if none."""
    pays = [
      tokens
      for tokens, seconds in self.prefill_s.items()
      if seconds <= self.write_s(tokens) + self.decode_s
    ]
    return max(pays, default=0)


def measure(
  engine: Engine, params: Any, state: DecodeState, steps: int, part_pages: int
) -> tuple[DecodeState, Rates]:
  """Times the calls, which must be compiled; no visible entry of the state changes.

  Args:
    params: as `Engine.load_params` returns them.
    steps: steps of a decode call.
  """
  config, g = engine.config, engine.groups
  zeros = lambda *shape: np.zeros((g * shape[0], *shape[1:]), np.int32)
  n = config.table_sizes[-1]

  def fastest(call: Callable[[DecodeState], DecodeState]) -> float:
    nonlocal state
    found = []
    for _ in range(_RUNS):
      before = time.perf_counter()
      state = jax.block_until_ready(call(state))
      found.append(time.perf_counter() - before)
    return min(found)

  prefill_s: dict[int, float] = {}
  for rows, chunk in config.prefill_shapes:
    counts = zeros(rows)
    counts[::rows] = chunk  # tables name the unused page
    seconds = fastest(
      lambda state, size=(rows, chunk), counts=counts: engine.prefill_rows(
        params, state, zeros(*size), zeros(size[0]), counts, zeros(size[0], n)
      )
    )
    prefill_s[chunk] = min(seconds, prefill_s.get(chunk, seconds))

  slots = make_slots(g * config.slots, config)
  rows = np.tile(np.arange(config.slots, dtype=np.int32), g)
  counts = np.full(g, config.slots, np.int32)

  def decode(state):
    return engine.generate_many(
      params, state, rows, counts, zeros(config.slots, n), np.int32(steps)
    )[0]

  slots.remaining[:] = _RUNS * steps  # and none afterwards
  state = engine.admit(state, rows, counts, slots)
  decode_s = fastest(decode)

  layout = handover.layout(engine.cfg, config, part_pages)
  pages = Pages(*(x and np.zeros(*x) for x in handover.shapes(layout, part_pages)))
  table = np.full(part_pages, UNUSED, np.int32)
  part_s = fastest(lambda state: engine.write_pages(state, np.int32(0), table, pages))
  rates = Rates(prefill_s, decode_s, part_s, part_pages, config.page_tokens)
  return state, rates
