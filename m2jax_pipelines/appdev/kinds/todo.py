"""A list of entries to add, tick off, filter and remove."""

from __future__ import annotations

import random

from m2jax_pipelines.appdev import app
from m2jax_pipelines.appdev.app import Criterion, click, fill, label, text, texts
from m2jax_pipelines.appdev.kinds import words

_DOMAINS = (
  ('Packing list', 'item', 'Pack'),
  ('Reading list', 'book', 'Add book'),
  ('Groceries', 'product', 'Add'),
  ('Household chores', 'chore', 'Note'),
  ('Open bugs', 'bug', 'Report'),
  ('Guest list', 'guest', 'Invite'),
  ('Garden jobs', 'job', 'Plan'),
  ('Film night', 'film', 'Suggest'),
)
_FILTERS = (('All', 'Open', 'Done'), ('Everything', 'Pending', 'Finished'))
_COUNTS = ('{left} left', '{left} of {all} left', 'Left: {left}')


def draw(rng: random.Random) -> app.App:
  """A list of one domain, with drawn behaviours."""
  title, noun, add = rng.choice(_DOMAINS)
  config = {
    'label': f'New {noun}',
    'add': add,
    'filters': rng.choice(_FILTERS),
    'counted': rng.choice(_COUNTS),
    'clearing': rng.choice(('', 'Clear done', 'Remove finished')),
    'first': rng.random() < 0.5,
    'unique': rng.random() < 0.5,
    'persist': rng.random() < 0.5,
    **dict.fromkeys(('trim', 'blank', 'filter', 'remove', 'count', 'clear'), True),
  }
  mutants = {
    # Not 'trim': spaces at the ends of a text are not seen.
    **{'first': 'order', 'blank': 'blank', 'filter': 'filter'},
    **{'remove': 'remove', 'count': 'count'},
    **({'unique': 'unique'} if config['unique'] else {}),
    **({'persist': 'persist'} if config['persist'] else {}),
    **({'clear': 'clear'} if config['clearing'] else {}),
  }
  return app.App(
    kind='todo',
    title=title,
    about=f'a list where a person adds, ticks off, filters and removes {noun}s.',
    rules=_rules(config, noun),
    criteria=_criteria(config, rng),
    view=_adding(config, words.phrases(rng, 3)),
    config=config,
    mutants=mutants,
  )


def _rules(config, noun):
  every, open_, done = config['filters']
  end = 'above the others' if config['first'] else 'below the others'
  rules = [
    f'A text field with the label "{config["label"]}" and a button "{config["add"]}", '
    f'which adds the {noun} {end} and empties the field. Spaces at both ends are cut '
    'off; an empty text adds nothing.',
    f'Each {noun} shows its text in an element with data-testid="entry", a checkbox '
    'whose accessible name is that text, and a button with the accessible name '
    '"Remove TEXT", where TEXT is the text.',
    f'Buttons "{every}", "{open_}" and "{done}" choose what is listed: all, those '
    f'whose '
    'checkbox is not ticked, and those whose checkbox is ticked.',
    f'An element with data-testid="count" says "{config["counted"]}", where '
    f'{{left}} is the number of {noun}s that are not ticked, of all, listed or not'
    + (', and {all} that of all.' if '{all}' in config['counted'] else '.'),
  ]
  if config['unique']:
    rules.append(
      f'A {noun} that is in the list already, in capitals or not, is not added again.'
    )
  if config['clearing']:
    rules.append(f'A button "{config["clearing"]}" removes those that are ticked.')
  if config['persist']:
    rules.append('The list and the ticks are still there after the page is reloaded.')
  return rules


def _adding(config, entries):
  steps = []
  for entry in entries:
    steps += [fill(config['label'], entry), click(config['add'])]
  return steps


def _tick(entry):
  return ['check', app.role('checkbox', entry), True]


def _criteria(config, rng):
  def drawn(count):
    return words.phrases(rng, count)

  def order(entries):
    return entries[::-1] if config['first'] else list(entries)

  def counted(left, every):
    said = config['counted'].replace('{left}', str(left)).replace('{all}', str(every))
    return text('count', said)

  every, open_, done = config['filters']
  found = []
  a = drawn(3)
  found.append(
    Criterion(
      'order',
      'entries are added in the order asked for, and the field is emptied',
      [
        *_adding(config, a),
        texts('entry', order(a)),
        ['value', label(config['label']), ''],
      ],
    )
  )
  (b,) = drawn(1)
  spaced = [fill(config['label'], f'  {b}   '), click(config['add'])]
  found.append(
    Criterion(
      'trim',
      'spaces at both ends are cut off',
      [*spaced, texts('entry', [b]), ['count', app.button(f'Remove {b}'), 1]],
    )
  )
  c = drawn(1)
  found.append(
    Criterion(
      'blank',
      'an empty text adds nothing',
      [*_adding(config, ['   ', c[0], '']), texts('entry', c), counted(1, 1)],
    )
  )
  d = drawn(4)
  found.append(
    Criterion(
      'count',
      'ticking an entry changes the number that is left',
      [*_adding(config, d), counted(4, 4), _tick(d[1]), counted(3, 4)],
    )
  )
  e = drawn(4)
  ticked, other = [e[0], e[2]], [e[1], e[3]]
  found.append(
    Criterion(
      'filter',
      'filters list all, open and done entries',
      [
        *_adding(config, e),
        *map(_tick, ticked),
        *[click(open_), texts('entry', order(other))],
        *[click(done), texts('entry', order(ticked)), counted(2, 4)],
        *[click(every), texts('entry', order(e))],
      ],
    )
  )
  f = drawn(3)
  kept = [f[0], f[2]]
  removing = [*_adding(config, f), click(f'Remove {f[1]}'), texts('entry', order(kept))]
  found.append(Criterion('remove', 'an entry is removed', [*removing, counted(2, 2)]))
  return found + _further(config, drawn, order, counted)


def _further(config, drawn, order, counted):
  found = []
  if config['unique']:
    a = drawn(2)
    again = [*_adding(config, [*a, a[0].upper()]), texts('entry', order(a))]
    found.append(Criterion('unique', 'nothing is added twice', again))
  if config['clearing']:
    b = drawn(3)
    kept = [b[1], b[2]]
    clearing = [*_adding(config, b), _tick(b[0]), click(config['clearing'])]
    clearing += [texts('entry', order(kept)), counted(2, 2)]
    found.append(Criterion('clear', 'ticked entries are removed', clearing))
  if config['persist']:
    c = drawn(3)
    steps = [*_adding(config, c), _tick(c[2]), ['reload', None]]
    steps += [texts('entry', order(c)), counted(2, 3)]
    steps.append(['checked', app.role('checkbox', c[2]), True])
    found.append(Criterion('persist', 'a reload keeps list and ticks', steps))
  return found
