"""Workbooks of generators: conditional sums, price lists, annuities, cash flows.

Each draws a `Model`. The draws of its inputs meet, more often than by chance, values at
which wrong formulas differ: equal to a threshold, in the first or last row.
"""

from __future__ import annotations

import random

from m2jax_pipelines.spreadsheets.model import Cells, Model, Wanted, table

_REGIONS = ('North', 'South', 'East', 'West', 'Central')
_PRODUCTS = ('Lamp', 'Desk', 'Chair', 'Shelf', 'Clock', 'Frame', 'Stool')


def _sales(r: random.Random, lines, regions, products) -> Cells:
  """Rows of sales, at least one of each name that is asked about, and a threshold."""
  found = {}
  for letter, (names, asked) in (('A', regions), ('B', products)):
    found |= {f'Sales!{letter}{i}': r.choice(names) for i in lines}
    found[f'Sales!{letter}{r.choice(lines)}'] = asked
  found |= {f'Sales!C{i}': r.randint(1, 60) for i in lines}
  found |= {f'Sales!D{i}': r.randint(5, 90) for i in lines}
  of_a_row = found[f'Sales!C{r.choice(lines)}']
  return {**found, 'Answer!B1': r.choice((r.randint(10, 40), of_a_row))}


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
  lines = range(2, last + 1)

  def draw(r: random.Random) -> Cells:
    return _sales(r, lines, (regions, region), (products, product))

  def column(letter):
    return f'Sales!${letter}$2:${letter}${last}'

  a, b, c, d = map(column, 'ABCD')
  wanted = {
    'Answer!B3': Wanted(
      f'the units sold in {region}',
      f'=SUMIFS({c},{a},"{region}")',
      (f'=SUMIFS({d},{a},"{region}")', f'=SUM({c})'),
    ),
    'Answer!B4': Wanted(
      f'the revenue (units times price) of {product}',
      f'=SUMPRODUCT(({b}="{product}")*{c}*{d})',
      (f'=SUMIFS({c},{b},"{product}")', f'=SUMPRODUCT({c},{d})'),
    ),
    'Answer!B5': Wanted(
      f'the average price of the rows of {product}',
      f'=AVERAGEIFS({d},{b},"{product}")',
      (f'=AVERAGE({d})',),
    ),
    'Answer!B6': Wanted(
      'the number of rows with more units than the threshold in B1',
      f'=COUNTIF({c},">"&B1)',
      (f'=COUNTIF({d},">"&B1)',),
    ),
  }

  def oracle(x):
    have = [[x[f'Sales!{k}{i}'] for k in 'ABCD'] for i in lines]
    prices = [r[3] for r in have if r[1] == product]
    return {
      'Answer!B3': sum(r[2] for r in have if r[0] == region),
      'Answer!B4': sum(r[2] * r[3] for r in have if r[1] == product),
      'Answer!B5': sum(prices) / len(prices),
      'Answer!B6': sum(r[2] > x['Answer!B1'] for r in have),
    }

  changing = 'regions, products, units and prices of rows, and the threshold'
  inputs = [f'Sales!{k}{i}' for k in 'ABCD' for i in lines] + ['Answer!B1']
  return Model('ledger', 'ledger', cells, changing, inputs, draw, wanted, oracle)


def orders(rng: random.Random) -> Model:
  """Amounts of orders by a price list, with a discount."""
  names = rng.sample(_PRODUCTS, rng.randint(4, 6))
  prices = [(name, rng.randint(5, 300)) for name in names]
  lines = [(rng.choice(names), rng.randint(1, 40)) for _ in range(rng.randint(4, 9))]
  low, last = rng.randint(10, 20), len(names) + 1
  cells = table('Prices', [('Product', 'Price'), *prices])
  cells |= table('Orders', [('Product', 'Quantity'), *lines])
  cells |= table('Answer', [('Discount', 0.1), ('From quantity', low)])
  places = range(2, len(lines) + 2)

  def draw(r: random.Random) -> Cells:
    kind, low = r.choice(('any', 'first', 'last', 'low')), r.randint(5, 35)
    one = {'first': names[:1], 'last': names[-1:]}.get(kind, names)
    found = {f'Orders!A{i}': r.choice(one) for i in places}
    found |= {f'Prices!B{i}': r.randint(5, 300) for i in range(2, last + 1)}
    found |= {
      f'Orders!B{i}': low if kind == 'low' else r.randint(1, 40) for i in places
    }
    return found | {'Answer!B1': r.randint(1, 30) / 100, 'Answer!B2': low}

  wanted = {}
  for i in places:
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
    for i in places:
      quantity = x[f'Orders!B{i}']
      factor = 1 - x['Answer!B1'] if quantity >= x['Answer!B2'] else 1
      values[f'Answer!B{i + 3}'] = price[x[f'Orders!A{i}']] * quantity * factor
    return {**values, f'Answer!B{end + 1}': sum(values.values())}

  changing = (
    'prices, products and quantities of orders, the discount and its quantity; the '
    'products of Prices stay'
  )
  inputs = [f'Orders!A{i}' for i in places] + ['Answer!B2']
  inputs += [f'Prices!B{i}' for i in range(2, last + 1)]
  inputs += [f'Orders!B{i}' for i in places] + ['Answer!B1']
  return Model('orders', 'orders', cells, changing, inputs, draw, wanted, oracle)


def loan(rng: random.Random) -> Model:
  """An annuity: payment, interest, and what is owed after some payments."""

  def draw(r: random.Random) -> Cells:
    return {
      'Loan!B1': r.randint(10, 400) * 1000,
      'Loan!B2': r.randint(10, 90) / 1000,
      'Loan!B3': r.randint(5, 30),
      'Loan!B4': r.randint(6, 48),
    }

  names = ('Principal', 'Rate per year', 'Years', 'Payments made')
  cells = table('Loan', [*zip(names, draw(rng).values(), strict=True)])
  cells |= table('Answer', [('Result', 'Value')])
  wanted = {
    'Answer!B2': Wanted(
      'the monthly payment, positive, paid at the end of each month, at a twelfth of '
      'the yearly rate',
      '=-PMT(Loan!B2/12,Loan!B3*12,Loan!B1)',
      (
        '=-PMT(Loan!B2/12,Loan!B3*12,Loan!B1,0,1)',
        '=-PMT(Loan!B2,Loan!B3,Loan!B1)/12',
        '=-PMT(Loan!B2/12,Loan!B3,Loan!B1)',
      ),
    ),
    'Answer!B3': Wanted(
      'the interest that is paid over the whole time',
      '=B2*Loan!B3*12-Loan!B1',
      ('=Loan!B1*Loan!B2*Loan!B3', '=B2*Loan!B4-Loan!B1'),
    ),
    'Answer!B4': Wanted(
      'the debt that is left after the payments made',
      '=-FV(Loan!B2/12,Loan!B4,-B2,Loan!B1)',
      ('=Loan!B1-B2*Loan!B4', '=B2*(Loan!B3*12-Loan!B4)'),
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

  changing, inputs = 'all numbers of Loan', [f'Loan!B{i}' for i in range(1, 5)]
  return Model('loan', 'loan', cells, changing, inputs, draw, wanted, oracle)


def project(rng: random.Random) -> Model:
  """Net present value and internal rate of return of yearly cash flows."""
  years = rng.randint(4, 8)
  last = years + 2

  def draw(r: random.Random) -> Cells:
    """The net present value is as often below 0 as above, and not near 0."""
    rate, flows = (
      r.randint(2, 15) / 100,
      [r.randint(20, 90) * 100 for _ in range(years)],
    )
    worth = sum(a / (1 + rate) ** k for k, a in enumerate(flows, 1))
    share = r.choice((r.uniform(0.75, 0.97), r.uniform(1.03, 1.25)))
    amounts = [-round(worth * share / 100) * 100, *flows]
    found = {f'Flows!B{i}': amount for i, amount in enumerate(amounts, 2)}
    return {**found, 'Answer!B1': rate}

  given = draw(rng)
  cells = table('Flows', [('Year', 'Cash flow'), *((i,) for i in range(years + 1))])
  cells |= table('Answer', [('Rate',)]) | given
  wanted = {
    'Answer!B3': Wanted(
      'the net present value at the rate in B1, with year 0 not discounted',
      f'=Flows!B2+NPV(B1,Flows!B3:B{last})',
      (f'=NPV(B1,Flows!B2:B{last})', f'=SUM(Flows!B2:B{last})'),
    ),
    'Answer!B4': Wanted('the internal rate of return', f'=IRR(Flows!B2:B{last})'),
    'Answer!B5': Wanted(
      'the text "accept" if the net present value is above 0, or else "reject"',
      '=IF(B3>0,"accept","reject")',
      (
        '=IF(B1>0,"accept","reject")',
        '=IF(B4>0,"accept","reject")',
        f'=IF(SUM(Flows!B2:B{last})>0,"accept","reject")',
      ),
      equal=('=IF(B3>=0,"accept","reject")',),  # no case has a value of exactly 0
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

  changing = 'all cash flows and the rate'
  inputs = [f'Flows!B{i}' for i in range(2, last + 1)] + ['Answer!B1']
  return Model('project', 'project', cells, changing, inputs, draw, wanted, oracle)


GENERATORS = (ledger, orders, loan, project)
