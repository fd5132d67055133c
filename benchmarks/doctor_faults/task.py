"""Sums of one or two numbers from a tool: tasks that a tiny model learns fast.

A chain of one or two keys out of eleven; each call of `look` gives the key's number
below 5 and the next key, and the answer is the sum of the numbers modulo 5. As
`m2jax_pipelines.tasks.lookup`, whose environment and teacher these tasks have, but a
key has the same number in all tasks, so that two layers learn it by heart in a few
hundred steps. The kind is this module's import path; specs are
KIND/SPLIT/hops_N/SEED/INDEX.
"""

from __future__ import annotations

import dataclasses
import random

from m2jax.checks import require
from m2jax_pipelines.tasks import lookup

KIND = __name__
KEYS = ('ant', 'bee', 'cat', 'dog', 'elk', 'fox', 'gnu', 'hen', 'jay', 'owl', 'pig')


@dataclasses.dataclass(frozen=True)
class Config(lookup.Config):
  """Distribution of the tasks; see `lookup.Config`."""

  kind: str = KIND
  hops: tuple[int, int] = (1, 2)

  def __post_init__(self):
    super().__post_init__()
    require(self, self.hops[1] <= len(KEYS), 'hops', f'at most {len(KEYS)}')


@dataclasses.dataclass(frozen=True)
class TeacherConfig(lookup.TeacherConfig):
  """A teacher without mistakes."""

  kind: str = KIND


families, demonstrate = lookup.families, lookup.demonstrate


def spec(split: str, index: int, seed: int, config: Config, family: str | None) -> str:
  """The spec of the index-th task; see `tasks.spec`."""
  found = lookup.spec(split, index, seed, config, family)
  return KIND + found.removeprefix('lookup')


def make(spec: str) -> lookup.Lookup:
  """The task of a spec. Raises ValueError if it is not one of `spec`."""
  found = lookup.make('lookup' + spec.removeprefix(KIND))
  rng = random.Random(spec)
  keys = rng.sample(KEYS, len(found.chain))
  chain = tuple((key, KEYS.index(key) % lookup.MODULUS) for key in keys)
  return dataclasses.replace(found, spec=spec, chain=chain)
