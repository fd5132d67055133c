"""Histograms of generated, trained and dropped trajectories, for the report."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from m2jax.observe import sample_names, svg

_TITLES = {
  'age': 'Age',
  'length': 'Length',
  'latency': 'Latency',
  'outcome': 'Outcome',
}


def counts(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict]:
  """(kind, quantity) → number of trajectories by bin, over all records."""
  found: dict[tuple[str, str], collections.Counter] = {
    (kind, quantity): collections.Counter()
    for kind in sample_names.KINDS
    for quantity in sample_names.QUANTITIES
  }
  for record in records:
    for key, value in record.items():
      name, slash, label = key.partition('/')
      of = tuple(name.split('_', 1))
      if slash and of in found:
        found[of][label] += value
  return found


def drawn(
  records: Sequence[Mapping[str, Any]],
) -> list[tuple[str, str, list[tuple[str, str]], Markup]]:
  """Title, note, legend and drawing of each histogram; the drawing may be empty."""
  found, out = counts(records), []
  for quantity, (unit, meaning, _) in sample_names.QUANTITIES.items():
    by_kind = {kind: found[kind, quantity] for kind in sample_names.KINDS}
    labels = _labels(quantity, {x for bins in by_kind.values() for x in bins})
    series = [
      svg.Bars(f'{kind}, {bins.total():,}', [bins[x] / bins.total() for x in labels], i)
      for i, (kind, bins) in enumerate(by_kind.items())
      if bins.total()
    ]
    title = _TITLES[quantity]
    out.append(
      (
        title,
        f'{meaning} [{unit}]' if unit else meaning,
        [(bars.name, f'line s{bars.colour}') for bars in series],
        svg.bar_plot(labels, series, label=title, x_label=_x_label(quantity, unit)),
      )
    )
  return out


def _labels(quantity: str, found: set[str]) -> list[str]:
  """The bins to show: edges without gaps, then labels that are not edges."""
  if quantity == 'outcome':
    known = [x for x in sample_names.OUTCOMES if x in found]
    return [*known, *sorted(found - set(known))]
  lowest = sample_names.QUANTITIES[quantity][2]
  edges = [lowest * 2.0**k for k in range(60)]
  by_label = {'0': 0.0} | {f'{edge:g}': edge for edge in edges}
  known = [by_label[x] for x in found if x in by_label]
  shown = [x for x, edge in by_label.items() if known and edge <= max(known)]
  if known and min(known):  # nothing is below the first
    shown = [x for x in shown if by_label[x] >= min(known)]
  return [*shown, *sorted(found - set(shown))]


def _x_label(quantity: str, unit: str) -> str:
  return f'{unit}, from the edge to its double' if unit else quantity
