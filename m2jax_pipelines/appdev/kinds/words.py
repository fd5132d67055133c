"""Words for what a verifier types: drawn, so that an agent cannot foresee them."""

from __future__ import annotations

import random

_FIRST = 'amber birch cedar copper ivory jade maple olive pearl quartz silver walnut'
_SECOND = 'anchor basket candle drawer engine feather ladder magnet pencil saddle'


def phrases(rng: random.Random, count: int) -> list[str]:
  """Different phrases such as 'amber 417'; none contains another."""
  firsts = rng.sample(_FIRST.split(), count)
  numbers = rng.sample(range(100, 1000), count)
  return [f'{first} {number}' for first, number in zip(firsts, numbers, strict=True)]


def names(rng: random.Random, count: int) -> list[str]:
  """Different single words with capitals, such as 'Cedarladder'."""
  firsts = rng.sample(_FIRST.split(), count)
  return [f.capitalize() + rng.choice(_SECOND.split()) for f in firsts]
