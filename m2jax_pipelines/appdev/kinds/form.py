"""A form with validation: messages at the fields, and a summary."""

from __future__ import annotations

import random

from m2jax_pipelines.appdev import app
from m2jax_pipelines.appdev.app import Criterion, click, fill, label, text
from m2jax_pipelines.appdev.kinds import words

# Title; labels of name, code, amount, consent; button; summary.
_DOMAINS = (
  ('Boat hire', 'Skipper', 'Licence', 'Days', 'I know the rules', 'Book')
  + ('{name} has {code} for {amount} days',),
  ('Seed order', 'Customer', 'Article', 'Packets', 'I accept the terms', 'Order')
  + ('Ordered: {amount} of {code} for {name}',),
  ('Course sign-up', 'Student', 'Course', 'Seats', 'I have paid', 'Sign up')
  + ('{name}, {code}, {amount} seats',),
  ('Parcel desk', 'Sender', 'Parcel', 'Grams', 'Nothing in it is fragile', 'Send')
  + ('Parcel {code} of {amount} g from {name}',),
  ('Studio booking', 'Band', 'Studio', 'Hours', 'We bring our own cables', 'Reserve')
  + ('{name}: studio {code}, {amount} h',),
)
# Pattern; in words; how to draw one; how to break one.
_CODES = (
  (
    '[A-Z]{2}-[0-9]{3}',
    'two capital letters A to Z, a hyphen and three digits',
    'AA-999',
  ),
  ('[0-9]{4}[A-Z]', 'four digits and a capital letter A to Z', '9999A'),
  ('[A-Z]{3}[0-9]{2}', 'three capital letters A to Z and two digits', 'AAA99'),
)


def draw(rng: random.Random) -> app.App:
  """A form of one domain."""
  title, name, code, amount, agree, submit, summary = rng.choice(_DOMAINS)
  pattern, said, shape = rng.choice(_CODES)
  low = rng.randint(1, 5)
  config = {
    'labels': {'name': name, 'code': code, 'amount': amount, 'agree': agree},
    'pattern': pattern,
    'shortest': rng.randint(2, 4),
    'low': low,
    'high': low + rng.randint(10, 90),
    'submit': submit,
    'summary': summary,
    'empties': rng.random() < 0.5,
    **dict.fromkeys(('whole', 'range', 'name', 'agree'), True),
  }
  config['messages'] = _messages(config, rng)
  mutants = {'whole': 'code', 'range': 'amount', 'name': 'name', 'agree': 'agree'}
  mutants |= {'empties': 'summary'}
  return app.App(
    kind='form',
    title=title,
    about='a form that checks what is entered.',
    rules=_rules(config, said),
    criteria=_criteria(config, shape, rng),
    view=[click(submit)],
    config=config,
    mutants=mutants,
  )


def _messages(config, rng):
  c, names = config, config['labels']
  return {
    'name': rng.choice((f'{names["name"]} is too short', 'Too short')),
    'code': rng.choice((f'{names["code"]} is not valid', 'Wrong format')),
    'amount': f'{names["amount"]}: {c["low"]} to {c["high"]}',
    'agree': rng.choice(('Please confirm', 'Required')),
  }


def _rules(c, said):
  names, messages = c['labels'], c['messages']
  field = 'A text field with the label'
  return [
    f'{field} "{names["name"]}": at least {c["shortest"]} characters, without '
    f'spaces at '
    'both ends.',
    f'{field} "{names["code"]}": exactly {said}, nothing before or after.',
    f'{field} "{names["amount"]}": a whole number from {c["low"]} to {c["high"]}.',
    f'A checkbox with the label "{names["agree"]}", which must be ticked.',
    f'A button "{c["submit"]}" checks all of them. For each that is wrong, an '
    f'element says '
    'what is wrong; it is empty otherwise, also after it was corrected and the '
    'button was '
    'clicked again: '
    + ', '.join(f'data-testid="error-{k}" "{m}"' for k, m in messages.items())
    + ' (in the order of the fields above).',
    'If nothing is wrong, an element with data-testid="summary" says '
    f'"{c["summary"]}" with the values (name without spaces at both ends); '
    f'otherwise it is '
    'empty. '
    + (
      'The three text fields are then emptied.'
      if c['empties']
      else 'The fields keep their values.'
    ),
  ]


def _code(shape, rng):
  """A code of a shape of letters A and digits 9."""
  letters, digits = 'BCDFGHJKLMNP', '12345678'
  drawn = {'A': letters, '9': digits}
  return ''.join(rng.choice(drawn[s]) if s in drawn else s for s in shape)


def _criteria(c, shape, rng):
  names, messages = c['labels'], c['messages']

  def fine(**changes):
    values = {
      'name': words.names(rng, 1)[0],
      'code': _code(shape, rng),
      'amount': str(rng.randint(c['low'], c['high'])),
      **changes,
    }
    steps = [fill(names[key], value) for key, value in values.items()]
    said = c['summary']
    for key, value in values.items():
      said = said.replace(f'{{{key}}}', value)
    return [*steps, ['check', label(names['agree']), True]], said

  def wrong(key, value):
    steps, said = fine()
    other = next(k for k in ('name', 'code') if k != key)
    broken = [*steps, fill(names[key], value), click(c['submit'])]
    broken += [text(f'error-{key}', messages[key]), text(f'error-{other}', '')]
    return [*broken, text('summary', '')]

  def mended(key, bad, good):
    steps, said = fine(**{key: good})
    again = [fill(names[key], good), click(c['submit']), text(f'error-{key}', '')]
    return [*steps, fill(names[key], bad), click(c['submit']), *again], said

  steps, said = fine(amount=str(c['high']))
  first = [*steps, click(c['submit']), text('summary', said)]
  left = '' if c['empties'] else str(c['high'])
  summary = [*first, ['value', label(names['amount']), left]]
  code = _code(shape, rng)
  extra = rng.choice((f'{code}{rng.randint(0, 9)}', f'x{code}', f'{code} {code}'))
  repaired, repaired_said = mended('code', code[:-1], code)
  none = [click(c['submit'])]
  none += [text(f'error-{key}', message) for key, message in messages.items()]
  low, _ = fine(amount=str(c['low']))
  above, below = wrong('amount', str(c['high'] + 1)), wrong('amount', str(c['low'] - 1))
  unticked = [*low, ['check', label(names['agree']), False], click(c['submit'])]
  return [
    Criterion('summary', 'a valid form is summed up', summary),
    Criterion('empty', 'an empty form has four messages', none),
    Criterion('name', 'a short name', wrong('name', 'x' * (c['shortest'] - 1) + '  ')),
    Criterion('code', 'a code with more than the format', wrong('code', extra)),
    Criterion('amount', 'numbers beyond the range', [*above, *below]),
    Criterion(
      'agree', 'the checkbox', [*unticked, text('error-agree', messages['agree'])]
    ),
    Criterion(
      'mended',
      'messages go when it is right',
      [*repaired, text('summary', repaired_said)],
    ),
  ]
