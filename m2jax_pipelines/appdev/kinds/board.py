"""A board with columns between which cards are moved."""

from __future__ import annotations

import random

from m2jax_pipelines.appdev import app
from m2jax_pipelines.appdev.app import Criterion, click, fill, role, text, texts
from m2jax_pipelines.appdev.kinds import words

_DOMAINS = (
  ('Repair shop', ('Waiting', 'On the bench', 'Repaired'), 'Device', 'Take in'),
  ('Hiring board', ('Applied', 'Interview', 'Hired'), 'Applicant', 'Add applicant'),
  ('Kitchen orders', ('Ordered', 'Cooking', 'Served'), 'Dish', 'Order'),
  ('Article desk', ('Idea', 'Writing', 'Published'), 'Article', 'Add idea'),
  ('Sprint board', ('To do', 'Doing', 'Done'), 'Card', 'Add card'),
)
_MOVES = (('Back', 'Forward'), ('Left', 'Right'), ('Return', 'Advance'))


def draw(rng: random.Random) -> app.App:
  """A board of one domain."""
  title, columns, noun, add = rng.choice(_DOMAINS)
  left, right = rng.choice(_MOVES)
  config = {
    **{'columns': columns, 'add': add, 'left': left, 'right': right},
    'label': f'New {noun.lower()}',
    'counted': rng.choice(('{cards} in all', 'Count: {cards}', '{cards}')),
    'limited': rng.random() < 0.7,
    'limit': rng.randint(1, 3),
    'fullness': rng.choice(('is full', 'has no room')),
    'archiving': rng.random() < 0.5,
    **dict.fromkeys(('blank', 'enters', 'counts', 'back', 'archive'), True),
  }
  mutants = {'blank': 'add', 'enters': 'add', 'counts': 'counts', 'back': 'back'}
  mutants |= {'limited': 'limit'} if config['limited'] else {}
  mutants |= {'archive': 'archive'} if config['archiving'] else {}
  return app.App(
    kind='board',
    title=title,
    about=f'a board with the columns {", ".join(columns)}.',
    rules=_rules(config),
    criteria=_criteria(config, rng),
    view=_adding(config, words.phrases(rng, 2)),
    config=config,
    mutants=mutants,
  )


def _rules(c):
  first, second, last = c['columns']
  rules = [
    f'The columns {first}, {second} and {last} are regions (role region) with these '
    'accessible names.',
    f'A text field with the label "{c["label"]}" and a button "{c["add"]}", which '
    f'adds a '
    f'card to the end of {first} and empties the field. Spaces at both ends are cut '
    f'off; '
    'an empty text adds nothing.',
    'Each card shows its text in an element with data-testid="card". Except in '
    f'{first} it has a button with the accessible name "{c["left"]} TEXT", except in '
    f'{last} a button "{c["right"]} TEXT", where TEXT is its text: it moves to the '
    f'end of '
    'the column before or after.',
    'In each region, an element with data-testid="count" says '
    f'"{c["counted"]}", where {{cards}} is the number of its cards.',
  ]
  if c['limited']:
    rules.append(
      f'{second} has room for {c["limit"]} cards. What would go above that stays '
      f'where it '
      f'is, and an element with data-testid="note" says "{second} {c["fullness"]}".'
    )
  if c['archiving']:
    rules.append(f'In {last}, a button "Archive TEXT" removes the card.')
  return rules


def _adding(c, cards):
  steps = []
  for card in cards:
    steps += [fill(c['label'], card), click(c['add'])]
  return steps


def _criteria(c, rng):
  first, second, last = c['columns']

  def cards(column, wanted):
    return texts('card', wanted, within=role('region', column))

  def count(column, number):
    said = c['counted'].replace('{cards}', str(number))
    return text('count', said, within=role('region', column))

  def right(card):
    return click(f'{c["right"]} {card}')

  a, b, d, e = (words.phrases(rng, 4) for _ in range(4))
  found = [
    Criterion(
      'add',
      'cards are added to the first column',
      [
        *_adding(c, [f'  {a[0]} ', '   ', a[1]]),
        cards(first, a[:2]),
        count(first, 2),  # a card without text would not be seen
        cards(second, []),
      ],
    ),
    Criterion(
      'forward',
      'a card moves to the last column',
      [*_adding(c, b[:2]), right(b[0]), cards(second, [b[0]]), right(b[0])]
      + [cards(last, [b[0]]), cards(first, [b[1]]), cards(second, [])],
    ),
    Criterion(
      'back',
      'a card moves back, to the end',
      [*_adding(c, d[:3]), right(d[1]), click(f'{c["left"]} {d[1]}')]
      + [cards(first, [d[0], d[2], d[1]]), cards(second, [])],
    ),
    Criterion(
      'counts',
      'cards are counted',
      [*_adding(c, e), right(e[3]), count(first, 3), count(second, 1), count(last, 0)],
    ),
  ]
  return found + _further(c, rng, cards, right)


def _further(c, rng, cards, right):
  first, second, last = c['columns']
  found = []
  if c['limited']:
    some = words.phrases(rng, c['limit'] + 1)
    steps = [*_adding(c, some), *map(right, some), cards(second, some[:-1])]
    steps += [cards(first, some[-1:]), text('note', f'{second} {c["fullness"]}')]
    found.append(Criterion('limit', f'{second} has a limit', steps))
  if c['archiving']:
    (one,) = words.phrases(rng, 1)
    steps = [*_adding(c, [one]), right(one), right(one), click(f'Archive {one}')]
    found.append(Criterion('archive', 'a card is archived', [*steps, cards(last, [])]))
  return found
