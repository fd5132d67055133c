"""Plots as inline SVG, for a self-contained page: no scripts, no fonts, no files.

Colours and fonts come from the page's style sheet by class (`s0` … `s5` for series), so
a plot follows the reader's light or dark setting. Coordinates are in a view box of
WIDTH × HEIGHT units and scale with the page. `data-plot` has the drawn points as JSON,
for the page's hover script.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

WIDTH, HEIGHT = 480, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34
_MAX_POINTS = 400  # of a series; more could not be distinguished


@dataclasses.dataclass(frozen=True)
class Series:
  """A series to plot.

  Attributes:
    name: its name in the legend and the hover box.
    x, y: coordinates; non-finite points are skipped and interrupt the line.
    colour: 0 … 5, a class of the style sheet.
    style: 'line', 'faint' (a line behind others), 'points', or 'limit' (dashed).
    low, high: ends of the whiskers of each point, for 'points'.
    links: the address that each point leads to, for 'points'.
    reduce: how neighbours are merged if there are too many points: 'mean' or 'max'.
  """

  name: str
  x: Sequence[float]
  y: Sequence[float]
  colour: int = 0
  style: str = 'line'
  low: Sequence[float] = ()
  high: Sequence[float] = ()
  links: Sequence[str] = ()
  reduce: str = 'mean'


@dataclasses.dataclass(frozen=True)
class Bars:
  """Bars of a `bar_plot`: a name, shares by category, and a colour as in `Series`."""

  name: str
  shares: Sequence[float]
  colour: int = 0


def number(value: float) -> str:
  """A number for an axis or a table: 1,230 · 0.0123 · 12.3k · 1.2M · 2.1G."""
  if not math.isfinite(value):
    return '–'
  size = abs(value)
  if size >= 1e9:
    return f'{value / 1e9:.4g}G'
  if size >= 1e6:
    return f'{value / 1e6:.3g}M'
  if size >= 1e4:
    return f'{value / 1e3:.3g}k'
  if value == int(value):
    return f'{int(value):,}'
  if size >= 100:
    return f'{value:,.0f}'
  return f'{value:.3g}' if size >= 1e-4 else f'{value:.1e}'


def percent(value: float) -> str:
  """A fraction in [0, 1] as a percentage with at most one decimal."""
  return f'{100 * value:.1f}'.removesuffix('.0') + ' %' if math.isfinite(value) else '–'


def ticks(low: float, high: float, about: int = 5) -> list[float]:
  """Round values that cover [low, high]: steps of 1, 2 or 5 times a power of ten."""
  span = high - low
  if not math.isfinite(span) or span <= 0 or math.isclose(low, high):
    return [low]
  magnitude = 10.0 ** math.floor(math.log10(span / about))
  step = next(m for m in (1, 2, 5, 10) if span / (m * magnitude) <= about) * magnitude
  first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
  return [i * step for i in range(first, last + 1)]


def _marks(
  values: Sequence[float],
  place: Callable[[float], float],
  text: Callable[[float], str],
) -> list[tuple[float, str]]:
  """(coordinate, text) of ticks, with the digits of their step if two were the same."""
  texts = [text(value) for value in values]
  if len(set(texts)) < len(texts):
    digits = math.ceil(-math.log10(values[1] - values[0]) - 1e-9)
    texts = [f'{value:.{max(0, digits)}f}' for value in values]
    if text is percent:
      texts = [f'{100 * value:.{max(0, digits - 2)}f} %' for value in values]
  return [(place(value), text) for value, text in zip(values, texts, strict=True)]


def line_plot(
  series: Sequence[Series],
  *,
  label: str,
  x_label: str,
  y_format: Callable[[float], str] = number,
  y_limits: tuple[float, float] | None = None,
  x_limits: tuple[float, float] | None = None,
  width: int = WIDTH,
  link: str = '',
  shade: tuple[float, float] | None = None,
) -> Markup:
  """Plots series over a common x axis.

  Args:
    series: what to draw, in drawing order.
    label: what the plot shows, for screen readers.
    x_label: caption of the x axis.
    y_format: tick and hover text of y values: `number` or `percent`.
    y_limits: fixed y range; by default the range of the values, and zero if it is near.
    x_limits: x range; by default the range of the values.
    width: width of the view box; a plot of half a column needs half of WIDTH.
    link: where a click on a line leads: this and the x of the point.
    shade: an interval of x behind the lines.

  Returns:
    An <svg> element, or '' if there is no finite point.
  """
  drawn = [_reduce(s) for s in series]
  xs = [x for s in drawn for x in s.x]
  ys = [y for s in drawn for y in (*s.y, *s.low, *s.high) if math.isfinite(y)]
  if not any(math.isfinite(y) for s in drawn for y in s.y):
    return Markup('')
  low, high = x_limits or (min(xs), max(xs))
  right, base = width - _RIGHT, HEIGHT - _BOTTOM
  y_ticks = ticks(*(y_limits or _y_range(ys)), about=5)
  about = max(2, 6 * width // WIDTH)
  x_ticks = [t for t in ticks(low, high, about) if low <= t <= high]
  if all(float(x).is_integer() for x in xs):  # steps and updates have no halves
    x_ticks = [t for t in x_ticks if float(t).is_integer()]
  place_x = _scale(low, high, _LEFT, right)
  place_y = _scale(y_ticks[0], y_ticks[-1], base, _TOP)
  parts = [
    *_shaded(shade, low, high, place_x),
    *_y_axis(_marks(y_ticks, place_y, y_format), right),
    *_x_axis(_marks(x_ticks, place_x, number), right, x_label),
    *(_drawn(s, place_x, place_y) for s in drawn),
  ]
  hover = {
    'x': [place_x(low), place_x(high), low, high],
    'xLabel': x_label,
    'series': [
      {
        'name': s.name,
        'x': [_digits(x) for x in s.x],
        'text': [y_format(y) for y in s.y],
        'link': '' if s.style == 'points' else link,
      }
      for s in drawn
      if s.style != 'limit'
    ],
  }
  return Markup(
    '<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}" data-plot="{}">'
    '{}<line class="cursor" y1="{}" y2="{}" visibility="hidden"/></svg>'
  ).format(width, HEIGHT, label, json.dumps(hover), Markup('').join(parts), _TOP, base)


def _shaded(
  interval: tuple[float, float] | None,
  low: float,
  high: float,
  place: Callable[[float], float],
) -> list[Markup]:
  """The part of an interval of x that the plot has, at least three units wide."""
  if interval is None or interval[1] < low or interval[0] > high:
    return []
  left, right = place(max(low, interval[0])), place(min(high, interval[1]))
  left, right = min(left, right - 1.5), max(right, left + 1.5)
  return [
    Markup('<rect class="shade" x="{}" y="{}" width="{}" height="{}"/>').format(
      *(_digits(left), _TOP, _digits(right - left), HEIGHT - _BOTTOM - _TOP)
    )
  ]


def bar_plot(
  categories: Sequence[str], series: Sequence[Bars], *, label: str, x_label: str
) -> Markup:
  """Bars of several series side by side, over categories.

  Args:
    categories: captions, from left to right.
    series: what to draw; shares of each in [0, 1].
    label, x_label: as for `line_plot`.

  Returns:
    An <svg> element, or '' without bars. The text of a bar is its tooltip.
  """
  if not categories or not series:
    return Markup('')
  right, base = WIDTH - _RIGHT, HEIGHT - _BOTTOM
  y_ticks = ticks(0.0, max(1e-9, *(x for bars in series for x in bars.shares)))
  place_y = _scale(y_ticks[0], y_ticks[-1], base, _TOP)
  group = (right - _LEFT) / len(categories)
  width = 0.8 * group / len(series)
  centres = [_digits(_LEFT + (i + 0.5) * group) for i in range(len(categories))]
  parts = [
    *_y_axis(_marks(y_ticks, place_y, percent), right),
    *_x_axis(list(zip(centres, categories, strict=True)), right, x_label),
  ]
  for k, bars in enumerate(series):
    for centre, category, share in zip(centres, categories, bars.shares, strict=True):
      x, y = centre - 0.4 * group + k * width, place_y(share)
      parts.append(
        Markup(
          '<rect class="s{}" x="{}" y="{}" width="{}" height="{}">'
          '<title>{}: {} {}</title></rect>'
        ).format(
          *(bars.colour, _digits(x), y, _digits(width), _digits(base - y)),
          *(bars.name, category, percent(share)),
        )
      )
  return Markup(
    '<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
  ).format(WIDTH, HEIGHT, label, Markup('').join(parts))


def _y_axis(marks: Sequence[tuple[float, str]], right: float) -> list[Markup]:
  """A grid line and its text for each (y coordinate, text)."""
  line = Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>')
  return [
    line.format(_LEFT, right, y, y) + _text(_LEFT - 6, y + 3.5, text, 'end')
    for y, text in marks
  ]


def _x_axis(
  marks: Sequence[tuple[float, str]], right: float, label: str
) -> list[Markup]:
  """The text at each (x coordinate, text), and the caption of the axis."""
  texts = [_text(x, HEIGHT - _BOTTOM + 14, text, 'middle') for x, text in marks]
  caption = _text((_LEFT + right) / 2, HEIGHT - 4, label, 'middle', 'axis')
  return [*texts, caption]


def interval(value: float, low: float, high: float) -> Markup:
  """A fraction and its interval: a dot and whiskers on a line from 0 to 1."""
  width, height = 200, 18
  place = _scale(0.0, 1.0, 4, width - 4)
  middle = height / 2
  return Markup(
    '<svg class="interval s0" viewBox="0 0 {} {}" aria-hidden="true">'
    '<line class="grid" x1="{}" x2="{}" y1="{m}" y2="{m}"/>'
    '<line class="whisker" x1="{}" x2="{}" y1="{m}" y2="{m}"/>'
    '<circle cx="{}" cy="{m}" r="4.5"/></svg>'
  ).format(
    width,
    height,
    place(0),
    place(1),
    place(low),
    place(high),
    place(value),
    m=middle,
  )


def change(before: float, after: float) -> Markup:
  """The change of a fraction: two dots on a line from 0 to 1."""
  width, height = 200, 18
  place = _scale(0.0, 1.0, 4, width - 4)
  middle = height / 2
  return Markup(
    '<svg class="change {}" viewBox="0 0 {} {}" aria-hidden="true">'
    '<line class="grid" x1="{}" x2="{}" y1="{m}" y2="{m}"/>'
    '<line class="whisker" x1="{}" x2="{}" y1="{m}" y2="{m}"/>'
    '<circle class="from" cx="{}" cy="{m}" r="3.5"/>'
    '<circle class="to" cx="{}" cy="{m}" r="4.5"/></svg>'
  ).format(
    'up' if after >= before else 'down',
    width,
    height,
    place(0),
    place(1),
    place(before),
    place(after),
    place(before),
    place(after),
    m=middle,
  )


def _reduce(series: Series) -> Series:
  """Merges neighbours until there are at most _MAX_POINTS points; sorts by x."""
  order = sorted(range(len(series.x)), key=lambda i: series.x[i])
  if series.style in ('points', 'limit') or len(order) <= _MAX_POINTS:
    pick = lambda values: [values[i] for i in order] if values else []  # noqa: E731
    return dataclasses.replace(
      series,
      x=pick(series.x),
      y=pick(series.y),
      low=pick(series.low),
      high=pick(series.high),
      links=pick(series.links),
    )
  size = math.ceil(len(order) / _MAX_POINTS)
  xs, ys = [], []
  for start in range(0, len(order), size):
    part = order[start : start + size]
    values = [series.y[i] for i in part if math.isfinite(series.y[i])]
    xs.append(series.x[part[len(part) // 2]])
    merge = max if series.reduce == 'max' else lambda v: math.fsum(v) / len(v)
    ys.append(merge(values) if values else math.nan)
  return dataclasses.replace(series, x=xs, y=ys)


def _y_range(ys: Sequence[float]) -> tuple[float, float]:
  low, high = min(ys), max(ys)
  if math.isclose(low, high):  # rounding is no change
    return (low - 1, high + 1) if low == 0 else (min(0, 2 * low), max(0, 2 * low))
  # Include zero unless it would flatten the curve.
  if 0 < low < 0.6 * high:
    low = 0.0
  return low, high


def _scale(
  low: float, high: float, start: float, end: float
) -> Callable[[float], float]:
  span = high - low
  if span <= 0:
    return lambda value: _digits((start + end) / 2)
  return lambda value: _digits(start + (value - low) / span * (end - start))


def _digits(value: float) -> float:
  return round(value, 2 - min(0, math.floor(math.log10(abs(value))))) if value else 0.0


def _text(x: float, y: float, text: str, anchor: str, kind: str = 'tick') -> Markup:
  return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(
    kind, x, y, anchor, text
  )


def _drawn(
  series: Series,
  place_x: Callable[[float], float],
  place_y: Callable[[float], float],
) -> Markup:
  shown = Markup('<g class="{} s{}">').format(series.style, series.colour)
  if series.style == 'points':
    for i, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
      if not math.isfinite(y):
        continue
      if series.low:
        shown += Markup(
          '<line class="whisker" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>'
        ).format(place_x(x), place_y(series.low[i]), place_y(series.high[i]))
      dot = Markup('<circle cx="{}" cy="{}" r="4"/>').format(place_x(x), place_y(y))
      if series.links:
        link, label = series.links[i], f'{series.name}, {x:g}: trajectories'
        dot = Markup('<a href="{}" aria-label="{}">{}</a>').format(link, label, dot)
      shown += dot
  else:
    for run in _finite_runs(series):
      points = ' '.join(f'{place_x(x)},{place_y(y)}' for x, y in run)
      if len(run) == 1:
        points = f'{points} {points}'  # a round cap draws it as a dot
      shown += Markup('<polyline points="{}"/>').format(points)
  return shown + Markup('</g>')


def _finite_runs(series: Series) -> list[list[tuple[float, float]]]:
  runs: list[list[tuple[float, float]]] = [[]]
  for x, y in zip(series.x, series.y, strict=True):
    if math.isfinite(y):
      runs[-1].append((x, y))
    elif runs[-1]:
      runs.append([])
  return [run for run in runs if run]
