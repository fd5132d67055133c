"""Detectors of RL: off-policy statistics, rewards, lengths, staleness.

Each is a pure function of the records of the phase 'rl', some also of the run's
settings (`config.json` as nested dicts; {} if they are unknown).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from m2jax.evolve.doctor import robust, settings, windows
from m2jax.evolve.doctor.finding import Finding
from m2jax.evolve.doctor.history import LENGTH, Phase
from m2jax.evolve.doctor.training import AFTER, BEFORE, EARLY, RECENT
from m2jax.rl import agreement

RATIO_LOW, RATIO_HIGH = 0.7, 1.4  # the mean of π/π_old is 1 for weights that sampled
CLIPPED = 0.25  # a quarter of the tokens: clipping is for the tail of the ratios
CLIPPED_FACTOR, CLIPPED_LEAST = 3.0, 0.05  # × the baseline's 0.9 quantile, at least
LOG_RATIO_FACTOR, LOG_RATIO_LEAST = 4.0, 0.1  # the same, nats per token
MISMATCH = 0.1  # nats on average: bfloat16 on both sides differs by a tenth of that
MISMATCH_FACTOR, MISMATCH_LEAST = 5.0, 0.02
SOLVED, UNSOLVED = 0.98, 0.01  # success at which groups have hardly any advantage
WITHOUT_ADVANTAGE = 0.8  # share of groups: an update learns from a fifth
SATURATED_RECORDS = 12
LONGER = 3.0  # × the first length, without more success
BETTER = 0.05  # gain of success that justifies longer answers
SUCCESS_TREND = -0.7  # rank correlation of eighths of the run
SUCCESS_RECORDS = 32
SUCCESS_LOST = 0.15  # and at least 0.35 of the first level
SUCCESS_LOST_SHARE = 0.35
FALL_MOST, FALL_LEAST = 40, 12  # records before and after a fall
FALL_T = 4.0  # 1 in 30,000 by chance, at each of a few places
FALL_SHARE = 0.25  # of the level before
AGREED = 16  # records without a mismatch: an error of numerics is in the first ones
AGAINST = -0.6  # correlation of reward and success; rewards are paid for success
LAG_FACTOR, LAG_LEAST = 3.0, 4.0  # × the baseline's 0.9 quantile, versions
PUBLISHED_RECORDS = 12  # of one version, or of a lag that grows by one a step
PUBLISHED_UNKNOWN = 32  # the same if the capacity of the queue is unknown
UNPUBLISHED_S = 5.0  # an engine in another process reports its version once a second
QUEUES = 2.0  # × the versions that pass while a full queue is taken


def ratio(phase: Phase, config: Mapping[str, Any]) -> Iterator[Finding]:
  """Importance ratios that leave 1, and the share of tokens that is clipped."""
  at, x = phase.finite('ratio')
  for y, bound in (x, RATIO_HIGH), (-x, -RATIO_LOW):
    for part in robust.sustained(y, AFTER, bound)[:1]:
      level = np.median(x[part[0] : part[1] + 1])
      yield windows.of_series(
        'ratio_drift',
        f'the mean of π/π_old is {level:.3g}; it is 1 for weights that sampled',
        phase,
        *('ratio', at, x, part, abs(bound), 'the expectation of the ratio is 1'),
      )
  at, x = phase.finite('abs_log_ratio')
  moved = robust.shifts(
    x, before=BEFORE, after=AFTER, factor=LOG_RATIO_FACTOR, floor=LOG_RATIO_LEAST
  )
  why = f'{LOG_RATIO_FACTOR:g} × the 0.9 quantile of the {BEFORE} records before'
  if not moved:
    why = f'the median of {RECENT} records: no few updates should move a policy so far'
    parts = robust.sustained(x, RECENT, LOG_RATIO_LEAST)
    moved = [(*part, LOG_RATIO_LEAST) for part in parts]
  for first, last, bound in moved[:1]:
    yield windows.of_series(
      'ratio_drift',
      f'|log π/π_old| rises to {np.median(x[first : last + 1]):.3g} nats per token',
      phase,
      *('abs_log_ratio', at, x, (first, last), bound, why),
    )
  narrow = settings.clip_range(config)
  if narrow is not None:
    for part in robust.sustained(x, RECENT, narrow)[:1]:
      yield windows.of_series(
        'clipping',
        f'tokens move by {np.median(x[part[0] : part[1] + 1]):.2g} nats on average, '
        f'and the clip range is {narrow:.2g}',
        phase,
        *('abs_log_ratio', at, x, part, narrow, 'clipping is for the tail of ratios'),
      )
  at, x = phase.finite('clip_fraction')
  parts = [(*part, CLIPPED) for part in robust.sustained(x, RECENT, CLIPPED)[:1]]
  why = 'a share that no tail of ratios explains'
  if not parts:
    why = f'{CLIPPED_FACTOR:g} × the 0.9 quantile of the {BEFORE} records before'
    parts = robust.shifts(
      x, before=BEFORE, after=AFTER, factor=CLIPPED_FACTOR, floor=CLIPPED_LEAST
    )
  for first, last, bound in parts[:1]:
    level = np.median(x[first : last + 1])
    yield windows.of_series(
      'clipping',
      f'{level:.0%} of the tokens are clipped',
      phase,
      *('clip_fraction', at, x, (first, last), bound, why),
    )


def mismatch(phase: Phase, config: Mapping[str, Any]) -> Iterator[Finding]:
  """Learner and engine that disagree about the same weights.

  In float32 by the criterion of `rl.agreement`. Otherwise the mean difference of
  responses of one version may neither be large nor grow. The metrics of mixed responses
  (`mismatch/mixed_*`) differ for a good reason and are not judged. What computes
  otherwise does so from the first update; of what agreed before, the weights differ.
  """
  exact = settings.exact_numerics(config)
  replayed = len(phase.finite('replay/disagreement')[0]) > 0
  name = 'mismatch/max' if exact and replayed else 'mismatch/mean'
  at, x = phase.finite(name)
  if exact:
    if replayed:  # not judged where experts of several weights are shared
      differing = phase.series['replay/disagreement'][at]
      keep = ~(differing > 0)
      at, x = at[keep], x[keep]
    beyond = np.flatnonzero(x > agreement.BOUND)
    parts = [(int(beyond[0]), int(beyond[-1]), agreement.BOUND)] if len(beyond) else []
    why = 'float32 agrees up to rounding (m2jax.rl.agreement)'
  else:
    parts = [(*p, MISMATCH) for p in robust.sustained(x, AFTER, MISMATCH)[:1]]
    why = 'several times the rounding of bfloat16'
    if not parts:
      why = f'{MISMATCH_FACTOR:g} × the 0.9 quantile of the {BEFORE} records before'
      parts = robust.shifts(
        x, before=BEFORE, after=AFTER, factor=MISMATCH_FACTOR, floor=MISMATCH_LEAST
      )
  for first, last, bound in parts[:1]:
    worst = x[first : last + 1].max()
    kind, of = 'mismatch', 'the same weights'
    if exact and first >= AGREED:
      kind = 'weights_differ'
      of = f'weights of the same version after {first:,} records without a difference'
    yield windows.of_series(
      kind,
      f'engine and learner differ by up to {worst:.3g} nats ({name}) about tokens of '
      f'{of}',
      phase,
      *(name, at, x, (first, last), bound, why),
    )


def advantages(phase: Phase) -> Iterator[Finding]:
  """Rewards that are the same for all of a group: solved, unsolved, or otherwise."""
  at, (groups, zero) = phase.all_finite('groups', 'groups_zero_advantage')
  share = zero / np.maximum(groups, 1)
  for first, last in robust.sustained(share, SATURATED_RECORDS, WITHOUT_ADVANTAGE)[:1]:
    success = phase.series['success'][at[first : last + 1]]
    level = float(np.median(success[np.isfinite(success)])) if len(success) else 0.5
    common = f'{np.median(share[first : last + 1]):.0%} of the groups have no advantage'
    kind, summary = 'zero_advantage', common
    if level >= SOLVED:
      kind, summary = 'reward_saturation', f'{common}: {level:.0%} success'
    elif level <= UNSOLVED:
      kind, summary = 'reward_absent', f'{common}: {level:.0%} success'
    yield windows.of_series(
      kind,
      summary,
      phase,
      *('groups_zero_advantage / groups', at, share, (first, last)),
      *(WITHOUT_ADVANTAGE, 'an update learns from the remaining groups only'),
    )


def success(phase: Phase) -> Iterator[Finding]:
  """Success that falls steadily while the objective is trained; rewards against it."""
  at, x = phase.finite('success')
  if len(x) >= SUCCESS_RECORDS:
    quarter = len(x) // 4
    early, late = np.median(x[:quarter]), np.median(x[-quarter:])
    at_once, before, after, t = robust.fall(x, FALL_MOST, FALL_LEAST)
    stays = max(after, x[-FALL_LEAST:].mean())
    if t >= FALL_T and _lost(before, stays, FALL_SHARE):
      yield windows.of_series(
        'success_falls',
        f'success falls from {before:.0%} to {after:.0%}, and does not come back',
        phase,
        *('success', at, x, (at_once, len(x) - 1), before - SUCCESS_LOST),
        f"Welch's t of up to {FALL_MOST} records before and after: {t:.1f}, above "
        f'{FALL_T:g}',
      )
    elif _lost(early, late, SUCCESS_LOST_SHARE) and robust.trend(x) <= SUCCESS_TREND:
      yield windows.of_series(
        'success_falls',
        f'success falls steadily from {early:.0%} to {late:.0%}',
        phase,
        *('success', at, x, (0, len(x) - 1), early - SUCCESS_LOST),
        f'first quarter − {SUCCESS_LOST:g}, with a trend through all eighths',
      )
  both, (s, r) = phase.all_finite('success', 'reward')
  if len(both) >= SUCCESS_RECORDS:
    if s.std() > 0.01 and r.std() > 0:
      against = float(np.corrcoef(_ranks(s), _ranks(r))[0, 1])
      if against < AGAINST:
        yield windows.of_series(
          'reward_sign',
          f'rewards fall when success rises: rank correlation {against:.2f}',
          phase,
          *('reward', both, r, (0, len(r) - 1), None),
          f'their rank correlation with success is below {AGAINST:g}',
        )


def _lost(before: float, after: float, share: float) -> bool:
  return before - after >= max(SUCCESS_LOST, share * before)


def _ranks(x: np.ndarray) -> np.ndarray:
  return np.unique(x, return_inverse=True)[1].astype(np.float64)  # ties are equal


def length(phase: Phase) -> Iterator[Finding]:
  """Answers that grow without more success."""
  name = LENGTH
  at, x = phase.finite(name)
  if len(x) < EARLY + RECENT:
    return
  first_level = float(np.median(x[:EARLY]))
  for first, last in robust.sustained(x[EARLY:], RECENT, LONGER * first_level)[:1]:
    first, last = first + EARLY, last + EARLY
    s_at, s = phase.finite('success')
    before, during = s[s_at < at[first]][-EARLY:], s[s_at >= at[first]]
    if len(before) and len(during) and np.median(during) > np.median(before) + BETTER:
      continue
    yield windows.of_series(
      'length_growth',
      f'trajectories grow from {first_level:.0f} to '
      f'{np.median(x[first : last + 1]):.0f} tokens without more success',
      phase,
      *(name, at, x, (first, last), LONGER * first_level),
      f'{LONGER:g} × the median of the first {EARLY} records',
    )


def _unpublished(phase: Phase) -> Finding | None:
  """An engine that samples with one version while the learner publishes others."""
  at, x = phase.finite('engine/version')
  for first, last in robust.runs(np.flatnonzero(np.diff(x) == 0), gap=1):
    part = first, last + 1
    seconds = phase.time_s[at[last + 1]] - phase.time_s[at[first]]
    if last + 1 - first >= PUBLISHED_RECORDS and seconds >= UNPUBLISHED_S:
      return windows.of_series(
        'weights_not_published',
        f'the engine samples with version {x[first]:.0f} for {last + 1 - first:,} '
        'updates',
        phase,
        *('engine/version', at, x, part, None),
        f'it follows the updates; {PUBLISHED_RECORDS} of them and {UNPUBLISHED_S:g} s',
      )
  return None


def staleness(phase: Phase, config: Mapping[str, Any]) -> Iterator[Finding]:
  """Weights that are not published, or samples that are older than the queue explains.

  Between submission and taking of an item at most N + W − 2 others are taken
  (docs/design.md §6), `groups_per_step` or more by each update.
  """
  if (found := _unpublished(phase)) is not None:
    yield found
    return
  at, x = phase.finite('policy/lag_mean')
  queue = settings.queue_versions(config)
  least = max(PUBLISHED_RECORDS, QUEUES * queue) if queue else PUBLISHED_UNKNOWN
  steps = phase.step[at]
  if len(x) >= 2:
    slope = np.diff(x) / np.maximum(np.diff(steps), 1)
    grows = np.flatnonzero((slope > 0.5) & (slope < 1.5)) + 1
    for first, last in robust.runs(grows, gap=2):
      if x[last] - x[first - 1] >= least:
        yield windows.of_series(
          'weights_not_published',
          f'the lag of the samples grows by one version a step, to {x[last]:.0f}: the '
          'engine samples with the same weights',
          phase,
          *('policy/lag_mean', at, x, (first, last), least),
          'grows with every step, by more than a full queue explains',
        )
        return
  parts = robust.shifts(
    x, before=BEFORE, after=AFTER, factor=LAG_FACTOR, floor=LAG_LEAST
  )
  why = f'{LAG_FACTOR:g} × the 0.9 quantile of the {BEFORE} records before'
  if not parts and queue:
    bound = QUEUES * queue + LAG_LEAST
    parts = [(*part, bound) for part in robust.sustained(x, RECENT, bound)]
    why = f'{QUEUES:g} × the versions in which a full queue is taken, {queue:.3g}'
  for first, last, bound in parts[:1]:
    yield windows.of_series(
      'staleness',
      f'samples are {np.median(x[first : last + 1]):.3g} versions old on average',
      phase,
      *('policy/lag_mean', at, x, (first, last), bound, why),
    )
