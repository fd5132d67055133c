"""Engines that recalculate workbooks: `formulas`, and LibreOffice if it is installed.

Each takes paths of workbooks and cells ('Sheet!B2') and returns, per workbook, their
values: float, str, bool, or None for an empty cell or an error value.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile

SOFFICE_S, SOFFICE_TRIES = 30, 2  # together below a verifier's time


class EngineFailed(Exception):
  """An engine crashed, ran out of time or wrote nothing: there is no judgement."""


def available():
  """Names of the engines on this machine."""
  return ['formulas', *(['libreoffice'] if shutil.which('soffice') else [])]


def formulas(paths, cells):
  """Recalculates with the Python package `formulas`, after `rewrite`."""
  import formulas as engine
  import openpyxl
  import rewrite

  results = []
  with tempfile.TemporaryDirectory() as directory:
    for path in paths:
      name, book = os.path.basename(path), openpyxl.load_workbook(path)
      if rewrite.workbook(book):
        path = os.path.join(directory, name)
        book.save(path)
      solution = engine.ExcelModel().loads(path).finish().calculate()
      values = {}
      for cell in cells:
        sheet, _, place = cell.partition('!')
        found = solution.get(f"'[{name}]{sheet.upper()}'!{place}")
        value = None if found is None else found.value[0, 0]
        values[cell] = plain(value)
      results.append(values)
  return results


def libreoffice(paths, cells):
  """Recalculates with LibreOffice, which writes copies with values.

  Raises:
    EngineFailed: it failed twice.
  """
  import openpyxl

  with tempfile.TemporaryDirectory() as place:
    for number in range(SOFFICE_TRIES):
      out = os.path.join(place, f'out{number}')
      failure = _soffice(paths, os.path.join(place, f'profile{number}'), out)
      if not failure:
        break
    else:
      raise EngineFailed(f'LibreOffice: {failure}')
    results = []
    for path in paths:
      name = os.path.join(out, os.path.basename(path))
      book = openpyxl.load_workbook(name, data_only=True)
      places = (cell.partition('!') for cell in cells)
      results.append({f'{s}!{c}': plain(book[s][c].value) for s, _, c in places})
    return results


def _soffice(paths, profile, out):
  """Converts workbooks into the directory `out`; returns '' or how that failed."""
  command = ['soffice', f'-env:UserInstallation=file://{profile}', '--headless']
  command += ['--convert-to', 'xlsx:Calc MS Excel 2007 XML', '--outdir', out, *paths]
  # Its own session: soffice is a script whose child would outlive it.
  started = subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    stdin=subprocess.DEVNULL,
    start_new_session=True,
  )
  try:
    said, _ = started.communicate(timeout=SOFFICE_S)
  except subprocess.TimeoutExpired:
    return f'no result after {SOFFICE_S} s'
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(started.pid, signal.SIGKILL)
    started.wait()
  missing = [p for p in paths if not os.path.isfile(f'{out}/{os.path.basename(p)}')]
  if started.returncode or missing:
    tail = ' '.join(said.decode('utf-8', 'replace').split())[-300:]
    return f'exit code {started.returncode}, {len(missing)} of {len(paths)} not: {tail}'
  return ''


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
