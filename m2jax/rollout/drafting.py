"""Decides how many tokens the next decode call drafts, by what it measures.

With K drafts and r_i the share of i-th drafts that are accepted when those before them
were, a verification gives 1 + r_1 + r_1·r_2 + … + r_1·…·r_K tokens. The call takes the
K with most tokens a second, 0 included: drafts pay while a verification costs little
more than a step, as it does for few rows, and not once rows fill the machine.

Times are those of the last calls with as many rows, medians; each K is tried a few
times at the start and once in a while later. Which K is taken changes no token.
"""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from m2jax.rollout.decode_state import DecodeState, Drafted, Sampled

TRIALS = 3  # of each K and batch size, the first of which is not counted
TRY_EVERY = 64  # calls, until a K that is not the best is measured again
_RECENT = 5  # measured times
_TOTALS = 'drafts_tested', 'drafts_accepted'
_MEMORY = 1000.0  # drafts of a position, after which a measured share counts 1/e


def are_finite(sampled: Sampled) -> np.ndarray:
  """Whether all log-probabilities of each row are finite [P]."""
  drawn = np.arange(sampled.logprobs.shape[1]) < sampled.counts[:, None]
  return ~(~np.isfinite(sampled.logprobs) & drawn).any(axis=1)


class Drafting:
  """The decode calls of one scheduler, and what they measured.

  Attributes:
    sizes: K that may be chosen, ascending.
    verified: verifications of a row so far.
    drafted, accepted: drafts so far.
    calls: number of calls by (rows, K).
  """

  def __init__(self, most: int, fixed: int | None = None):
    """Chooses from 0 … most, or always `fixed`."""
    self.sizes = tuple(range(most + 1)) if fixed is None else (fixed,)
    self.verified = self.drafted = self.accepted = 0
    self._totals = np.zeros((2, most))  # tested, accepted
    # Half a draft as a start, until some are measured.
    self._tested, self._right = np.ones(most), np.full(most, 0.5)
    self._seconds = collections.defaultdict(lambda: collections.deque(maxlen=_RECENT))
    self.calls: collections.Counter = collections.Counter()
    self._last: dict[tuple[int, int], int] = {}

  @property
  def most(self) -> int:
    return self.sizes[-1]

  @property
  def acceptance(self) -> np.ndarray:
    """[most] r_i of the last drafts; 0.5 where none were tested."""
    return self._right / self._tested

  def choose(self, rows: int) -> int:
    """K of the next call, of `rows` rows."""
    if len(self.sizes) == 1:
      return self.sizes[0]
    for drafts in self.sizes:
      if self.calls[rows, drafts] < TRIALS:
        return drafts
    now = sum(self.calls[rows, drafts] for drafts in self.sizes)
    oldest = min(self.sizes, key=lambda drafts: self._last[rows, drafts])
    if now % TRY_EVERY == 0:
      return oldest
    return max(self.sizes, key=lambda drafts: self.rate(rows, drafts))

  def rate(self, rows: int, drafts: int) -> float:
    """Expected tokens of a row a second, by the measurements."""
    tokens = 1 + float(np.sum(np.cumprod(self.acceptance[:drafts])))
    return tokens / statistics.median(self._seconds[rows, drafts])

  def decode(
    self, generate: Callable, rows: int, drafts: int
  ) -> tuple[DecodeState, Sampled, np.ndarray]:
    """Makes a decode call and measures it.

    Args:
      generate: makes the call; gives its state and results.
      rows: of each group.
      drafts: K.

    Returns:
      The state; what was sampled, on the host; and which rows' logits, of the modules,
      too, were finite.
    """
    started = time.perf_counter()
    state, *found = generate()
    sampled, *drafted = jax.device_get(found)
    seconds = time.perf_counter() - started
    finite = are_finite(sampled)
    if drafted:
      self.count(drafts, *drafted)
      finite &= drafted[0].finite
    steps = drafted[0].verified if drafted else sampled.counts
    self.record(rows, drafts, seconds, int(steps.max()))
    return state, sampled, finite

  def record(self, rows: int, drafts: int, seconds: float, steps: int) -> None:
    """Takes the time of a call of `steps` steps of all rows."""
    key = rows, drafts
    self.calls[key] += 1
    self._last[key] = self.calls.total()
    if self.calls[key] > 1 and steps:  # the first may have been compiled
      self._seconds[key].append(seconds / steps)

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
