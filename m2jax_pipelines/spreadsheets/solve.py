"""Writes the formulas of plan.json into book.xlsx."""

import json
import os

import openpyxl

here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, 'plan.json'), encoding='utf-8') as file:
  plan = json.load(file)
book = openpyxl.load_workbook('book.xlsx')
for place, formula in plan.items():
  sheet, _, cell = place.partition('!')
  book[sheet][cell] = formula
book.save('book.xlsx')
