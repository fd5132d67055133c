"""Workbooks for the tests: solved ones, and edited ones."""

from __future__ import annotations

import io
import json
import random
import zipfile

from m2jax_pipelines import spreadsheets
from m2jax_pipelines.spreadsheets import models

MODEL = models.loan(random.Random(2))
PROJECT = models.project(random.Random(2))


_SPECS: dict = {}  # by the model's identity; it is kept beside


def spec(model, used=('formulas',), salt=1):
  key = id(model), used, salt
  if key not in _SPECS:
    config, rng = spreadsheets.Config(), random.Random(salt)
    made = spreadsheets.spec(config, model, rng, used)
    _SPECS[key] = model, json.dumps(made)
  return json.loads(_SPECS[key][1])


def bytes_of(book) -> bytes:
  if isinstance(book, bytes):
    return book
  file = io.BytesIO()
  book.save(file)
  return file.getvalue()


def solved(model):
  import openpyxl

  book = openpyxl.load_workbook(io.BytesIO(spreadsheets.workbook(model.cells)))
  for place, wanted in model.wanted.items():
    sheet, _, cell = place.partition('!')
    book[sheet][cell] = wanted.formula
  return book


def with_(**cells):
  """The solved loan, with other cells: 'B2' is of Answer, 'Loan_B1' of Loan."""
  book = solved(MODEL)
  for name, value in cells.items():
    sheet, _, cell = name.rpartition('_')
    book[sheet or 'Answer'][cell] = value
  return book


def edited(book=None, *, add=None, change=None) -> bytes:
  """The solved workbook as a zip archive with other parts."""
  source, target = io.BytesIO(bytes_of(book or solved(MODEL))), io.BytesIO()
  with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, 'w', 8) as new:
    for part in old.infolist():
      data = old.read(part)
      if change and part.filename == change[0]:
        data = data.replace(change[1], change[2])
      new.writestr(part.filename, data)
    for name, data in (add or {}).items():
      new.writestr(name, data)
  return target.getvalue()
