"""Wrong formulas, and hidden cases in which each of them is wrong.

`of` derives wrong formulas from those of the solution: a constant, another comparison,
a branch that is always taken, a value pasted for a reference, a range without its first
or last row. `choose` draws cases until every one gives a wrong value in at least one.
"""

from __future__ import annotations

import random
import re
from typing import Any

from m2jax_pipelines.spreadsheets import engines
from m2jax_pipelines.spreadsheets.model import Cells, Model

TRIES, MOST = 8, 8  # draws for a case; hidden cases of a task
_CLEAR = 1e-4  # relative: any engine distinguishes values that differ by more
_OTHER = {'>': '>=', '>=': '>', '<': '<=', '<=': '<'}
_ROWS = re.compile(r'((?:\w+!)?\$?[A-Z]+\$?)(\d+)(:\$?[A-Z]+\$?)(\d+)')


class Unfit(Exception):
  """No cases were found that expose all wrong formulas of a model."""


def choose(model: Model, rng: random.Random, count: int) -> list[dict[str, Any]]:
  """The given case and at least `count` hidden ones that expose all wrong formulas.

  Raises:
    Unfit: `MOST` cases do not expose all of them.
  """
  cases = [model.case(None)]
  alive = _alive(model, cases[0], [_Mutant(*pair) for pair in of(model)])
  while alive or len(cases) <= count:
    if len(cases) > MOST:
      left = ', '.join(f'{m.place} {m.formula}' for m in alive[:3])
      raise Unfit(f'{len(alive)} wrong formulas are right in all cases: {left}')
    best = None
    # The first is any draw; the others are the best of several.
    for _ in range(TRIES if alive and len(cases) > 1 else 1):
      case = model.case(rng)
      left = _alive(model, case, alive)
      if best is None or len(left) < len(best[1]):
        best = case, left
      if not left:
        break
    cases.append(best[0])
    alive = best[1]
  return cases


def of(model: Model) -> list[tuple[str, str]]:
  """Wrong formulas of a model's wanted cells: (cell, formula)."""
  known = {**model.cells, **model.case(None)['values']}
  changing = {*model.inputs, *model.wanted}
  found = []
  for place, wanted in model.wanted.items():
    own = place.partition('!')[0]
    formulas = [f'={_literal(known[place])}', *shorter(wanted.formula)]
    formulas += _changed(_tokens(wanted.formula), own, known, changing)
    formulas += wanted.wrong
    kept = dict.fromkeys(f for f in formulas if f not in wanted.equal)
    found += [(place, formula) for formula in kept if formula != wanted.formula]
  return found


def shorter(formula: str) -> list[str]:
  """A formula whose ranges of rows lack the first row, and the last one; or none."""

  def first(match):
    return f'{match[1]}{int(match[2]) + 1}{match[3]}{match[4]}'

  def last(match):
    return f'{match[1]}{match[2]}{match[3]}{int(match[4]) - 1}'

  return [_ROWS.sub(cut, formula) for cut in (first, last) if _ROWS.search(formula)]


def _tokens(formula):
  from openpyxl.formula import Tokenizer

  return Tokenizer(formula).items


def _changed(tokens, own, known, changing) -> list[str]:
  """Formulas with another comparison, a fixed branch or a pasted value."""
  texts, found = [token.value for token in tokens], []

  def other(start, end, text):
    found.append('=' + ''.join([*texts[:start], text, *texts[end:]]))

  for i, token in enumerate(tokens):
    bare = token.value.strip('"')
    if bare in _OTHER and token.type in ('OPERATOR-INFIX', 'OPERAND'):
      other(i, i + 1, token.value.replace(bare, _OTHER[bare]))
    if token.value == 'IF(':
      end = _argument(tokens, i + 1)
      other(i + 1, end, '1=1')
      other(i + 1, end, '1=2')
  for text in dict.fromkeys(t.value for t in tokens if t.subtype == 'RANGE'):
    sheet, _, cell = text.replace('$', '').rpartition('!')
    place = f'{sheet or own}!{cell}'
    if place in changing:
      value = _literal(known[place])
      found.append('=' + ''.join(value if t == text else t for t in texts))
  return found


def _argument(tokens, start):
  """The end of the function's argument that begins at `start`."""
  depth = 0
  for i in range(start, len(tokens)):
    if depth == 0 and tokens[i].type == 'SEP':
      return i
    depth += {'OPEN': 1, 'CLOSE': -1}.get(tokens[i].subtype, 0)
  return len(tokens)


def _literal(value) -> str:
  return f'"{value}"' if isinstance(value, str) else f'({value!r})'


class _Mutant:
  """A wrong formula, compiled by the package `formulas`."""

  def __init__(self, place: str, formula: str):
    import formulas

    self.place, self.formula = place, formula
    self._own = place.partition('!')[0].upper()
    self._call = formulas.Parser().ast(formula)[1].compile()

  def value(self, cells: Cells):
    """The value for cells whose sheets are in capitals; None for an error."""
    import numpy as np

    arguments = []
    for found in self._call.inputs.values():
      area = found.ranges[0]
      sheet = area.get('sheet') or self._own
      rows = range(int(area['r1']), int(area['r2']) + 1)
      columns = range(area['n1'], area['n2'] + 1)
      values = [[cells[f'{sheet}!{chr(64 + c)}{r}'] for c in columns] for r in rows]
      arguments.append(np.array(values, object))
    return engines.plain(np.asarray(self._call(*arguments), object).ravel()[0])


def _alive(model, case, mutants):
  """The mutants that are right in a case."""
  cells = {**model.cells, **case['inputs'], **case['values']}
  capital = {
    f'{s.upper()}!{c}': v
    for (s, _, c), v in ((k.partition('!'), cells[k]) for k in cells)
  }
  return [
    m
    for m in mutants
    if engines.same(m.value(capital), case['values'][m.place], tolerance=_CLEAR)
  ]
