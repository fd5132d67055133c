"""Detectors of the training itself: loss, gradient, entropy, experts.

Each is a pure function of a phase's records. Thresholds are relative to the run's own
past; a phase with fewer records than a comparison needs gives no finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from m2jax.evolve.doctor import causes, finding, robust, settings, windows
from m2jax.evolve.doctor.finding import Evidence, Finding
from m2jax.evolve.doctor.history import History, Phase

BEFORE = 24  # records of a baseline: its 0.9 quantile is the third largest
AFTER = 5  # records of a new level: a median of five survives two outliers
SPIKE_Z = (
  12.0  # deviations: a heavy-tailed loss (Student, 3 degrees) has 7 in thousands
)
SPIKE_FLOOR = (
  0.04  # of the median: a converged loss hardly varies, and 1.5 × it matters
)
GRADIENT_FACTOR = 4.0  # above the baseline's 0.9 quantile: gradient noise is log-normal
LEAST_NATS = 0.1  # above its level: a loss near 0 has spikes that mean nothing
DIVERGED = 1.5  # × the best level: noise and schedules change a loss by a few per cent
COLLAPSED = 0.12  # × the first entropy: learning sharpens a policy to a third or so
EXPLODED = 3.0  # × the first entropy, and more than EXPLODED_NATS above it
EXPLODED_NATS = 0.5
EARLY = 16  # records that make the first level of a phase
RECENT = 8  # records that make a level which is compared with it
IMBALANCE_FACTOR = 3.0  # × the best level of the phase
IMBALANCE = 1.0  # at least: the busiest expert has twice the mean load
STUCK_IMBALANCE = 1.5  # a load that bias updates should have levelled
STUCK_RECORDS = 64  # in which 1e-3 a step moves a bias by many typical score gaps
ONE_WAY = 0.6  # share of the fastest growth: signs of a levelled load change
STILL_RECORDS = 24  # without a movement: each update moves a bias of uneven load
ENDED, ENDED_LEAST = 0.05, 8  # share and number of the updates at a rate of zero
ENDS = 0.9  # of the trained messages: their last token ends them
SKIPPED = 3  # updates: fewer are an unlucky batch, which skipping is for
_CRITICAL = ('loss', 'grad_norm', 'entropy', 'reward', 'success')


def not_finite(history: History) -> Iterator[Finding]:
  """NaN and infinity in any metric, and updates that were skipped for them."""
  for found in history.not_finite:
    if found.name in _CRITICAL or found.count >= SKIPPED:
      yield Finding(
        'not_finite',
        f'{found.name} is not finite in {found.count:,} records',
        found.phase,
        found.first_step,
        found.last_step,
        found.first_s,
        found.last_s,
        (
          Evidence(found.name, (float(found.count),), (), 0.0, 'every value is finite'),
        ),
      )
  for phase in history.phases.values():
    at, values = phase.finite('skipped')
    skipped = np.flatnonzero(values > 0)
    if values.sum() >= SKIPPED:
      part = int(skipped[0]), int(skipped[-1])
      yield windows.of_series(
        'not_finite',
        f'{values.sum():.0f} updates were skipped: loss or gradient was not finite',
        phase,
        *('skipped', at, values, part, SKIPPED, 'fewer are single unlucky batches'),
      )


def loss(phase: Phase) -> Iterator[Finding]:
  """Spikes and divergence of a loss in nats; the objective of RL has no such scale."""
  if phase.name == 'rl':
    return
  at, x = phase.finite('loss')
  for first, last, bound in robust.spikes(
    x, before=BEFORE, z=SPIKE_Z, floor=SPIKE_FLOOR
  ):
    peak = x[first : last + 1].max()
    if peak < np.median(x[first - BEFORE : first]) + LEAST_NATS:
      continue
    yield windows.of_series(
      'loss_spike',
      f'the loss rises to {peak:.3g}, above {bound:.3g}',
      phase,
      *('loss', at, x, (first, last), bound),
      f'median of the {BEFORE} records before + {SPIKE_Z:g} robust deviations',
    )
  if len(x) < BEFORE + 2 * RECENT:
    return
  starts = robust.places(0, len(x) - RECENT)
  level = robust.moving_quantile(x, RECENT, 0.5, starts)
  best = np.minimum.accumulate(level)
  over = (level > DIVERGED * best) & (level > best + LEAST_NATS)
  # Diverged: it has not come back by the last record.
  if over[-1]:
    back = np.flatnonzero(~over)
    first = int(starts[back[-1] + 1]) if len(back) else 0
    bound = DIVERGED * best[-1]
    beyond = first + np.flatnonzero(x[first:] > bound)
    yield windows.of_series(
      'loss_divergence',
      f'the loss has risen from {best[-1]:.3g} to {level[-1]:.3g} and stays there',
      phase,
      *('loss', at, x, (int(beyond[0]), len(x) - 1), bound),
      f'{DIVERGED:g} × its lowest level over {RECENT} records',
    )


def gradient(phase: Phase) -> Iterator[Finding]:
  """A gradient norm that jumps to another level."""
  at, x = phase.finite('grad_norm')
  positive = x > 0  # an update whose groups have no advantage has none
  at, x = at[positive], x[positive]
  for first, last, bound in robust.shifts(
    x, before=BEFORE, after=AFTER, factor=GRADIENT_FACTOR
  ):
    yield windows.of_series(
      'gradient_jump',
      f'the gradient norm jumps to {np.median(x[first : last + 1]):.3g}, above '
      f'{bound:.3g}',
      phase,
      *('grad_norm', at, x, (first, last), bound),
      f'{GRADIENT_FACTOR:g} × the 0.9 quantile of the {BEFORE} records before',
    )


def entropy(phase: Phase) -> Iterator[Finding]:
  """Collapse and explosion of the policy's entropy in RL."""
  at, x = phase.finite('entropy')
  if phase.name != 'rl' or len(x) < EARLY + RECENT:
    return
  first_level = float(np.median(x[:EARLY]))
  low, high = COLLAPSED * first_level, EXPLODED * first_level
  high = max(high, first_level + EXPLODED_NATS)
  for kind, y, bound, word in (
    ('entropy_collapse', -x, -low, 'falls'),
    ('entropy_explosion', x, high, 'rises'),
  ):
    parts = robust.sustained(y[EARLY:], RECENT, bound)
    for first, last in parts[:1]:
      first, last = first + EARLY, last + EARLY
      level = float(np.median(x[first : last + 1]))
      yield windows.of_series(
        kind,
        f'the entropy {word} from {first_level:.3g} to {level:.3g} nats',
        phase,
        *('entropy', at, x, (first, last), abs(bound)),
        f'{COLLAPSED if y is not x else EXPLODED:g} × the median of the first {EARLY} '
        'records',
      )


def experts(phase: Phase) -> Iterator[Finding]:
  """Expert load that becomes uneven, or that the router bias does not level."""
  at, x = phase.finite('max_violation')
  if len(x) < BEFORE + RECENT:
    return
  starts = robust.places(0, len(x) - RECENT)
  level = robust.moving_quantile(x, RECENT, 0.5, starts)
  best = np.minimum.accumulate(level)
  bound = np.maximum(IMBALANCE_FACTOR * best, IMBALANCE)
  over = np.flatnonzero(level > bound)
  if len(over):
    limit = float(bound[over[0]])
    beyond = starts[over[0]] + np.flatnonzero(x[starts[over[0]] :] > limit)
    yield windows.of_series(
      'expert_imbalance',
      f'the busiest expert has {1 + level[over].max():.2g} × the mean load, after '
      f'{1 + best[over[0]]:.2g} ×',
      phase,
      *('max_violation', at, x, (int(beyond[0]), int(beyond[-1])), limit),
      f'{IMBALANCE_FACTOR:g} × its lowest level over {RECENT} records, at least '
      f'{IMBALANCE:g}',
    )
  elif len(x) >= STUCK_RECORDS:
    quarter = len(x) // 4
    early, late = np.median(x[:quarter]), np.median(x[-quarter:])
    if late > STUCK_IMBALANCE and late > 0.8 * early:
      yield windows.of_series(
        'router_bias_frozen',
        f'the busiest expert has {1 + late:.2g} × the mean load, as at the start: '
        f'{len(x):,} records of bias updates have not levelled it',
        phase,
        *('max_violation', at, x, (0, len(x) - 1), STUCK_IMBALANCE),
        'the last quarter is not below 0.8 × the first',
      )


def router_bias(phase: Phase, config: Mapping[str, Any]) -> Iterator[Finding]:
  """A router bias that does not move while its update rate is positive, or that moves
  one way only, while the load stays uneven.

  Pre-training stops the updates near its end by its own settings, and is not judged.
  """
  at, x = phase.finite('router_bias_rms')
  field = causes.field_of('{step}.bias_update_rate', phase.name, config)
  rate = settings.number(config, field) if field else None
  if not rate:
    return
  late = len(x) // 2
  updates = phase.step[at[-1]] - phase.step[at[late]] if len(x) else 0
  if len(x) - late >= STUCK_RECORDS // 2 and updates:
    share = (x[-1] - x[late]) / (updates * rate)
    uneven = np.median([0.0, *phase.finite('max_violation')[1][-RECENT:]])
    if share > ONE_WAY and uneven > IMBALANCE:
      yield windows.of_series(
        'router_bias_runs_away',
        f'the router bias grows at {share:.0%} of its fastest speed, and the busiest '
        f'expert still has {1 + uneven:.2g} × the mean load',
        phase,
        *('router_bias_rms', at, x, (late, len(x) - 1), None),
        'updates of a load that they level change their sign',
      )
  if phase.name == 'pretrain' or len(x) <= STILL_RECORDS:
    return
  for first, last in robust.runs(np.flatnonzero(np.diff(x) == 0), gap=1):
    if last + 1 - first >= STILL_RECORDS:
      yield windows.of_series(
        'router_bias_frozen',
        f'the router bias is the same in {last + 2 - first:,} records, with an update '
        f'rate of {rate:g}',
        phase,
        *('router_bias_rms', at, x, (first, last + 1), None),
        f'every update moves it: {STILL_RECORDS} records',
      )
      return


def schedule(phase: Phase, config: Mapping[str, Any]) -> Iterator[Finding]:
  """Updates after the end of a schedule whose last learning rate is zero."""
  field = causes.field_of('{optimizer}.schedule.total_steps', phase.name, config)
  end = settings.number(config, field) if field else None
  shape = settings.get(config, field.rpartition('.')[0]) if field else None
  falls = settings.get(shape, 'kind') in ('linear', 'cosine', 'wsd')
  if not end or not falls or shape.get('final_fraction') != 0:
    return
  late = np.flatnonzero(phase.step > end)
  if not shape.get('segments') and len(late):
    updates = int(phase.step[-1] - end)
    if updates >= max(ENDED_LEAST, ENDED * phase.step[-1]):
      yield windows.in_window(
        'schedule_ended',
        f'{updates:,} updates have a learning rate of 0: the schedule ends at '
        f'{end:,.0f}',
        phase,
        (int(late[0]), int(late[-1])),
        (finding.evidence('updates after the end', [updates], (), ENDED_LEAST),),
      )


def loss_mask(phase: Phase) -> Iterator[Finding]:
  """Trained tokens that the assistant did not write, or ends that are not trained."""
  at, x = phase.finite('trained/ends')
  wrong = np.flatnonzero(x < ENDS)
  if len(wrong):
    part = int(wrong[0]), int(wrong[-1])
    yield windows.of_series(
      'loss_mask',
      f'of {1 - x[wrong].min():.0%} of the trained messages the end is not trained: '
      'the policy does not learn to stop',
      phase,
      *('trained/ends', at, x, part, ENDS, 'the token that ends a message is sampled'),
    )
  for name in ('trained/tool', 'trained/user', 'trained/system', 'trained/prompt'):
    at, x = phase.finite(name)
    wrong = np.flatnonzero(x > 0)
    if len(wrong):
      part = int(wrong[0]), int(wrong[-1])
      yield windows.of_series(
        'loss_mask',
        f'{x[wrong].max():.0%} of the trained tokens are no answer of the model '
        f'({name})',
        phase,
        *(name, at, x, part, 0.0, 'the loss is on the assistant alone'),
      )
