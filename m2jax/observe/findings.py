"""Findings about a run, as its terminal view, its report and its page show them.

`m2jax.evolve.doctor` makes them, after this package: they come as JSON values, from the
job that examines itself or from WORKDIR/findings.json, which `experiments.doctor
--write` writes. Both are untrusted: whatever is not of the form below is left out, and
texts are printable and short.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax.observe import svg
from m2jax.observe.printable import one_line

FILE = 'findings.json'
MAX_BYTES = 1 << 20
MAX_FINDINGS, MAX_CURVES, MAX_LINES = 64, 8, 8
MAX_POINTS = 400  # of a curve
SEVERITIES = 'error', 'warning'
_TEXT, _NAME = 600, 80  # characters


@dataclasses.dataclass(frozen=True)
class Curve:
  """Values of one series around a finding's window.

  Attributes:
    name: key of the records, or what was counted.
    points: (step, value), finite, in order of steps; () for counts of the whole run.
    values: the values if they have no steps.
    threshold: the bound that they passed; None if there is none.
    why: how the bound was obtained.
  """

  name: str
  points: tuple[tuple[float, float], ...] = ()
  values: tuple[float, ...] = ()
  threshold: float | None = None
  why: str = ''


@dataclasses.dataclass(frozen=True)
class Shown:
  """One finding; fields as in `m2jax.evolve.doctor.finding.Finding`.

  Attributes:
    window: (first step, last step), or None.
    causes: (text, config field or '') of each.
  """

  kind: str
  severity: str
  summary: str
  phase: str = ''
  window: tuple[float, float] | None = None
  curves: tuple[Curve, ...] = ()
  log: tuple[str, ...] = ()
  causes: tuple[tuple[str, str], ...] = ()

  @property
  def where(self) -> str:
    """'rl, steps 41 to 60', or what of it is known."""
    parts = [self.phase] if self.phase else []
    if self.window is not None:
      first, last = self.window
      parts.append(f'steps {first:,.0f} to {last:,.0f}')
    return ', '.join(parts)

  def as_dict(self) -> dict[str, Any]:
    """JSON values, for the page."""
    return dataclasses.asdict(self)


def parse(found: Any) -> tuple[Shown, ...]:
  """The findings in a JSON value: a list of `Finding.as_dict()`."""
  items = found[:MAX_FINDINGS] if isinstance(found, list) else []
  return tuple(_shown(x) for x in items if isinstance(x, dict) and x.get('kind'))


def read(workdir: pathlib.Path) -> tuple[Shown, ...]:
  """Those of WORKDIR/findings.json; () if it cannot be read."""
  path = workdir / FILE
  try:
    if not path.is_file():  # a pipe would block
      return ()
    with open(path, 'rb') as file:
      return parse(json.loads(file.read(MAX_BYTES)))
  except (OSError, ValueError, RecursionError):
    return ()


def write(workdir: pathlib.Path, found: Sequence[Mapping[str, Any]]) -> None:
  """Writes WORKDIR/findings.json; `found`: of `Finding.as_dict`, errors first.

  Raises:
    OSError: it cannot be written.
  """
  path = workdir / FILE
  new = path.with_name(f'{FILE}.{os.getpid()}.new')
  new.write_text(json.dumps(found[:MAX_FINDINGS]), encoding='utf-8')
  new.replace(path)


def with_records(
  found: Shown, records: Sequence[Mapping[str, Any]], most: int = MAX_POINTS
) -> Shown:
  """The finding with all the values that the run's records have of its curves.

  Its own evidence has a few values of the window. Of more than `most` records every
  n-th is there.
  """
  own = [r for r in records if r.get('phase') == found.phase]
  curves = []
  for curve in found.curves:
    pairs = [(r.get('step'), r.get(curve.name)) for r in own]
    points = [p for p in pairs if _finite(p[0]) and _finite(p[1])]
    if points and curve.points:
      curve = dataclasses.replace(curve, points=_thinned(points, most))
    curves.append(curve)
  return dataclasses.replace(found, curves=tuple(curves))


def drawn(found: Shown, curve: Curve, link: str = '') -> tuple[Any, list]:
  """(drawing, legend) of a curve: its window shaded, its threshold dashed.

  `link`: see `svg.line_plot`.
  """
  if not curve.points:
    return '', []
  x, y = zip(*curve.points, strict=True)
  series = [svg.Series(curve.name, x, y)]
  if curve.threshold is not None:
    bound = [curve.threshold, curve.threshold]
    series.append(svg.Series('threshold', [x[0], x[-1]], bound, 1, style='limit'))
  label = f'{curve.name}: {found.kind}, {found.where}'
  drawing = svg.line_plot(
    series, label=label, x_label='step', link=link, shade=found.window
  )
  return drawing, [(s.name, f'{s.style} s{s.colour}') for s in series]


def _shown(found: Mapping[str, Any]) -> Shown:
  window = found.get('first_step'), found.get('last_step')
  severity = found.get('severity')
  return Shown(
    one_line(found['kind'], _NAME),
    severity if severity in SEVERITIES else SEVERITIES[-1],
    one_line(found.get('summary'), _TEXT),
    one_line(found.get('phase'), _NAME),
    window if all(map(_finite, window)) and window[0] <= window[1] else None,
    tuple(map(_curve, _dicts(found.get('evidence'), MAX_CURVES))),
    tuple(one_line(x, _TEXT) for x in _list(found.get('log'))[:MAX_LINES]),
    tuple(
      (one_line(x.get('text'), _TEXT), one_line(x.get('field'), _NAME))
      for x in _dicts(found.get('causes'), MAX_LINES)
    ),
  )


def _curve(found: Mapping[str, Any]) -> Curve:
  steps, values = _list(found.get('steps')), _list(found.get('values'))
  bound = found.get('threshold')
  pairs = [p for p in zip(steps, values, strict=False) if all(map(_finite, p))]
  return Curve(
    one_line(found.get('name'), _NAME),
    _thinned(pairs, MAX_POINTS),
    () if pairs else tuple(filter(_finite, values[:MAX_POINTS])),
    bound if _finite(bound) else None,
    one_line(found.get('calibration'), _TEXT),
  )


def _thinned(points: Sequence[tuple], most: int) -> tuple[tuple[float, float], ...]:
  every = max(1, math.ceil(len(points) / most))
  return tuple(sorted(points[::-every]))


def _list(value: Any) -> list:
  return list(value) if isinstance(value, (list, tuple)) else []


def _dicts(value: Any, most: int) -> list[dict]:
  return [x for x in _list(value)[:most] if isinstance(x, dict)]


def _finite(value: Any) -> bool:
  """Whether it is a number that a browser can place; JSON has integers of any size."""
  return type(value) in (int, float) and abs(value) < 1e300
