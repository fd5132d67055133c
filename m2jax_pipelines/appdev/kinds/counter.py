"""A counter with a step, limits and undo."""

from __future__ import annotations

import random

from m2jax_pipelines.appdev import app
from m2jax_pipelines.appdev.app import Criterion, button, click, fill, text

_DOMAINS = (
  ('Visitor counter', 'visitors', 'Enter', 'Leave'),
  ('Bottle crate', 'bottles', 'Put in', 'Take out'),
  ('Score keeper', 'points', 'Gain', 'Lose'),
  ('Car park', 'cars', 'Arrive', 'Depart'),
  ('Bead string', 'beads', 'String', 'Unstring'),
)
_WRONG = ('The step must be a whole number above 0', 'Invalid step')
_LIMITS = ('Out of range', 'Not possible', 'Limit reached')


def draw(rng: random.Random) -> app.App:
  """A counter of one domain."""
  title, unit, up, down = rng.choice(_DOMAINS)
  low = rng.choice((-50, -10, 0))
  config = {
    **{'unit': unit, 'up': up, 'down': down, 'low': low},
    'high': rng.randint(12, 30) * 10,
    'start': rng.randint(0, 9),
    'wrong': rng.choice(_WRONG),
    'limit': rng.choice(_LIMITS),
    **dict.fromkeys(('checked', 'bounded', 'undo', 'greyed', 'reset'), True),
  }
  mutants = {'checked': 'step', 'bounded': 'high', 'undo': 'undo', 'greyed': 'greyed'}
  return app.App(
    kind='counter',
    title=title,
    about=f'a counter of {unit} with a step, limits and undo.',
    rules=_rules(config),
    criteria=_criteria(config, rng),
    view=[fill('Step', '3'), click(up)],
    config=config,
    mutants=mutants | {'reset': 'reset'},
  )


def _rules(c):
  return [
    f'An element with data-testid="value" shows the count and the unit, at first '
    f'"{c["start"]} {c["unit"]}".',
    f'A text field with the label "Step", at first 1. Buttons "{c["up"]}" and '
    f'"{c["down"]}" add it to the count, or subtract it.',
    f'The count stays between {c["low"]} and {c["high"]}, both included: a click that '
    'would leave them changes nothing, and an element with data-testid="note" says '
    f'"{c["limit"]}". The next change that is possible empties it.',
    'If the step is not a whole number above 0, these buttons change nothing, and the '
    f'note is "{c["wrong"]}".',
    'A button "Undo" takes back the last change that is not taken back yet, and so '
    'on; it '
    'is disabled if there is none.',
    f'A button "Reset" sets the count to {c["start"]} and forgets all changes.',
  ]


def _criteria(c, rng):
  start, high, low = c['start'], c['high'], c['low']

  def count(value):
    return text('value', f'{value} {c["unit"]}')

  a, b, d = rng.randint(3, 19), rng.randint(20, 40), rng.randint(41, 60)
  up, down = click(c['up']), click(c['down'])
  bad = rng.choice(('0', '-4', '2.5', 'x', '1e'))
  top, bottom = high - start, start - low
  return [
    Criterion(
      'change',
      'the step is added and subtracted',
      [fill('Step', str(b)), up, count(start + b), up, count(start + 2 * b)]
      + [fill('Step', str(a)), down, count(start + 2 * b - a)],
    ),
    Criterion(
      'high',
      'the upper limit',
      [fill('Step', str(top + 1)), up, count(start), text('note', c['limit'])]
      + [fill('Step', str(top)), up, count(high), ['text', app.testid('note'), '']],
    ),
    Criterion(
      'low',
      'the lower limit',
      [fill('Step', str(bottom + 1)), down, count(start), text('note', c['limit'])]
      + ([fill('Step', str(bottom)), down, count(low)] if bottom else []),
    ),
    Criterion(
      'step',
      'a step that is no whole number above 0',
      [fill('Step', bad), up, text('note', c['wrong']), count(start)],
    ),
    Criterion(
      'undo',
      'changes are taken back one by one',
      [fill('Step', str(a)), up, fill('Step', str(d)), up, count(start + a + d)]
      + [click('Undo'), count(start + a), click('Undo'), count(start)],
    ),
    Criterion(
      'greyed',
      'Undo is disabled if there is nothing to take back',
      [['enabled', button('Undo'), False], fill('Step', str(a)), up]
      + [['enabled', button('Undo'), True], count(start + a)],
    ),
    Criterion(
      'reset',
      'Reset begins again',
      [fill('Step', str(b)), up, count(start + b), click('Reset'), count(start)]
      + [['enabled', button('Undo'), False]],
    ),
  ]
