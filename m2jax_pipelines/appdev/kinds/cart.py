"""A shopping cart with discount, coupon and tax; the verifier has other products."""

from __future__ import annotations

import json
import random

from m2jax_pipelines.appdev import app
from m2jax_pipelines.appdev.app import Criterion, click, fill, role, text
from m2jax_pipelines.appdev.kinds import words

_TITLES = (
  'Tea shop',
  'Bike parts',
  'Paper goods',
  'Garden centre',
  'Toy shop',
  'Bakery',
)
_MORE = (('More', 'Less'), ('Add', 'Take'), ('Plus', 'Minus'))


def draw(rng: random.Random) -> app.App:
  """A cart."""
  more, less = rng.choice(_MORE)
  config = {
    **{'more': more, 'less': less},
    'sign': rng.choice(('$', '€', '£')),
    'from': rng.randint(20, 60) * 100,
    'percent': rng.choice((5, 8, 10, 15)),
    'tax': rng.choice((0, 7, 19, 21)),
    'coupons': rng.random() < 0.6,
    'coupon': rng.choice((10, 20, 25)),
    'code': rng.choice(('SPRING', 'HELLO', 'TENOFF', 'FRIEND'))
    + str(rng.randint(10, 99)),
    **dict.fromkeys(('discounted', 'taxed', 'bounded', 'strict'), True),
  }
  mutants = {'discounted': 'discount', 'bounded': 'zero'}
  mutants |= {'taxed': 'sum'} if config['tax'] else {}
  mutants |= {'strict': 'unknown'} if config['coupons'] else {}
  return app.App(
    kind='cart',
    title=rng.choice(_TITLES),
    about='a shopping cart that computes what is to be paid.',
    rules=_rules(config),
    criteria=_criteria(config, rng),
    view=[],
    config=config,
    mutants=mutants,
    data={'products.json': json.dumps(_products(rng), indent=1)},
    view_files={'products.json': json.dumps(_products(rng))},
  )


def _products(rng):
  names = words.names(rng, rng.randint(3, 4))
  return [{'name': n, 'cents': rng.randint(150, 1999)} for n in names]


def _money(c, cents):
  return f'{c["sign"]}{cents // 100}.{cents % 100:02}'


def _rules(c):
  rules = [
    'When it opens, the page fetches products.json, a list of objects with "name" and '
    '"cents" (the price, a whole number of cents). The file that is there is an '
    'example: '
    'the app must work with any other products.',
    'Each product is a group (role group) with its name as the accessible name. In '
    'it are '
    f'its name and price, buttons with the accessible names "{c["more"]} NAME" and '
    f'"{c["less"]} NAME", where NAME is its name, and an element with '
    'data-testid="quantity": the number of pieces, at first 0 and never below.',
    'Elements with data-testid="subtotal", data-testid="discount" and '
    'data-testid="total" show amounts such as '
    f'"{_money(c, 1250)}", at first "{_money(c, 0)}". They follow every click.',
    'The subtotal is the sum of price times quantity. The discount is '
    f'{c["percent"]} % of the subtotal if that is {_money(c, c["from"])} or more, '
    f'else 0.',
    'The total is the subtotal less the discount'
    + (f', and on that {c["tax"]} % of tax' if c['tax'] else '')
    + '. Each percentage is rounded to whole cents, half a cent up.',
  ]
  if c['coupons']:
    rules.append(
      f'A text field with the label "Coupon" and a button "Apply". With '
      f'{c["code"]}, in '
      f'capitals or not, {c["coupon"]} % of what is left after the discount are '
      f'added to '
      'the discount, and an element with data-testid="note" says "Coupon applied". For '
      'any other text the note is "Unknown coupon", and there is no coupon.'
    )
  return rules


def _percent(cents, share):
  return (cents * share + 50) // 100


def amounts(c, products, counts, coupon=False) -> tuple[int, int, int]:
  """(subtotal, discount, total) in cents."""
  pairs = zip(products, counts, strict=True)
  subtotal = sum(product['cents'] * count for product, count in pairs)
  off = _percent(subtotal, c['percent']) if subtotal >= c['from'] else 0
  if coupon:
    off += _percent(subtotal - off, c['coupon'])
  left = subtotal - off
  return subtotal, off, left + _percent(left, c['tax'])


def _shown(c, products, counts, coupon=False):
  names = ('subtotal', 'discount', 'total')
  values = amounts(c, products, counts, coupon)
  return [text(n, _money(c, v)) for n, v in zip(names, values, strict=True)]


def _clicks(c, products, counts):
  steps = []
  for product, count in zip(products, counts, strict=True):
    steps += [click(f'{c["more"]} {product["name"]}')] * count
  return steps


def _criteria(c, rng):
  def drawn(large):
    while True:
      products = _products(rng)
      counts = [rng.randint(0, 4) for _ in products]
      subtotal = amounts(c, products, counts)[0]
      if subtotal and (subtotal >= c['from']) == large and sum(counts) < 9:
        return products, counts

  def criterion(own, what, products, steps):
    return Criterion(own, what, steps, {'products.json': json.dumps(products)})

  found = []
  for own, what, large in (
    ('sum', 'a sum without discount', False),
    ('discount', 'a sum with discount', True),
  ):
    products, counts = drawn(large)
    steps = [*_clicks(c, products, counts), *_shown(c, products, counts)]
    found.append(criterion(own, what, products, steps))
  products = _products(rng)
  name = products[1]['name']
  quantity = [text('quantity', '1', within=role('group', name))]
  steps = [click(f'{c["less"]} {name}'), click(f'{c["more"]} {name}')]
  counts = [0, 1] + [0] * (len(products) - 2)
  zero = [*steps, *quantity, *_shown(c, products, counts)]
  found.append(criterion('zero', 'no quantity is below 0', products, zero))
  if c['coupons']:
    products, counts = drawn(True)
    steps = [*_clicks(c, products, counts), fill('Coupon', c['code'].lower())]
    steps += [click('Apply'), text('note', 'Coupon applied')]
    steps += _shown(c, products, counts, coupon=True)
    found.append(criterion('coupon', 'the coupon', products, steps))
    products, counts = drawn(False)
    steps = [*_clicks(c, products, counts), fill('Coupon', f'{c["code"]}9')]
    steps += [click('Apply'), text('note', 'Unknown coupon')]
    steps += _shown(c, products, counts)
    found.append(criterion('unknown', 'an unknown coupon', products, steps))
  return found
