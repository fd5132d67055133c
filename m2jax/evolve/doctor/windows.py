"""From a part of a series to a finding with its window and its values."""

from __future__ import annotations

import numpy as np

from m2jax.evolve.doctor import finding
from m2jax.evolve.doctor.history import Phase

_CONTEXT = 8  # values before a window that its evidence shows, to compare with


def in_window(
  kind: str,
  summary: str,
  phase: Phase,
  rows: tuple[int, int],
  evidence: tuple[finding.Evidence, ...],
) -> finding.Finding:
  """A finding in the window of the records `rows`, (first, last)."""
  first, last = rows
  return finding.Finding(
    kind,
    summary,
    phase.name,
    int(phase.step[first]),
    int(phase.step[last]),
    float(phase.time_s[first]),
    float(phase.time_s[last]),
    evidence,
  )


def of_series(
  kind: str,
  summary: str,
  phase: Phase,
  name: str,
  at: np.ndarray,
  values: np.ndarray,
  part: tuple[int, int],
  bound: float | None,
  calibration: str,
) -> finding.Finding:
  """A finding about a part of one series.

  Args:
    at, values: the series: indices of its records, and values [n].
    part: first and last index into these.
    bound, calibration: threshold, and how it was obtained.
  """
  first, last = part
  shown = slice(max(0, first - _CONTEXT), last + 1)
  steps = phase.step[at[shown]]
  shown_values = finding.evidence(name, values[shown], steps, bound, calibration)
  rows = int(at[first]), int(at[last])
  return in_window(kind, summary, phase, rows, (shown_values,))
