"""Learning-rate schedules as multipliers in [0, 1] of a base rate, by step.

One multiplier serves every base rate of an optimizer (Muon's and Adam's). 'wsd' is
warm-up, stable, decay: the constant phase followed by a decay phase that M2's
pre-training used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]

KINDS = ('constant', 'linear', 'cosine', 'wsd')


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
  """Shape of a schedule. Steps count optimizer updates from 0.

  Attributes:
    kind: after the warm-up, 'constant' stays at 1; 'linear' and 'cosine' fall to
      `final_fraction` at `total_steps`; 'wsd' stays at 1 and falls linearly over the
      last `decay_steps`.
    warmup_steps: update n of the first `warmup_steps` is made at (n + 1)/warmup_steps.
    total_steps: where the decay ends; not used by 'constant'.
    decay_steps: 'wsd' only.
    final_fraction: multiplier from `total_steps` on.
  """

  kind: str = 'constant'
  warmup_steps: int = 0
  total_steps: int = 0
  decay_steps: int = 0
  final_fraction: float = 0.0

  def __post_init__(self):
    def check(ok: bool, field: str, want: str):
      if not ok:
        value = getattr(self, field)
        raise ValueError(f'ScheduleConfig.{field}={value!r}: must be {want}')

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

  def value(step):
    step = jnp.asarray(step, jnp.float32)
    warm = jnp.minimum(1.0, (step + 1) / max(config.warmup_steps, 1))
    if config.kind == 'constant':
      return warm
    done = jnp.clip((step - start) / length, 0.0, 1.0)
    left = 0.5 * (1 + jnp.cos(jnp.pi * done)) if config.kind == 'cosine' else 1 - done
    return warm * (config.final_fraction + (1 - config.final_fraction) * left)

  return value
