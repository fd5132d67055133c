"""Decides how many tokens the next decode calls draft, from measurements.

With K drafts and r_i the share of i-th drafts that are accepted when those before them
were, a verification gives 1 + r_1 + r_1·r_2 + … + r_1·…·r_K tokens. It uses the K with
the most tokens per second, 0 included: drafts pay while a verification costs little
more than a step, as it does for few rows, and not once rows fill the machine. If they
gain less than MARGIN, K is 0.

Times are compared only within a probe: a few ticks in a row that take each K in turn,
of which the fastest call of each K counts, since other load and compilation only make
calls slower. Each number of rows is probed at the start, then after PROBE_EVERY ticks,
and after each probe that changes nothing that interval doubles. A probe that would
change K is repeated once. Shares are averages over all drafts, recent ones weighted
most: when they fall, K falls without a probe. K never changes the tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from m2jax.rollout.engine.decode_state import Drafted, Sampled

PROBES = 3  # ticks with each K in a probe
PROBE_EVERY = 128  # ticks from the first probe to the second
_MOST_EVERY = 4096
MARGIN = 1.03  # tokens/s with drafts over those without, from which they are taken
_TOTALS = 'drafts_tested', 'drafts_accepted'
_MEMORY = 1000.0  # drafts of a position, after which a measured share counts 1/e


def are_finite(sampled: Sampled) -> np.ndarray:
  """Whether all log-probabilities of each row are finite [P]."""
  drawn = np.arange(sampled.logprobs.shape[1]) < sampled.counts[:, None]
  return ~(~np.isfinite(sampled.logprobs) & drawn).any(axis=1)


@dataclasses.dataclass
class _Rows:
  """Measurements of the ticks with the same number of rows.

  Attributes:
    todo: K that the probe in progress has yet to measure; empty between two probes.
    times: seconds of a step in that probe, by K.
    costs: the least of them in the last one that has ended; empty before.
    best: K by the last probe.
    again: whether the probe in progress has gone on.
    left, every: ticks until the next probe, and from the last one to the next.
  """

  todo: collections.deque[int]
  times: dict[int, list[float]]
  costs: dict[int, float] = dataclasses.field(default_factory=dict)
  best: int = 0
  again: bool = False
  left: int = 0
  every: int = PROBE_EVERY // 2


@dataclasses.dataclass
class _Tick:
  """The calls of one tick: their K, and the seconds that a step of all rows takes."""

  rows: int
  drafts: int
  step_s: float = 0.0


class Drafting:
  """The decode calls of one scheduler, and what they measured.

  Attributes:
    sizes: K that may be chosen, ascending.
    verified: verifications of a row so far.
    drafted, accepted: drafts so far.
    ticks: number of measured ticks by (rows, K).
  """

  def __init__(self, most: int, fixed: int | None = None):
    """Chooses from 0 … most, or always `fixed`."""
    self.sizes = tuple(range(most + 1)) if fixed is None else (fixed,)
    self.verified = self.drafted = self.accepted = 0
    self._totals = np.zeros((2, most))  # tested, accepted
    # Half a draft as a start, until some are measured.
    self._tested, self._right = np.ones(most), np.full(most, 0.5)
    self.ticks: collections.Counter = collections.Counter()
    self._rows: dict[int, _Rows] = {}
    self._tick: _Tick | None = None

  @property
  def most(self) -> int:
    return self.sizes[-1]

  @property
  def acceptance(self) -> np.ndarray:
    """[most] r_i of the last drafts; 0.5 where none were tested."""
    return self._right / self._tested

  def choose(self, rows: int) -> int:
    """K of the calls until this is called again, which decode `rows` rows or fewer."""
    if len(self.sizes) == 1:
      return self.sizes[0]
    self._end_tick()
    if rows not in self._rows:
      self._rows[rows] = self._probe(_Rows(collections.deque(), {}))
    known = self._rows[rows]
    drafts = known.todo[0] if known.todo else self.best(rows)
    self._tick = _Tick(rows, drafts)
    return drafts

  def best(self, rows: int) -> int:
    """The fastest K by the measurements; 0 before there are some."""
    if rows not in self._rows or not self._rows[rows].costs:
      return 0
    drafts = max(self.sizes, key=lambda drafts: self.rate(rows, drafts))
    return drafts if self.rate(rows, drafts) > MARGIN * self.rate(rows, 0) else 0

  def rate(self, rows: int, drafts: int) -> float:
    """Expected tokens of a row a second, by the measurements."""
    tokens = 1 + float(np.sum(np.cumprod(self.acceptance[:drafts])))
    return tokens / self._rows[rows].costs[drafts]

  def _end_tick(self) -> None:
    tick, self._tick = self._tick, None
    if tick is None or not tick.step_s:  # such as only rows with a grammar
      return
    self.ticks[tick.rows, tick.drafts] += 1
    known = self._rows[tick.rows]
    if not known.todo:
      known.left -= 1
      if known.left <= 0:
        self._probe(known)
      return
    known.times[known.todo.popleft()].append(tick.step_s)
    if not known.todo:
      self._end_probe(tick.rows, known)

  def _end_probe(self, rows: int, known: _Rows) -> None:
    known.costs = {drafts: min(times) for drafts, times in known.times.items()}
    best, before = self.best(rows), known.best
    if best != before and not known.again:
      known.again = True
      self._measure(known)
      return
    known.every = PROBE_EVERY if best != before else min(2 * known.every, _MOST_EVERY)
    known.best, known.left = best, known.every

  def _probe(self, known: _Rows) -> _Rows:
    known.again, known.times = False, {drafts: [] for drafts in self.sizes}
    self._measure(known)
    return known

  def _measure(self, known: _Rows) -> None:
    """Takes each K in turn.

    Down and up in turn: load that grows affects all K, and steps without drafts, which
    the modules do not see, are next to each other.
    """
    passes = self.sizes[::-1], self.sizes
    known.todo.extend(k for i in range(PROBES) for k in passes[i % 2])

  def take(
    self, found: Sequence, drafts: int, seconds: float
  ) -> tuple[Sampled, np.ndarray]:
    """Takes the results of a decode call.

    Args:
      found: Sampled, with drafts also Drafted, on the host.
      drafts: K.
      seconds: time that the call took.

    Returns:
      What was sampled; and which rows' logits, of the modules, too, were finite.
    """
    sampled, *drafted = found
    finite = are_finite(sampled)
    if drafted:
      self.count(drafts, *drafted)
      finite &= drafted[0].finite
    steps = drafted[0].verified if drafted else sampled.counts
    self.record(seconds, int(steps.max()))
    return sampled, finite

  def record(self, seconds: float, steps: int) -> None:
    """Takes the time of a call of `steps` steps; a tick may have several, of some rows
    each."""
    if self._tick is not None and steps:
      self._tick.step_s += seconds / steps

  def count(self, drafts: int, drafted: Drafted) -> None:
    """Takes what became of the drafts of a call, on the host."""
    tested, accepted = drafted.tested.sum(axis=0), drafted.accepted.sum(axis=0)
    self.verified += int(drafted.verified.sum())
    self.drafted += int(drafted.verified.sum()) * drafts
    self.accepted += int(accepted.sum())
    self._totals[:, :drafts] += [tested, accepted]
    keep = np.exp(-tested / _MEMORY)
    self._tested[:drafts] = self._tested[:drafts] * keep + tested
    self._right[:drafts] = self._right[:drafts] * keep + accepted

  def stats(self) -> dict[str, float]:
    """drafted_tokens, accepted_tokens, and mean_accepted_length: the tokens of a
    verification, the main model's own included; 0 without any. Of the i-th drafts of
    verifications, those before which were accepted: drafts_tested/i and
    drafts_accepted/i."""
    length = 1 + self.accepted / self.verified if self.verified else 0.0
    positions = enumerate(self._totals.T.tolist(), start=1)
    return {
      **{
        f'{n}/{i}': x for i, of in positions for n, x in zip(_TOTALS, of, strict=True)
      },
      'drafted_tokens': self.drafted,
      'accepted_tokens': self.accepted,
      'mean_accepted_length': length,
    }


def acceptance(
  stats: Mapping[str, float], before: Mapping[str, float]
) -> dict[int, float]:
  """Share of the i-th drafts that were accepted between two `Drafting.stats`, by i.

  Of drafts before which all were accepted; i without such drafts is absent.
  """
  tested, accepted = _TOTALS
  out = {}
  for i in itertools.count(1):
    if f'{tested}/{i}' not in stats:
      return out
    new = [stats[f'{n}/{i}'] - before.get(f'{n}/{i}', 0) for n in (tested, accepted)]
    if new[0] > 0:  # less than before: of an engine that was restarted
      out[i] = new[1] / new[0]
