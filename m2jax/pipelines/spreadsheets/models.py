"""Workbooks and what must be calculated in them, with an oracle in plain Python.

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
  """A required cell: what it must hold, in words, and a formula that does."""

  text: str
  formula: str


@dataclasses.dataclass(frozen=True)
class Model:
  """Attributes:
  family, source: class, and what the numbers are from.
  cells: given cells.
  inputs: cells that may change → a function that draws another value.
  wanted: by cell.
  oracle: cells → value of each wanted cell.
  """

  family: str
  source: str
  cells: Cells
  inputs: Mapping[str, Callable[[random.Random], Any]]
  wanted: Mapping[str, Wanted]
  oracle: Callable[[Cells], Mapping[str, Any]]

  def case(self, rng: random.Random | None) -> dict[str, Any]:
    """Changed inputs and the resulting values; without `rng` none is changed."""
    changed = {c: draw(rng) for c, draw in self.inputs.items()} if rng else {}
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


_REGIONS = ('North', 'South', 'East', 'West', 'Central')
_PRODUCTS = ('Lamp', 'Desk', 'Chair', 'Shelf', 'Clock', 'Frame', 'Stool')


def ledger(rng: random.Random) -> Model:
  """Sums, averages and counts by condition over a list of sales."""
  regions, products = rng.sample(_REGIONS, 3), rng.sample(_PRODUCTS, 3)
  n = rng.randint(12, 30)
  rows = [
    (rng.choice(regions), rng.choice(products), rng.randint(1, 60), rng.randint(5, 90))
    for _ in range(n)
  ]
  rows[:3] = [(r, p, 10, 20) for r, p in zip(regions, products, strict=True)]
  last, (region, product) = n + 1, (rng.choice(regions), rng.choice(products))
  threshold = rng.randint(10, 40)
  cells = table('Sales', [('Region', 'Product', 'Units', 'Price'), *rows])
  cells |= table('Answer', [('Threshold', threshold)])
  inputs = {f'Sales!C{i}': lambda r: r.randint(1, 60) for i in range(2, last + 1)}
  inputs |= {f'Sales!D{i}': lambda r: r.randint(5, 90) for i in range(2, last + 1)}
  inputs['Answer!B1'] = lambda r: r.randint(10, 40)

  def column(letter):
    return f'Sales!${letter}$2:${letter}${last}'

  a, b, c, d = map(column, 'ABCD')
  wanted = {
    'Answer!B3': Wanted(f'the units sold in {region}', f'=SUMIFS({c},{a},"{region}")'),
    'Answer!B4': Wanted(
      f'the revenue (units times price) of {product}',
      f'=SUMPRODUCT(({b}="{product}")*{c}*{d})',
    ),
    'Answer!B5': Wanted(
      f'the average price of the rows of {product}',
      f'=AVERAGEIFS({d},{b},"{product}")',
    ),
    'Answer!B6': Wanted(
      'the number of rows with more units than the threshold in B1',
      f'=COUNTIF({c},">"&B1)',
    ),
  }

  def oracle(x):
    have = [[x[f'Sales!{k}{i}'] for k in 'ABCD'] for i in range(2, last + 1)]
    prices = [r[3] for r in have if r[1] == product]
    return {
      'Answer!B3': sum(r[2] for r in have if r[0] == region),
      'Answer!B4': sum(r[2] * r[3] for r in have if r[1] == product),
      'Answer!B5': sum(prices) / len(prices),
      'Answer!B6': sum(r[2] > x['Answer!B1'] for r in have),
    }

  return Model('ledger', 'ledger', cells, inputs, wanted, oracle)


def orders(rng: random.Random) -> Model:
  """Amounts of orders by a price list, with a discount."""
  names = rng.sample(_PRODUCTS, rng.randint(4, 6))
  prices = [(name, rng.randint(5, 300)) for name in names]
  lines = [(rng.choice(names), rng.randint(1, 40)) for _ in range(rng.randint(4, 9))]
  low, last = rng.randint(10, 20), len(names) + 1
  cells = table('Prices', [('Product', 'Price'), *prices])
  cells |= table('Orders', [('Product', 'Quantity'), *lines])
  cells |= table('Answer', [('Discount', 0.1), ('From quantity', low)])
  inputs = {f'Prices!B{i}': lambda r: r.randint(5, 300) for i in range(2, last + 1)}
  inputs |= {
    f'Orders!B{i}': lambda r: r.randint(1, 40) for i in range(2, len(lines) + 2)
  }
  inputs['Answer!B1'] = lambda r: r.randint(1, 30) / 100
  wanted = {}
  for i in range(2, len(lines) + 2):
    price = f'INDEX(Prices!$B$2:$B${last},MATCH(Orders!A{i},Prices!$A$2:$A${last},0))'
    wanted[f'Answer!B{i + 3}'] = Wanted(
      f'the amount of the order in row {i} of Orders: quantity times price of its '
      'product, less the discount in B1 if its quantity is at least that in B2',
      f'={price}*Orders!B{i}*IF(Orders!B{i}>=$B$2,1-$B$1,1)',
    )
  end = len(lines) + 4
  wanted[f'Answer!B{end + 1}'] = Wanted('the sum of these', f'=SUM(B5:B{end})')

  def oracle(x):
    price = {x[f'Prices!A{i}']: x[f'Prices!B{i}'] for i in range(2, last + 1)}
    values = {}
    for i in range(2, len(lines) + 2):
      quantity = x[f'Orders!B{i}']
      factor = 1 - x['Answer!B1'] if quantity >= x['Answer!B2'] else 1
      values[f'Answer!B{i + 3}'] = price[x[f'Orders!A{i}']] * quantity * factor
    return {**values, f'Answer!B{end + 1}': sum(values.values())}

  return Model('orders', 'orders', cells, inputs, wanted, oracle)


def loan(rng: random.Random) -> Model:
  """An annuity: payment, interest, and what is owed after some payments."""
  rows = [
    ('Principal', rng.randint(10, 400) * 1000),
    ('Rate per year', rng.randint(10, 90) / 1000),
    ('Years', rng.randint(5, 30)),
    ('Payments made', rng.randint(6, 48)),
  ]
  cells = table('Loan', [*rows])
  cells |= table('Answer', [('Result', 'Value')])
  inputs = {
    'Loan!B1': lambda r: r.randint(10, 400) * 1000,
    'Loan!B2': lambda r: r.randint(10, 90) / 1000,
    'Loan!B3': lambda r: r.randint(5, 30),
    'Loan!B4': lambda r: r.randint(6, 48),
  }
  wanted = {
    'Answer!B2': Wanted(
      'the monthly payment, positive, paid at the end of each month, at a twelfth of '
      'the yearly rate',
      '=-PMT(Loan!B2/12,Loan!B3*12,Loan!B1)',
    ),
    'Answer!B3': Wanted(
      'the interest that is paid over the whole time', '=B2*Loan!B3*12-Loan!B1'
    ),
    'Answer!B4': Wanted(
      'the debt that is left after the payments made',
      '=-FV(Loan!B2/12,Loan!B4,-B2,Loan!B1)',
    ),
  }

  def oracle(x):
    debt, rate = x['Loan!B1'], x['Loan!B2'] / 12
    months = int(x['Loan!B3'] * 12)
    payment = debt / sum((1 + rate) ** -k for k in range(1, months + 1))
    left = debt
    for _ in range(int(x['Loan!B4'])):
      left = left * (1 + rate) - payment
    return {
      'Answer!B2': payment,
      'Answer!B3': payment * months - debt,
      'Answer!B4': left,
    }

  return Model('loan', 'loan', cells, inputs, wanted, oracle)


def project(rng: random.Random) -> Model:
  """Net present value and internal rate of return of yearly cash flows."""
  years = rng.randint(4, 8)
  flows = [rng.randint(20, 90) * 100 for _ in range(years)]
  rows = [('Year', 'Cash flow'), (0, -rng.randint(80, 150) * 100), *enumerate(flows, 1)]
  cells = table('Flows', rows) | table('Answer', [('Rate', 0.07)])
  last = years + 2
  inputs = {
    f'Flows!B{i}': lambda r: r.randint(20, 90) * 100 for i in range(3, last + 1)
  }
  inputs['Flows!B2'] = lambda r: -r.randint(80, 150) * 100
  inputs['Answer!B1'] = lambda r: r.randint(2, 15) / 100
  wanted = {
    'Answer!B3': Wanted(
      'the net present value at the rate in B1, with year 0 not discounted',
      f'=Flows!B2+NPV(B1,Flows!B3:B{last})',
    ),
    'Answer!B4': Wanted('the internal rate of return', f'=IRR(Flows!B2:B{last})'),
    'Answer!B5': Wanted(
      'the text "accept" if the net present value is above 0, or else "reject"',
      '=IF(B3>0,"accept","reject")',
    ),
  }

  def oracle(x):
    amounts = [x[f'Flows!B{i}'] for i in range(2, last + 1)]

    def value(rate):
      return sum(a / (1 + rate) ** k for k, a in enumerate(amounts))

    low, high = -0.9, 10.0
    for _ in range(200):
      middle = (low + high) / 2
      low, high = (middle, high) if value(middle) > 0 else (low, middle)
    npv = value(x['Answer!B1'])
    return {
      'Answer!B3': npv,
      'Answer!B4': low,
      'Answer!B5': 'accept' if npv > 0 else 'reject',
    }

  return Model('project', 'project', cells, inputs, wanted, oracle)


GENERATORS = (ledger, orders, loan, project)
