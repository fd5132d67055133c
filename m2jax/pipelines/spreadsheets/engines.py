"""Engines that recalculate workbooks: `formulas`, and LibreOffice if it is installed.

Each takes paths of workbooks and cells ('Sheet!B2') and returns, per workbook, their
values: float, str, bool, or None for an empty cell or an error value.
"""

import os
import re
import shutil
import subprocess
import tempfile

SOFFICE_S = 60


def available():
  """Names of the engines on this machine."""
  return ['formulas', *(['libreoffice'] if shutil.which('soffice') else [])]


def formulas(paths, cells):
  """Recalculates with the Python package `formulas`."""
  import formulas as engine

  results = []
  for path in paths:
    solution = engine.ExcelModel().loads(path).finish().calculate()
    book = os.path.basename(path)
    values = {}
    for cell in cells:
      sheet, _, place = cell.partition('!')
      found = solution.get(f"'[{book}]{sheet.upper()}'!{place}")
      value = None if found is None else found.value[0, 0]
      values[cell] = plain(value)
    results.append(values)
  return results


def libreoffice(paths, cells):
  """Recalculates with LibreOffice, which writes copies with values."""
  import openpyxl

  with tempfile.TemporaryDirectory() as place:
    subprocess.run(
      [
        'soffice',
        f'-env:UserInstallation=file://{place}/profile',
        '--headless',
        '--convert-to',
        'xlsx:Calc MS Excel 2007 XML',
        '--outdir',
        f'{place}/out',
        *paths,
      ],
      check=True,
      capture_output=True,
      timeout=SOFFICE_S,
    )
    results = []
    for path in paths:
      name = os.path.join(place, 'out', os.path.basename(path))
      book = openpyxl.load_workbook(name, data_only=True)
      places = (cell.partition('!') for cell in cells)
      results.append({f'{s}!{c}': plain(book[s][c].value) for s, _, c in places})
    return results


def plain(value):
  """A cell's value as float, str, bool or None; error values are None."""
  if isinstance(value, bool) or value is None:
    return value
  if hasattr(value, 'dtype'):
    if value.dtype.kind == 'b':
      return bool(value)
    if value.dtype.kind in 'if':
      return float(value)
  if isinstance(value, int | float):
    return float(value)
  text = str(value)
  return None if re.match(r'#(N/A|[A-Z/0]+[!?]|REF!|NUM!|EMPTY)', text) else text


def same(one, other, tolerance=1e-6):
  """Equality by type: numbers to relative `tolerance`, strings without case."""
  if isinstance(one, bool) or isinstance(other, bool):
    return one is other
  if isinstance(one, float) and isinstance(other, float):
    return abs(one - other) <= tolerance * max(1.0, abs(one), abs(other))
  if isinstance(one, str) and isinstance(other, str):
    return one.casefold() == other.casefold()
  return False
