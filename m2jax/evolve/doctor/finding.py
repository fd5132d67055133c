"""What a detector finds: plain records, which JSON can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_VALUES = 24  # of a series that a finding shows: enough to see its shape


@dataclasses.dataclass(frozen=True)
class Evidence:
  """Values of one series in a finding's window.

  Attributes:
    name: key of the records, or a description of what was counted.
    values: the values, thinned to `MAX_VALUES`; first and last are there.
    steps: the step of each value; empty for counts of the whole run.
    threshold: the bound that they passed; None if there is none.
    calibration: how the bound was obtained.
  """

  name: str
  values: tuple[float, ...]
  steps: tuple[int, ...] = ()
  threshold: float | None = None
  calibration: str = ''


@dataclasses.dataclass(frozen=True)
class Cause:
  """One likely cause.

  Attributes:
    text: what may be wrong.
    field: dotted name of the config field that it concerns; '' if it is none.
  """

  text: str
  field: str = ''


@dataclasses.dataclass(frozen=True)
class Finding:
  """One anomaly of a run.

  Attributes:
    kind: key of `causes.KINDS`.
    summary: one sentence with the numbers.
    phase: phase of the records; '' if it concerns none.
    first_step, last_step: window of steps; None if the evidence has no steps.
    first_s, last_s: the same in seconds since the epoch.
    evidence: the series.
    log: lines of the log that match the kind, at most `logs.MAX_LINES`.
    severity: 'error' or 'warning', from the table of kinds.
    causes: the likely causes, the likeliest first, from the same table.
  """

  kind: str
  summary: str
  phase: str = ''
  first_step: int | None = None
  last_step: int | None = None
  first_s: float | None = None
  last_s: float | None = None
  evidence: tuple[Evidence, ...] = ()
  log: tuple[str, ...] = ()
  severity: str = ''
  causes: tuple[Cause, ...] = ()

  def as_dict(self) -> dict[str, Any]:
    """The finding as JSON values."""
    return dataclasses.asdict(self)


def evidence(
  name: str,
  values: Sequence[float] | np.ndarray,
  steps: Sequence[int] | np.ndarray = (),
  threshold: float | None = None,
  calibration: str = '',
) -> Evidence:
  """Evidence of at most `MAX_VALUES` values, which are spread evenly."""
  n = len(values)
  shown = np.unique(np.linspace(0, n - 1, min(n, MAX_VALUES)).round().astype(int))
  return Evidence(
    name,
    tuple(float(values[i]) for i in shown),
    tuple(int(steps[i]) for i in shown) if len(steps) else (),
    None if threshold is None else float(threshold),
    calibration,
  )
