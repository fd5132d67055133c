"""A table of data.json to search, filter, sort and sum; the verifier has other data."""

from __future__ import annotations

import json
import random

from m2jax_pipelines.appdev import app
from m2jax_pipelines.appdev.app import Criterion, click, fill, label, text, texts
from m2jax_pipelines.appdev.kinds import words

_DOMAINS = (
  ('Stock room', ('Article', 'Shelf', 'Pieces'), ('North', 'South', 'East', 'West')),
  ('Hiking trails', ('Trail', 'Region', 'Metres'), ('Coast', 'Hills', 'Forest')),
  ('Ship register', ('Ship', 'Harbour', 'Tons'), ('Oslo', 'Genoa', 'Cork', 'Riga')),
  ('Seed bank', ('Plant', 'Family', 'Grams'), ('Grasses', 'Roses', 'Lilies')),
  ('Library loans', ('Title', 'Room', 'Loans'), ('Blue', 'Green', 'Red', 'White')),
)
_SUMMARIES = (
  '{rows} rows, total {sum}',
  'Rows: {rows}. Sum: {sum}.',
  '{sum} in {rows}',
)


def draw(rng: random.Random) -> app.App:
  """A table of one domain."""
  title, columns, groups = rng.choice(_DOMAINS)
  config = {
    'columns': columns,
    'all': rng.choice(('All', 'Any')),
    'summary': rng.choice(_SUMMARIES),
    'down': rng.random() < 0.5,
    **dict.fromkeys(('folded', 'grouped', 'numeric', 'total', 'toggle'), True),
  }
  mutants = {'folded': 'search', 'grouped': 'filter', 'numeric': 'numbers'}
  mutants |= {'total': 'search', 'toggle': 'toggle', 'down': 'numbers'}
  shown = _data(columns, groups, rng)
  return app.App(
    kind='table',
    title=title,
    about='a table of data that can be searched, filtered and sorted.',
    rules=_rules(config),
    criteria=_criteria(config, groups, rng),
    view=[click(f'Sort by {columns[2]}')],
    config=config,
    mutants=mutants,
    data={'data.json': json.dumps(shown, indent=1)},
    view_files={'data.json': json.dumps(_data(columns, groups, rng))},
  )


def _data(columns, groups, rng):
  """Rows with different names and numbers; numbers of 2 to 4 digits."""
  count = rng.randint(7, 9)
  numbers = rng.sample(range(10, 100), 3) + rng.sample(range(100, 3000), count - 3)
  rng.shuffle(numbers)
  chosen = [rng.choice(groups) for _ in range(count - 2)] + list(groups[:2])
  rows = zip(words.names(rng, count), chosen, numbers, strict=True)
  return [dict(zip(columns, row, strict=True)) for row in rows]


def _rules(config):
  first, group, number = config['columns']
  order = 'from the largest' if config['down'] else 'from the smallest'
  return [
    f'When it opens, the page fetches data.json, a list of objects with the keys '
    f'"{first}", "{group}" and "{number}" (a whole number). The file that is there '
    f'is an '
    'example: the app must work with any other rows. Names and numbers are different.',
    f'A table shows a row for each object, at first in the order of the file, with the '
    f'columns {first}, {group}, {number}. The cells of {first} have '
    f'data-testid="name".',
    f'A text field with the label "Search" leaves rows whose {first} contains the '
    f'text, '
    'in capitals or not, at once while one types.',
    f'A select with the label "{group}" has the option "{config["all"]}" and then each '
    f'different {group} of the data in alphabetical order; it leaves the rows of that '
    f'{group}. Both filters hold together.',
    f'Buttons "Sort by {first}" and "Sort by {number}" sort the rows: by {first} in '
    f'alphabetical order, by {number} as numbers, {order}. A second click on the same '
    'button reverses the order.',
    'An element with data-testid="summary" says '
    f'"{config["summary"]}" of the rows that are shown: {{rows}} is their number, '
    f'{{sum}} the sum of their {number}.',
  ]


def _criteria(config, groups, rng):
  first, group, number = config['columns']

  def summary(rows):
    said = config['summary'].replace('{rows}', str(len(rows)))
    return text('summary', said.replace('{sum}', str(sum(r[number] for r in rows))))

  def names(rows):
    return texts('name', [r[first] for r in rows])

  def criterion(own, what, make):
    rows = _data(config['columns'], groups, rng)
    return Criterion(own, what, make(rows), {'data.json': json.dumps(rows)})

  def search(rows):
    row = rng.choice(rows)
    part = row[first][2:6].upper()
    found = [r for r in rows if part.lower() in r[first].lower()]
    return [fill('Search', part), names(found), summary(found)]

  def filtered(rows):
    chosen = rng.choice(rows)[group]
    found = [r for r in rows if r[group] == chosen]
    steps = [['select', label(group), chosen], names(found), summary(found)]
    back = [['select', label(group), config['all']], names(rows)]
    return [*steps, *back]

  def numbers(rows):
    ordered = sorted(rows, key=lambda r: r[number], reverse=config['down'])
    return [click(f'Sort by {number}'), names(ordered)]

  def toggle(rows):
    ordered = sorted(rows, key=lambda r: r[first])
    by = click(f'Sort by {first}')
    return [by, names(ordered), by, names(ordered[::-1])]

  return [
    criterion('rows', 'the rows of data.json', lambda r: [names(r), summary(r)]),
    criterion('search', 'the search leaves matching rows', search),
    criterion('filter', 'the select leaves rows of a group', filtered),
    criterion('numbers', 'numbers are sorted as numbers', numbers),
    criterion('toggle', 'names are sorted, and reversed', toggle),
  ]
