"""The plots of the report, made from the metric records; `names` has their meanings.

Plots without data and sections without plots are omitted. Points lead to the
trajectories behind them, on the exported trajectory page (`TRAJECTORIES`).
"""

from __future__ import annotations

import dataclasses
import math
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from m2jax.observe import evaluations, findings, names, sample_plots, stats, svg
from m2jax.observe.printable import printable

TRAJECTORIES = 'trajectories.html'  # next to the report
_AVERAGE_STEPS = 10
_X_LABELS = {'rl': 'update', 'sft': 'SFT step'}
_SHARE = (0.0, 1.0)
Records = Sequence[Mapping[str, Any]]
Counts = dict[float, tuple[float, int]]  # update → (tasks solved, tried)
Links = dict[float, str]  # update → address of what was sampled


@dataclasses.dataclass(frozen=True)
class Plot:
  """A finished plot: title, note, legend (name, class) and drawing."""

  title: str
  note: str
  legend: Sequence[tuple[str, str]]
  drawing: Markup


@dataclasses.dataclass(frozen=True)
class Section:
  """Plots under one heading; `small` ones are half as wide and share one legend."""

  title: str
  plots: Sequence[Plot]
  small: bool = False

  @property
  def legend(self) -> list[tuple[str, str]]:
    """The legend that small plots share; empty otherwise."""
    if not self.small:
      return []
    return list(dict.fromkeys(entry for plot in self.plots for entry in plot.legend))


@dataclasses.dataclass(frozen=True)
class Curves:
  """A plot to draw: metrics of one phase over its steps.

  Attributes:
    title: the plot's title; the note below it is the meaning of the first metric.
    names: keys of the records.
    phase: phase of the records.
    average: draw the moving average over the values; only for a single name.
    limit: key of a bound that `sections` computes, and its name in the legend.
    y_limits: fixed y range.

  Raises:
    KeyError: a name is not in `names`.
  """

  title: str
  names: tuple[str, ...]
  phase: str = 'rl'
  average: bool = False
  limit: tuple[str, str] = ('', '')
  y_limits: tuple[float, float] | None = None

  def __post_init__(self):
    for name in self.names:
      names.metric(self.phase, name)

  @property
  def metric(self) -> names.Metric:
    """The metric of the first name, which gives note and unit."""
    return names.metric(self.phase, self.names[0])


LEARNING = (
  Curves('Reward', ('reward',), average=True),
  Curves('Loss', ('loss',)),
  Curves('Entropy', ('entropy',)),
  Curves('Gradient norm', ('grad_norm',)),
  Curves('SFT loss', ('loss',), 'sft'),
)
OFF_POLICY = (
  Curves('Importance ratio', ('ratio',)),
  Curves('Clip fraction', ('clip_fraction',)),
  Curves('Clipped mass', ('clipped_mass',)),
  Curves('KL divergence', ('approx_kl',)),
  Curves('Log-ratio', ('abs_log_ratio',)),
  Curves('Mismatch', ('mismatch/mean', 'mismatch/max')),
  Curves('Policy lag', ('policy/lag_mean', 'policy/lag_max')),
)
WINDOW = (
  Curves(
    'Age',
    ('window/age_items_mean', 'window/age_items_max'),
    limit=('age', 'bound N + W − 2'),
  ),
  Curves(
    'Out-of-order distance',
    ('window/order_distance_mean', 'window/order_distance_max'),
    limit=('distance', 'bound W − 1'),
  ),
  Curves('Window occupancy', ('window/occupancy',), y_limits=_SHARE),
  Curves('Data pool', ('pool/pending', 'pool/completed')),
)
THROUGHPUT = (
  Curves('RL training tokens', ('tokens_per_s',)),
  Curves('Rollouts', ('rollouts_per_s',)),
  Curves('SFT training tokens', ('tokens_per_s',), 'sft'),
  Curves('Engine tokens', ('engine/tokens_per_s',)),
  Curves('Memory', ('memory/rss_bytes',)),
)


def sections(
  records: Records,
  capacity_items: int | None = None,
  window_items: int | None = None,
) -> list[Section]:
  """All sections that have plots.

  Args:
    records: metric records, without superseded ones.
    capacity_items, window_items: N and W of windowed FIFO, which give the bounds.
  """
  bounds: dict[str, float] = {}
  if window_items is not None:
    bounds['distance'] = window_items - 1
    if capacity_items is not None:
      bounds['age'] = capacity_items + window_items - 2
  by_phase = {
    phase: [r for r in records if r.get('phase') == phase] for phase in _X_LABELS
  }

  def drawn(table: Sequence[Curves]) -> list[Plot]:
    return [_curves(curves, by_phase[curves.phase], bounds) for curves in table]

  rl = by_phase['rl']
  last_update = max((float(r['step']) for r in rl), default=0.0)
  held_out = _evaluated(records, 'held_out', last_update)
  dev = _evaluated(records, 'dev', last_update)
  links = {s: _links(records, s, last_update) for s in ('dev', 'held_out')}
  points = [
    *_points('development', dev.get('all'), 2, links['dev']),
    *_points('held out', held_out.get('all'), 1, links['held_out']),
  ]
  note = _note(names.metric('rl', 'success'))
  success = _success('Success', 'success', rl, points, note)
  found = [
    Section('Learning', [success, *drawn(LEARNING)]),
    Section(
      'Success by family', _families(rl, dev, last_update, links['dev']), small=True
    ),
    Section('Off-policy', drawn(OFF_POLICY)),
    Section('Window and pool', drawn(WINDOW)),
    Section('Samples', [Plot(*parts) for parts in sample_plots.drawn(rl)]),
    Section('Throughput', drawn(THROUGHPUT)),
  ]
  found = [
    dataclasses.replace(s, plots=[p for p in s.plots if p.drawing]) for s in found
  ]
  return [section for section in found if section.plots]


def of_finding(found: findings.Shown, records: Records) -> list[Plot]:
  """A plot of each series of a finding, with the values that the records have."""
  link = _address(step='') if found.phase == 'rl' else ''
  plots = []
  for curve in findings.with_records(found, records).curves:
    drawing, legend = findings.drawn(found, curve, link)
    if drawing:
      plots.append(Plot(curve.name, curve.why, legend, drawing))
  return plots


def _values(records: Records, key: str) -> tuple[list[float], list[float]]:
  """Steps and values of a scalar, for the records that have it."""
  pairs = [
    (float(r['step']), float(r[key]))
    for r in records
    if isinstance(r.get(key), (int, float))
  ]
  return [x for x, _ in pairs], [y for _, y in pairs]


def _curves(curves: Curves, records: Records, bounds: Mapping[str, float]) -> Plot:
  if curves.average:
    series = _averaged(records, curves.names[0])
  else:
    series = [
      drawn
      for colour, name in enumerate(curves.names)
      for drawn in _line(records, name, colour)
    ]
  limit, limit_name = bounds.get(curves.limit[0]), curves.limit[1]
  if limit is not None and series:
    xs = [x for s in series for x in s.x]
    series.append(
      svg.Series(limit_name, [min(xs), max(xs)], [limit, limit], 5, style='limit')
    )
  metric = curves.metric
  return _finish(
    curves.title,
    _note(metric),
    series,
    x_label=_X_LABELS[curves.phase],
    y_format=svg.percent if metric.unit == 'share' else svg.number,
    y_limits=curves.y_limits,
    link=_address(step='') if curves.phase == 'rl' else '',
  )


def _note(metric: names.Metric) -> str:
  if metric.unit in ('1', 'share'):
    return metric.meaning
  return f'{metric.meaning} [{metric.unit}]'


def _line(records: Records, name: str, colour: int) -> list[svg.Series]:
  x, y = _values(records, name)
  if not any(map(math.isfinite, y)):
    return []
  maximum = name.endswith('_max')
  label = 'largest' if maximum else 'mean' if name.endswith('_mean') else name
  return [
    svg.Series(
      label.rpartition('/')[2].replace('_', ' '),
      x,
      y,
      colour,
      style='faint' if maximum else 'line',
      reduce='max' if maximum else 'mean',
    )
  ]


def _averaged(records: Records, name: str) -> list[svg.Series]:
  """The values and their moving average."""
  x, y = _values(records, name)
  if not y:
    return []
  average = stats.moving_average(y, _AVERAGE_STEPS)
  return [
    svg.Series('each update', x, y, 0, style='faint'),
    svg.Series(f'mean of {_AVERAGE_STEPS} updates', x, average, 0),
  ]


def _evaluated(records: Records, split: str, last_update: float) -> dict[str, Counts]:
  """family → counts of a split's evaluations at temperature 1, by update.

  A later record of the same tasks at the same update replaces an earlier one.
  """
  latest: dict[tuple, tuple[float, int]] = {}
  for update, record in _placed(records, split, last_update):
    key = record.get('family', 'all'), record.get('calls'), update
    latest[key] = record['successes'], record['n']
  counts: dict[str, Counts] = {}
  for (family, _, update), (successes, n) in latest.items():
    by_update = counts.setdefault(family, {})
    before = by_update.get(update, (0, 0))
    by_update[update] = before[0] + successes, before[1] + n
  return counts


def _placed(
  records: Records, split: str, last_update: float
) -> Iterator[tuple[float, Mapping[str, Any]]]:
  """(update, record) of a split's evaluations at temperature 1."""
  for record in records:
    if (
      record.get('phase') != 'eval'
      or record.get('split', 'held_out') != split
      or record.get('temperature', 1.0) == 0
      or not record.get('n')
    ):
      continue
    # Evaluations before RL have steps of another phase: plot them at update 0.
    x = {'after SFT': 0.0, 'after RL': last_update, 'during RL': float(record['step'])}
    if (update := x.get(record.get('stage'))) is not None:
      yield update, record


def _address(**place: Any) -> str:
  """A place on the trajectory page, next to the report."""
  return f'{TRAJECTORIES}#{_query(**place)}'


def _query(**place: Any) -> str:
  return urllib.parse.urlencode(place, errors='replace')  # lone surrogates


def _links(records: Records, split: str, last_update: float) -> Links:
  return {
    update: _address(phase='eval', stage=evaluations.name(record))
    for update, record in _placed(records, split, last_update)
  }


def _points(
  name: str, counts: Counts | None, colour: int, links: Links, more: str = ''
) -> list[svg.Series]:
  """Success rates with their Wilson intervals; `more`: of the fragment of links."""
  if not counts:
    return []
  intervals = [stats.wilson(successes, n) for successes, n in counts.values()]
  return [
    svg.Series(
      f'{name}, 95 % interval',
      list(counts),
      [successes / n for successes, n in counts.values()],
      colour,
      style='points',
      low=[low for low, _ in intervals],
      high=[high for _, high in intervals],
      links=[links[update] + more for update in counts],
    )
  ]


def _success(
  title: str,
  name: str,
  rl: Records,
  points: Sequence[svg.Series],
  note: str,
  **options,
) -> Plot:
  """Training success as lines, evaluations at temperature 1 as points."""
  series = [*_averaged(rl, name), *points]
  options = {'link': _address(step=''), **options}
  return _finish(title, note, series, y_format=svg.percent, y_limits=_SHARE, **options)


def _families(
  rl: Records, dev: Mapping[str, Counts], last_update: float, links: Links
) -> list[Plot]:
  """A small plot per family, all with the same x range."""
  prefix = 'success/'
  names.metric('rl', f'{prefix}*')
  found = {key.removeprefix(prefix) for r in rl for key in r if key.startswith(prefix)}
  evaluated = [x for counts in dev.values() for x in counts]
  limits = min([1.0, *evaluated]), max([last_update, *evaluated])
  return [
    _success(
      printable(family),
      prefix + family,
      rl,
      _points('development', dev.get(family), 2, links, f'&{_query(family=family)}'),
      note='',
      x_limits=limits,
      width=svg.WIDTH // 2,
      link=_address(family=family, step=''),
    )
    for family in sorted(found | set(dev) - {'all'})
  ]


def _finish(
  title: str,
  note: str,
  series: Sequence[svg.Series],
  x_label: str = 'update',
  **options,
) -> Plot:
  drawing = Markup('')
  if series:
    label = f'{title}: {note}' if note else title
    drawing = svg.line_plot(series, label=label, x_label=x_label, **options)
  legend = [(s.name, f'{s.style} s{s.colour}') for s in series]
  return Plot(title, note, legend if len(legend) > 1 else [], drawing)
