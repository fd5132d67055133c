"""A calculator with buttons; drawn: its precedence, rounding and further keys."""

from __future__ import annotations

import random
from fractions import Fraction

from m2jax_pipelines.appdev import app
from m2jax_pipelines.appdev.app import Criterion, click, text

_TITLES = (
  'Calculator',
  'Shop calculator',
  'Desk adder',
  'Till',
  'Number pad',
  'Reckoner',
)
_ERRORS = ('Error', 'Cannot divide by zero', 'Undefined')


def draw(rng: random.Random) -> app.App:
  """A calculator."""
  config = {
    'precedence': rng.random() < 0.5,
    'decimals': rng.randint(2, 6),
    'error': rng.choice(_ERRORS),
    'clearing': rng.choice(('C', 'AC', 'Clear')),
    'deleting': rng.choice(('', 'Del', '⌫')),
    **dict.fromkeys(('zero', 'rounded', 'clear', 'point', 'back'), True),
  }
  mutants = {'precedence': 'order', 'zero': 'zero', 'rounded': 'rounding'}
  mutants |= {'clear': 'clear', 'point': 'point'}
  mutants |= {'back': 'delete'} if config['deleting'] else {}
  return app.App(
    kind='calculator',
    title=rng.choice(_TITLES),
    about='a calculator that is used with its buttons.',
    rules=_rules(config),
    criteria=_criteria(config, rng),
    view=_press('12.5'),
    config={**config, 'error': config['error']},
    mutants=mutants,
  )


def _rules(config):
  order = (
    '× and ÷ are computed before + and −'
    if config['precedence']
    else 'operations are computed from left to right, without precedence'
  )
  rules = [
    'Buttons "0" to "9", ".", "+", "−" (U+2212), "×", "÷", "=" and '
    f'"{config["clearing"]}".',
    'An element with data-testid="display" shows "0" at first, then the number that is '
    'being entered, without leading zeros except in "0.5", and after "=" the result.',
    f'A calculation may have several operations; {order}.',
    f'A result is rounded to at most {config["decimals"]} decimals, without trailing '
    'zeros; a result below 0 begins with "-". A digit after "=" begins a new '
    'calculation.',
    f'A division by zero shows "{config["error"]}".',
    'A second point in a number is ignored.',
    f'"{config["clearing"]}" forgets everything and shows "0".',
  ]
  if config['deleting']:
    rules.append(
      f'A button "{config["deleting"]}" removes the last character of the number '
      f'that is '
      'being entered; when none is left, "0" is shown.'
    )
  return rules


def _press(keys):
  return [click(key) for key in keys]


def evaluate(numbers, operators, precedence) -> Fraction:
  """The value of numbers with operators between them."""
  found, signs = [Fraction(numbers[0])], []
  for sign, number in zip(operators, numbers[1:], strict=True):
    n = Fraction(number)
    if sign in '×÷' and (precedence or not signs):
      found[-1] = found[-1] * n if sign == '×' else found[-1] / n
    elif precedence:
      found.append(n)
      signs.append(sign)
    else:
      found[-1] = found[-1] + n if sign == '+' else found[-1] - n
  for sign, n in zip(signs, found[1:], strict=True):
    found[0] += n if sign == '+' else -n
  return found[0]


def shown(value: Fraction, decimals: int) -> str:
  """A result as the display shows it."""
  said = f'{float(value):.{decimals}f}'
  return said.rstrip('0').rstrip('.') if '.' in said else said


def _calculation(config, rng, signs, decimal=False):
  """Steps and result of a calculation that differs without precedence."""
  while True:
    numbers = [str(rng.randint(12, 99)) for _ in range(len(signs) + 1)]
    if decimal:
      numbers[0] += f'.{rng.randint(1, 9)}{rng.randint(1, 9)}'
    value = evaluate(numbers, signs, config['precedence'])
    scaled = value * 10 ** config['decimals'] % 1
    if abs(scaled - Fraction(1, 2)) > Fraction(1, 100) and abs(value) >= 1:
      break
  keys = numbers[0]
  for sign, number in zip(signs, numbers[1:], strict=True):
    keys += sign + number
  wanted = shown(value, config['decimals'])
  return [*_press(keys + '='), text('display', wanted)]


def _criteria(config, rng):
  n = [str(rng.randint(12, 98)) for _ in range(6)]
  clearing = [
    *_press(n[0] + '+' + n[1]),
    click(config['clearing']),
    text('display', '0'),
  ]
  clearing += [*_press(n[2] + '='), text('display', n[2])]
  value = Fraction(0)
  while value.denominator == 1:  # of others the quotient is rounded
    third = f'{rng.randint(2, 9)}1÷{rng.choice("37")}='
    value = Fraction(int(third[:2]), int(third[3]))
  point = [*_press(f'{n[3]}.5.7'), text('display', f'{n[3]}.57')]
  found = [
    Criterion('plus', 'sum', _calculation(config, rng, '+', decimal=True)),
    Criterion('minus', 'a result below 0', _minus(rng)),
    Criterion(
      'order',
      'the order of operations',
      _calculation(config, rng, rng.choice('+−') + '×'),
    ),
    Criterion(
      'rounding',
      'a quotient is rounded',
      [*_press(third), text('display', shown(value, config['decimals']))],
    ),
    Criterion(
      'zero',
      'a division by zero',
      [*_press(f'{n[4]}÷0='), text('display', config['error'])],
    ),
    Criterion('clear', 'everything is forgotten', clearing),
    Criterion('point', 'a second point is ignored', point),
  ]
  if config['deleting']:
    steps = [*_press(n[5]), click(config['deleting']), text('display', n[5][0])]
    steps += [click(config['deleting']), text('display', '0')]
    found.append(Criterion('delete', 'the last character is removed', steps))
  return found


def _minus(rng):
  low, high = rng.randint(11, 40), rng.randint(50, 99)
  return [*_press(f'{low}−{high}='), text('display', str(low - high))]
