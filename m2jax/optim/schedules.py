"""Learning-rate schedules: multipliers by step, and the conversion to tokens.

One multiplier in [0, 1] scales the base rates of all optimizers (Muon's and Adam's).
'wsd' is warm-up, stable, decay: the constant phase followed by a decay phase that M2's
pre-training used (facts/m2-and-forge.md §1.5). Phases are given in tokens, while an
optimizer counts updates; where the batch size changes, a `Clock` converts between them.
Values that differ between phases (the weight of MTP, the rate of the router bias) are
`piecewise` in tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from m2jax.checks import require

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]
Segments = tuple[tuple[int, int], ...]

KINDS = ('constant', 'linear', 'cosine', 'wsd')


@dataclasses.dataclass(frozen=True)
class Clock:
  """Tokens consumed after a number of updates, exact, on the host.

  Attributes:
    segments: (updates, tokens of each update), in order; the last has no end, whatever
      its number of updates.
  """

  segments: Segments

  def __post_init__(self):
    if not self.segments or any(n < 0 or size < 1 for n, size in self.segments):
      raise ValueError(
        f'segments={self.segments!r}: want (updates, tokens of each update), the '
        'tokens positive'
      )

  def tokens(self, step: int) -> int:
    """Tokens consumed by the first `step` updates."""
    consumed, left = 0, step
    for number, size in self.segments[:-1]:
      consumed += min(left, number) * size
      left -= min(left, number)
    return consumed + left * self.segments[-1][1]

  def step(self, tokens: int) -> int:
    """The first update before which at least `tokens` were consumed."""
    step, left = 0, tokens
    for number, size in self.segments[:-1]:
      if left <= number * size:
        return step + -(-left // size)
      step, left = step + number, left - number * size
    return step + -(-left // self.segments[-1][1])


def piecewise(points: Sequence[tuple[int, float]], tokens: int) -> float:
  """Value of the last point (tokens, value) at or before `tokens`."""
  return [value for start, value in points if start <= tokens][-1]


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
  """Shape of a schedule. Steps count optimizer updates from 0.

  Attributes:
    kind: after the warm-up, 'constant' stays at 1; 'linear' and 'cosine' fall to
      `final_fraction` at `total_steps`; 'wsd' stays at 1 and falls linearly over the
      last `decay_steps`.
    warmup_steps: the multiplier of update n < `warmup_steps` is (n + 1)/warmup_steps.
    total_steps: end of the decay; not used by 'constant'.
    decay_steps: 'wsd' only.
    final_fraction: multiplier from `total_steps` on.
    segments: a `Clock`'s segments; if given, warm-up and decay advance by the tokens of
      the updates, not by their number.
  """

  kind: str = 'constant'
  warmup_steps: int = 0
  total_steps: int = 0
  decay_steps: int = 0
  final_fraction: float = 0.0
  segments: Segments = ()

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.kind in KINDS, 'kind', f'one of {KINDS}')
    check(self.warmup_steps >= 0, 'warmup_steps', 'at least 0')
    check(0 <= self.final_fraction <= 1, 'final_fraction', 'in [0, 1]')
    if self.kind != 'constant':
      least = f'more than warmup_steps={self.warmup_steps}'
      check(self.total_steps > self.warmup_steps, 'total_steps', least)
    if self.kind == 'wsd':
      most = self.total_steps - self.warmup_steps
      check(0 < self.decay_steps <= most, 'decay_steps', f'in [1, {most}]')


def multiplier(config: ScheduleConfig) -> Schedule:
  """The schedule as a function of the step, traceable: int32 [] to float32 []."""
  length = config.total_steps - config.warmup_steps
  if config.kind == 'wsd':
    length = config.decay_steps
  start = config.total_steps - length
  warm_up = _share(config.segments, 0, max(config.warmup_steps, 1))
  decay = _share(config.segments, start, start + length)

  def value(step):
    step = jnp.asarray(step, jnp.float32)
    warm = jnp.minimum(1.0, warm_up(step + 1))
    if config.kind == 'constant':
      return warm
    done = jnp.clip(decay(step), 0.0, 1.0)
    left = 0.5 * (1 + jnp.cos(jnp.pi * done)) if config.kind == 'cosine' else 1 - done
    return warm * (config.final_fraction + (1 - config.final_fraction) * left)

  return value


def _share(segments: Segments, start: int, stop: int) -> Schedule:
  """Fraction of the way from update `start` to `stop`, as a function of the step."""
  if not segments:

    def plain(step):
      return (step - start) / (stop - start)

    return plain
  clock = Clock(segments)
  # float32 is not exact for trillions of tokens, but for steps below 2**24
  parts, first = [], 0
  for index, (number, size) in enumerate(segments):
    last = stop if index == len(segments) - 1 else first + number
    low, high = max(first, start), min(last, stop)
    if low < high:
      whole = clock.tokens(stop) - clock.tokens(start)
      parts.append((low, high - low, size / whole))
    first += number

  def share(step):
    return sum(jnp.clip(step - low, 0, most) * each for low, most, each in parts)

  return share
