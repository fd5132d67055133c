"""Judges a workbook: required cells hold formulas that stay right when inputs change.

What is shown must be what is calculated: required cells are visible, and a value stored
beside a formula is the formula's. Engines that contradict each other decide nothing,
nor does one that fails by itself: `Undecided` and `engines.EngineFailed` make the
verdict invalid.

cases.json has the original cells, the required ones, the functions that may be used,
and cases: changed inputs and the values that must result. Hidden changes are the check
that no pasted constant passes. `guard` reads the workbook first, and may refuse it.
"""

import io
import json
import os
import sys
import sysconfig
import tempfile

TESTS = os.environ.get('M2JAX_TESTS', os.path.dirname(os.path.abspath(__file__)))
BOOK = 'book.xlsx'
MAX_FORMULA_CHARS = 1000
MAX_REFERENCES = 1_000_000  # cells of ranges, of all formulas; not of whole columns


class Wrong(Exception):
  """The workbook fails; the message is the reason."""


def load(data):
  """The workbook of bytes that `guard` let through. Raises Wrong."""
  import guard
  import openpyxl
  import seen

  if reason := guard.check(data) or seen.parts(data):
    raise Wrong(f'refused: {reason}')
  try:
    book = openpyxl.load_workbook(io.BytesIO(data))
  except Exception as error:
    raise Wrong(f'refused: not a workbook: {type(error).__name__}') from None
  for sheet in book.worksheets:
    if sheet.max_row > guard.MAX_ROW or sheet.max_column > guard.MAX_COLUMN:
      raise Wrong('refused: a cell beyond the last row or column')
  return book


def check_original(book, original):
  """Raises Wrong if a cell that was given differs."""
  for sheet, cells in original.items():
    if sheet not in book.sheetnames:
      raise Wrong(f'the sheet {sheet} is missing')
    for cell, value in cells.items():
      found = book[sheet][cell].value
      if type(found) is not type(value) or found != value:
        if _number(value) is None or _number(found) != value:
          raise Wrong(f'{sheet}!{cell} was changed')


def _number(value):
  numeric = isinstance(value, int | float) and not isinstance(value, bool)
  return float(value) if numeric else None


def check_formulas(book, required, functions):
  """Raises Wrong unless required cells hold formulas of allowed functions."""
  cells = 0
  for sheet in book.worksheets:
    for row in sheet.iter_rows():
      for cell in row:
        value = cell.value
        place = f'{sheet.title}!{cell.coordinate}'
        if cell.data_type == 'f':
          if not isinstance(value, str):
            raise Wrong(f'{place}: array formulas and data tables are not allowed')
          cells += _allowed(place, value, functions)
          if cells > MAX_REFERENCES:
            raise Wrong(f'{place}: formulas refer to more than {MAX_REFERENCES} cells')
  for place in required:
    sheet, _, cell = place.partition('!')
    found = book[sheet][cell]
    if found.data_type != 'f':
      raise Wrong(f'{place} holds no formula')
    if not any(t.type == 'OPERAND' and t.subtype == 'RANGE' for t in _tokens(found)):
      raise Wrong(f'{place} refers to no cell')
  if book.defined_names or any(sheet.defined_names for sheet in book.worksheets):
    raise Wrong('defined names are not allowed')


def check_shown(data, book, required, values):
  """Raises Wrong if a required cell is hidden, or stores another value than its own."""
  import engines
  import openpyxl
  import seen

  if reason := seen.workbook(book):
    raise Wrong(reason)
  stored = openpyxl.load_workbook(io.BytesIO(data), data_only=True)
  for place in required:
    name, _, where = place.partition('!')
    if reason := seen.cell(book, book[name], book[name][where]):
      raise Wrong(f'{place} {reason}')
    value = engines.plain(stored[name][where].value)
    if value is not None and not engines.same(value, values[place]):
      raise Wrong(f'{place} stores another value than its formula has')


def _tokens(cell):
  import rewrite

  return rewrite.tokens(cell.value)


def _allowed(place, formula, functions):
  """Raises Wrong unless a formula may be used; returns how many cells it refers to."""
  import rewrite
  from openpyxl.formula.tokenizer import TokenizerError

  cells = 0
  if len(formula) > MAX_FORMULA_CHARS:
    raise Wrong(f'{place}: more than {MAX_FORMULA_CHARS} characters')
  try:
    tokens = rewrite.tokens(formula)
  except (TokenizerError, IndexError) as error:
    raise Wrong(f'{place}: no formula: {error}') from None
  for token in tokens:
    if token.type == 'FUNC' and token.subtype == 'OPEN':
      name = token.value.rstrip('(').upper()
      if name not in functions:
        raise Wrong(f'{place}: the function {name} is not allowed')
    if token.type == 'OPERAND' and token.subtype == 'RANGE':
      if '[' in token.value:
        raise Wrong(f'{place}: refers to another workbook')
      cells += rewrite.area(token.value)
  return cells


class Undecided(Exception):
  """The engines contradict each other: there is no verdict."""


def check_cases(data, cases, required, engines):
  """Compares all values, by each engine.

  Raises:
    Wrong: an engine finds one wrong, and none finds all right.
    Undecided: one engine finds all right, another does not.
    engines.EngineFailed: no engine finds one wrong, but one failed by itself.
  """
  import engines as engines_lib
  import openpyxl

  right, wrong, failed = [], [], []
  with tempfile.TemporaryDirectory() as place:
    paths = []
    for number, case in enumerate(cases):
      book = openpyxl.load_workbook(io.BytesIO(data))
      for cell, value in case['inputs'].items():
        sheet, _, where = cell.partition('!')
        book[sheet][where].value = value
      paths.append(os.path.join(place, f'case{number}.xlsx'))
      book.save(paths[-1])
    for engine in engines:
      try:
        reason = _differs(engine, paths, cases, required)
      except engines_lib.EngineFailed as error:
        failed.append(error)
      else:
        (wrong if reason else right).append(f'{reason or "right"} ({engine})')
  if wrong and right:
    raise Undecided(f'the engines disagree: {"; ".join(wrong + right)}')
  if wrong:
    raise Wrong('; '.join(wrong))
  if failed:
    raise failed[0]


def _differs(engine, paths, cases, required):
  """What is wrong by an engine; '' if all values are right."""
  import engines as engines_lib

  try:
    results = getattr(engines_lib, engine)(paths, required)
  except engines_lib.EngineFailed:
    raise
  except Exception as error:  # an engine that the workbook breaks
    return f'it cannot be calculated: {type(error).__name__}: {error}'[:300]
  for number, (found, case) in enumerate(zip(results, cases, strict=True)):
    for cell in required:
      if not engines_lib.same(found[cell], case['values'][cell]):
        when = 'after inputs changed' if number else 'with the given inputs'
        return f'{cell} is wrong {when}'
  return ''


def judge(data, spec):
  """Returns (reward, reason) for the bytes of a workbook, None if absent.

  Raises:
    Undecided, engines.EngineFailed: there is no verdict.
  """
  import engines

  if data is None:
    return 0, f'no {BOOK}'
  try:
    book = load(data)
    check_original(book, spec['original'])
    check_formulas(book, spec['required'], set(spec['functions']))
    check_shown(data, book, spec['required'], spec['cases'][0]['values'])
    check_cases(data, spec['cases'], spec['required'], spec['engines'])
  except Wrong as error:
    return 0, str(error)
  except (engines.EngineFailed, Undecided):
    raise
  except Exception as error:  # what the workbook breaks
    return 0, f'the workbook cannot be calculated: {type(error).__name__}: {error}'[
      :300
    ]
  return 1, ''


def main():
  sys.path[:0] = [os.environ.get('M2JAX_SITE') or sysconfig.get_path('purelib'), TESTS]
  with open(os.path.join(TESTS, 'cases.json'), encoding='utf-8') as file:
    spec = json.load(file)
  import engines
  import formulas  # noqa: F401  What fails from here on counts against the workbook.

  missing = [e for e in spec['engines'] if e not in engines.available()]
  logs = os.environ.get('M2JAX_LOGS', '/logs/verifier')
  if missing:
    reward, reason, invalid = (
      0,
      '',
      f'no engine {missing}: apt-get install libreoffice-calc-nogui',
    )
  else:
    print('m2jax: ready', flush=True)
    tree, data = os.environ.get('M2JAX_TREE', '/workspace'), None
    path = os.path.join(tree, BOOK)
    if os.path.isfile(path) and not os.path.islink(path):
      with open(path, 'rb') as file:
        data = file.read((2 << 20) + 1)
    try:
      (reward, reason), invalid = judge(data, spec), ''
    except (engines.EngineFailed, Undecided) as error:
      reward, reason, invalid = 0, '', str(error)
  details = {'reason': reason, 'invalid': invalid, 'engines': spec['engines']}
  with open(os.path.join(logs, 'details.json'), 'w', encoding='utf-8') as file:
    json.dump(details, file)
  if not invalid:
    with open(os.path.join(logs, 'reward.txt'), 'w', encoding='utf-8') as file:
      file.write(str(reward))


if __name__ == '__main__':
  main()
