"""Which plots the report shows, from the metric records' names (`observe/__init__`).

A plot without data is left out, and so is a section without plots.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from m2jax.observe import stats, svg

_AVERAGE_STEPS = 10
Records = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Plot:
  """A finished plot: its title, what it says, its legend (name, class) and drawing."""

  title: str
  note: str
  legend: Sequence[tuple[str, str]]
  drawing: Markup


@dataclasses.dataclass(frozen=True)
class Section:
  """Plots under one heading."""

  title: str
  plots: Sequence[Plot]


def sections(
  records: Records,
  capacity_items: int | None = None,
  window_items: int | None = None,
) -> list[Section]:
  """All sections with something to show.

  Args:
    records: surviving metric records.
    capacity_items, window_items: N and W of windowed FIFO, for the bounds.
  """
  rl = [r for r in records if r.get('phase') == 'rl']
  sft = [r for r in records if r.get('phase') == 'sft']
  age = distance = None
  if window_items is not None:
    distance = window_items - 1
    if capacity_items is not None:
      age = capacity_items + window_items - 2
  update, step = 'update', 'SFT step'
  found = [
    Section(
      'Learning',
      [
        _success(records, rl),
        _averaged(rl, 'Reward', 'mean reward of the trajectories trained on', 'reward'),
        _plot(rl, update, 'Loss', 'CISPO', ['loss']),
        _plot(
          rl,
          update,
          'Importance ratio',
          'π/π_old per token',
          ['ratio_mean', 'ratio_max'],
        ),
        _plot(
          rl,
          update,
          'Clipped mass',
          'share of tokens at the cap',
          ['clip_fraction'],
          y_format=svg.percent,
        ),
        _plot(rl, update, 'Entropy', 'nats per sampled token', ['entropy']),
        _plot(rl, update, 'Gradient norm', 'before clipping', ['grad_norm']),
        _plot(sft, step, 'SFT loss', 'nats per token', ['loss']),
      ],
    ),
    Section(
      'Off-policy and window',
      [
        _plot(
          rl,
          update,
          'Policy lag',
          'versions behind the learner, per token',
          ['policy/lag_mean', 'policy/lag_max'],
        ),
        _plot(
          rl,
          update,
          'Age',
          'items taken between submission and taking',
          ['window/age_items_mean', 'window/age_items_max'],
          limit=age,
          limit_name='bound N + W − 2',
        ),
        _plot(
          rl,
          update,
          'Out-of-order distance',
          'item index minus head when taken',
          ['window/order_distance_mean', 'window/order_distance_max'],
          limit=distance,
          limit_name='bound W − 1',
        ),
        _plot(
          rl,
          update,
          'Window occupancy',
          'share of the window that is completed',
          ['window/occupancy'],
          y_format=svg.percent,
          y_limits=(0.0, 1.0),
        ),
        _plot(
          rl,
          update,
          'Data pool',
          'items submitted and not taken',
          ['pool/pending', 'pool/completed'],
        ),
      ],
    ),
    Section(
      'Throughput',
      [
        _plot(rl, update, 'RL training tokens', 'per second', ['tokens_per_s']),
        _plot(
          rl, update, 'Rollouts', 'finished episodes per second', ['rollouts_per_s']
        ),
        _plot(sft, step, 'SFT training tokens', 'per second', ['tokens_per_s']),
        _plot(
          rl, update, 'Engine tokens', 'sampled per second', ['engine/tokens_per_s']
        ),
        _plot(
          rl, update, 'Memory', 'resident bytes of the process', ['memory/rss_bytes']
        ),
      ],
    ),
  ]
  found = [Section(s.title, [p for p in s.plots if p.drawing]) for s in found]
  return [section for section in found if section.plots]


def _course(records: Records, key: str) -> tuple[list[float], list[float]]:
  """Steps and values of a scalar, where it was recorded."""
  pairs = [
    (float(r['step']), float(r[key]))
    for r in records
    if isinstance(r.get(key), (int, float))
  ]
  return [x for x, _ in pairs], [y for _, y in pairs]


def _plot(
  records: Records,
  x_label: str,
  title: str,
  note: str,
  keys: Sequence[str],
  *,
  limit: float | None = None,
  limit_name: str = '',
  y_format: Callable[[float], str] = svg.number,
  y_limits: tuple[float, float] | None = None,
) -> Plot:
  series = []
  for colour, key in enumerate(keys):
    x, y = _course(records, key)
    if any(map(math.isfinite, y)):
      maximum = key.endswith('_max')
      name = 'largest' if maximum else 'mean' if key.endswith('_mean') else key
      series.append(
        svg.Series(
          name.rpartition('/')[2].replace('_', ' '),
          x,
          y,
          colour,
          style='faint' if maximum else 'line',
          reduce='max' if maximum else 'mean',
        )
      )
  if limit is not None and series:
    xs = [x for s in series for x in s.x]
    series.append(
      svg.Series(limit_name, [min(xs), max(xs)], [limit, limit], 5, style='limit')
    )
  return _finish(title, note, series, x_label, y_format, y_limits)


def _averaged(
  records: Records,
  title: str,
  note: str,
  key: str,
  extra: Sequence[svg.Series] = (),
  **options,
) -> Plot:
  """A noisy course with its moving average, and other series on top."""
  x, y = _course(records, key)
  series = []
  if y:
    average = stats.moving_average(y, _AVERAGE_STEPS)
    name = f'mean of {_AVERAGE_STEPS} updates'
    series = [
      svg.Series('each update', x, y, 0, style='faint'),
      svg.Series(name, x, average, 0),
    ]
  return _finish(title, note, [*series, *extra], 'update', **options)


def _success(records: Records, rl: Records) -> Plot:
  """Training success with the held-out points at temperature 1 and their intervals."""
  points: dict[float, tuple[float, float, float]] = {}
  last_step = max((float(r['step']) for r in rl), default=0.0)
  for record in records:
    if (
      record.get('phase') != 'eval'
      or record.get('family', 'all') != 'all'
      or record.get('temperature', 1.0) == 0
      or not record.get('n')
    ):
      continue
    # Evaluations before RL count another phase's steps: they stand at update 0.
    x = {'after SFT': 0.0, 'after RL': last_step, 'during RL': record['step']}.get(
      record.get('stage')
    )
    if x is not None:
      successes, n = record['successes'], record['n']
      points[x] = (successes / n, *stats.wilson(successes, n))
  held_out = [
    svg.Series(
      'held out, 95 % interval',
      list(points),
      [p[0] for p in points.values()],
      1,
      style='points',
      low=[p[1] for p in points.values()],
      high=[p[2] for p in points.values()],
    )
  ]
  return _averaged(
    rl,
    'Success',
    'share of trajectories the verifier accepts',
    'success',
    held_out if points else (),
    y_format=svg.percent,
    y_limits=(0.0, 1.0),
  )


def _finish(
  title: str,
  note: str,
  series: Sequence[svg.Series],
  x_label: str,
  y_format: Callable[[float], str] = svg.number,
  y_limits: tuple[float, float] | None = None,
) -> Plot:
  drawing = (
    svg.line_plot(
      series,
      label=f'{title}: {note}',
      x_label=x_label,
      y_format=y_format,
      y_limits=y_limits,
    )
    if series
    else Markup('')
  )
  legend = [(s.name, f'{s.style} s{s.colour}') for s in series]
  return Plot(title, note, legend if len(legend) > 1 else [], drawing)
