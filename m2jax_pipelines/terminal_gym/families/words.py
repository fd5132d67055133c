"""Realistic names and contents of files, drawn by a seed."""

from __future__ import annotations

import random

NOUNS = (
  'anchor basin cable delta ember field garden harbor island jacket kettle ladder '
  'meadow needle orchard pocket quarry ribbon saddle timber valley window yarn zenith '
  'bridge candle drawer engine ferry glacier hammer lantern mirror parcel signal tower'
).split()
FOLDERS = (
  'archive assets backup billing catalog clients exports field incoming inventory '
  'media orders projects records reports-old samples shipments staging survey '
  'uploads'
).split()
PEOPLE = (
  'Amara Bjorn Chen Dalia Emeka Farah Goran Hana Ivan Jorge Kavya Leila Mateo Nadia '
  'Oskar Priya Quinn Rosa Sven Tariq Ulla Vera Wanja Ximena Yusuf Zora'
).split()
TOWNS = (
  'Aarhus Bergen Cusco Durban Essen Fukuoka Galway Hobart Izmir Jena Kigali Leeds '
  'Malmo Nantes Odense Porto Quito Riga Split Turku Utrecht Varna Wuhan York'
).split()


def token(rng: random.Random, parts: int = 2) -> str:
  """A name such as 'cable-garden'."""
  return '-'.join(rng.sample(NOUNS, parts))


def folder(rng: random.Random) -> str:
  """A folder such as 'orders/2019-lantern'."""
  return f'{rng.choice(FOLDERS)}/{rng.randint(2012, 2026)}-{rng.choice(NOUNS)}'


def paths(rng: random.Random, root: str, count: int, suffixes) -> list[str]:
  """Distinct file paths below a folder; some have spaces, some are in subfolders."""
  inner = ['', *(f'{n}/' for n in rng.sample(NOUNS, 3))]
  inner.append(f'{inner[1]}{rng.choice(NOUNS)}/')
  found: dict[str, None] = {}
  while len(found) < count:
    joint = rng.choice('-_ ')
    name = f'{rng.choice(NOUNS)}{joint}{rng.randint(1, 99)}{rng.choice(suffixes)}'
    found[f'{root}/{rng.choice(inner)}{name}'] = None
  return list(found)


def prose(rng: random.Random, words: int) -> str:
  """Lines of words."""
  chosen = [rng.choice(NOUNS) for _ in range(words)]
  rows = [' '.join(chosen[i : i + 9]) for i in range(0, words, 9)]
  return '\n'.join(rows) + '\n'


def date(rng: random.Random, first: int = 2019, last: int = 2025) -> str:
  """An ISO date; days up to 28."""
  return f'{rng.randint(first, last)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}'
