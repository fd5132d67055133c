"""Models on real data: stock prices of the package `vega_datasets`."""

from __future__ import annotations

import csv
import importlib.metadata
import random
from typing import Any

from m2jax_pipelines import installed
from m2jax_pipelines.spreadsheets import mutants
from m2jax_pipelines.spreadsheets.model import Cells, Model, Wanted, table

_PACKAGE = 'vega_datasets'


def drawers():
  """Functions that draw models on the data of installed packages."""
  try:
    importlib.metadata.distribution(_PACKAGE)
  except importlib.metadata.PackageNotFoundError:
    return []
  return [stocks]


def provenance(source: str) -> dict[str, Any]:
  """Name, version, hash and licence of a model's source."""
  if source != _PACKAGE:
    return {
      'name': source,
      'generator': 'm2jax_pipelines',
      'license': 'Apache-2.0',
    }
  found = installed.distribution(_PACKAGE)
  path = found.locate_file(f'{_PACKAGE}/_data/stocks.csv')
  return installed.Source(
    _PACKAGE, found.version, installed.digest(path), installed.license_of(found)
  ).facts()


def stocks(rng: random.Random) -> Model:
  """Averages, extremes and returns of monthly prices."""
  path = installed.distribution(_PACKAGE).locate_file(f'{_PACKAGE}/_data/stocks.csv')
  with open(path, encoding='utf-8') as file:
    rows = [(r['symbol'], r['date'], float(r['price'])) for r in csv.DictReader(file)]
  symbols = rng.sample(sorted({r[0] for r in rows}), 3)
  chosen = []
  for symbol in symbols:
    own = [r for r in rows if r[0] == symbol]
    start = rng.randrange(len(own) - 14)
    chosen += own[start : start + rng.randint(8, 14)]
  last, symbol = len(chosen) + 1, rng.choice(symbols)
  mine = [i for i, row in enumerate(chosen, 2) if row[0] == symbol]
  a, c = f'Prices!$A$2:$A${last}', f'Prices!$C$2:$C${last}'
  cells = table('Prices', [('Symbol', 'Month', 'Price'), *chosen])
  cells |= table('Answer', [('Result', 'Value')])

  def draw(r: random.Random) -> Cells:
    found = {f'Prices!C{i}': r.randint(100, 9000) / 10 for i in range(2, last + 1)}
    best = r.choice((2, last, r.randint(2, last)))
    return {**found, f'Prices!C{best}': r.randint(9001, 9999) / 10}

  average = f'=AVERAGEIFS({c},{a},"{symbol}")'
  cuts = zip(mutants.shorter(average), (2, last), strict=True)
  equal = tuple(formula for formula, row in cuts if row not in mine)
  wanted = {
    'Answer!B2': Wanted(
      f'the average price of {symbol}', average, (f'=AVERAGE({c})',), equal
    ),
    'Answer!B3': Wanted(
      f'the return of {symbol} from its first row to its last, as a fraction',
      f'=Prices!C{mine[-1]}/Prices!C{mine[0]}-1',
      (f'=1-Prices!C{mine[0]}/Prices!C{mine[-1]}',),
    ),
    'Answer!B4': Wanted(
      'the symbol of the row with the highest price of all',
      f'=INDEX({a},MATCH(MAX({c}),{c},0))',
    ),
  }

  def oracle(x):
    prices = [x[f'Prices!C{i}'] for i in mine]
    best = max(range(2, last + 1), key=lambda i: (x[f'Prices!C{i}'], -i))
    return {
      'Answer!B2': sum(prices) / len(prices),
      'Answer!B3': prices[-1] / prices[0] - 1,
      'Answer!B4': x[f'Prices!A{best}'],
    }

  inputs = [f'Prices!C{i}' for i in range(2, last + 1)]
  return Model('stocks', _PACKAGE, cells, 'all prices', inputs, draw, wanted, oracle)
