"""Converts amounts between invented or drawn units."""

from __future__ import annotations

import random

from m2jax_pipelines.appdev import app
from m2jax_pipelines.appdev.app import Criterion, click, fill, label, text

_DOMAINS = (
  ('Kitchen converter', 'Amount', ('cup', 'spoon', 'jug', 'pinch', 'bowl')),
  ('Island money', 'Money', ('crown', 'shell', 'pearl', 'florin', 'mark')),
  ('Old lengths', 'Length', ('ell', 'rod', 'span', 'fathom', 'league')),
  ('Farm weights', 'Weight', ('sack', 'stone', 'bushel', 'crate', 'bale')),
  ('Game points', 'Points', ('gem', 'coin', 'star', 'token', 'ruby')),
)
_WRONG = ('Enter a number', 'Not a number', 'Please type a number')


def draw(rng: random.Random) -> app.App:
  """A converter of 3 or 4 units of one domain."""
  title, field, names = rng.choice(_DOMAINS)
  names = rng.sample(names, rng.randint(3, 4))
  units = {name: rng.randint(11, 997) / rng.choice((1, 10, 100)) for name in names}
  config = {
    'label': field,
    'units': units,
    'decimals': rng.randint(1, 4),
    'wrong': rng.choice(_WRONG),
    'positive': rng.random() < 0.5,
    'swapping': rng.random() < 0.6,
    **dict.fromkeys(('checked', 'rounded', 'live', 'swap'), True),
  }
  mutants = {'checked': 'wrong', 'rounded': 'pairs', 'live': 'live'}
  mutants |= {'positive': 'negative'}
  mutants |= {'swap': 'swap'} if config['swapping'] else {}
  return app.App(
    kind='converter',
    title=title,
    about=f'a converter between the units {", ".join(names)}.',
    rules=_rules(config, names),
    criteria=_criteria(config, rng),
    view=[fill(field, '12')],
    config=config,
    mutants=mutants,
  )


def _rules(config, names):
  worth = ', '.join(f'1 {name} = {config["units"][name]:g} grains' for name in names)
  rules = [
    f'The units are worth: {worth}.',
    f'A text field with the label "{config["label"]}", and two selects with the labels '
    f'"From" and "To", each with the options {", ".join(names)} in this order. At '
    f'first '
    f'From is {names[0]} and To is {names[1]}.',
    'An element with data-testid="result" shows the amount in the unit of To, with '
    f'exactly {config["decimals"]} decimals, a space and the name of that unit, '
    f'such as '
    f'"{3:.{config["decimals"]}f} {names[1]}". It follows every change of the field '
    f'and '
    'the selects at once.',
    f'If the field is empty or is not a number, the result is "{config["wrong"]}".',
  ]
  if config['positive']:
    rules.append('The result is the same text for a number below 0.')
  else:
    rules.append('Numbers below 0 are converted like others.')
  if config['swapping']:
    rules.append('A button "Swap" exchanges the units of From and To.')
  return rules


def _amount(config, rng, a, b):
  """(amount, converted) that no order of operations rounds differently."""
  while True:
    amount = rng.randint(101, 99_999) / 100
    value = amount * config['units'][a] / config['units'][b]
    scaled = value * 10 ** config['decimals']
    if abs(scaled % 1 - 0.5) > 1e-3 and 0.01 < value < 1e6:
      return f'{amount:g}', f'{value:.{config["decimals"]}f} {b}'


def _criteria(config, rng):
  field, names = config['label'], list(config['units'])
  steps = []
  for _ in range(3):
    a, b = rng.sample(names, 2)
    amount, wanted = _amount(config, rng, a, b)
    steps += [['select', label('From'), a], ['select', label('To'), b]]
    steps += [fill(field, amount), text('result', wanted)]
  first, second = (_amount(config, rng, *names[:2]) for _ in range(2))
  live = []
  for amount, wanted in (first, second):
    live += [fill(field, amount), text('result', wanted)]
  amount, there = _amount(config, rng, names[2], names[0])
  # Nothing of which a number field keeps a number: it takes no other letters than e.
  word = rng.choice(('abc', 'twelve', 'one', 'ten 2'))
  wrong = [fill(field, amount), fill(field, word), text('result', config['wrong'])]
  wrong += [fill(field, ''), text('result', config['wrong'])]
  below, said = _amount(config, rng, *names[:2])
  negative = config['wrong'] if config['positive'] else f'-{said}'
  found = [
    Criterion('pairs', 'amounts are converted between all units, and rounded', steps),
    Criterion('live', 'the result follows the field', live),
    Criterion('wrong', 'what is not a number is named', wrong),
    Criterion(
      'negative',
      'a number below 0',
      [fill(field, f'-{below}'), text('result', negative)],
    ),
  ]
  if config['swapping']:
    selects = [
      ['select', label('From'), names[0]],
      ['select', label('To'), names[2]],
    ]
    swapping = [*selects, fill(field, amount), click('Swap'), text('result', there)]
    found.append(Criterion('swap', 'Swap exchanges the units', swapping))
  return found
