"""A workbook with what must be calculated in it, and an oracle in plain Python.

A model has given cells, inputs that may change, and wanted cells: a formula (the
solution), a description, and the oracle's value, which shares nothing with the formula.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Cells = dict[str, Any]  # 'Sheet!B2' → value
FUNCTIONS = (
  'SUM SUMIF SUMIFS SUMPRODUCT AVERAGE AVERAGEIF AVERAGEIFS COUNT COUNTIF COUNTIFS MIN '
  'MAX ROUND ABS IF AND OR NOT INDEX MATCH VLOOKUP NPV IRR PMT FV'
).split()


@dataclasses.dataclass(frozen=True)
class Wanted:
  """A required cell.

  Attributes:
    text: description of what it must contain.
    formula: the right formula.
    wrong: wrong formulas, beside those that `mutants` derives.
    equal: derived formulas that give the same values, whatever the inputs.
  """

  text: str
  formula: str
  wrong: tuple[str, ...] = ()
  equal: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Model:
  """Attributes:
  family, source: class, and what the numbers are from.
  cells: given cells.
  changing: what may change, in words.
  inputs: the cells that may change: all that a formula should depend on.
  draw: draws another value for each input; sometimes one that exposes wrong formulas.
  wanted: cell → what is wanted there.
  oracle: cells → value of each wanted cell.
  """

  family: str
  source: str
  cells: Cells
  changing: str
  inputs: Sequence[str]
  draw: Callable[[random.Random], Cells]
  wanted: Mapping[str, Wanted]
  oracle: Callable[[Cells], Mapping[str, Any]]

  def case(self, rng: random.Random | None) -> dict[str, Any]:
    """Changed inputs and the resulting values; without `rng` none is changed."""
    changed = self.draw(rng) if rng else {}
    values = self.oracle({**self.cells, **changed})
    return {'inputs': changed, 'values': {k: _plain(v) for k, v in values.items()}}


def _plain(value):
  numeric = isinstance(value, int | float) and not isinstance(value, bool)
  return float(value) if numeric else value


def table(sheet: str, rows: Sequence[Sequence[Any]]) -> Cells:
  """Cells of rows from A1 on."""
  return {
    f'{sheet}!{chr(65 + x)}{y}': value
    for y, row in enumerate(rows, 1)
    for x, value in enumerate(row)
    if value is not None
  }
