"""The archive: which node is the next parent, and which candidates are not new.

Nodes whose development evaluation was run are stepping stones, kept or not. Rules of
the parent, by name (`METHODS`):

  clade      HGM (github.com/metauto-ai/HGM): a node is worth what its clade is, which
             is the node and all its descendants; drawn by Thompson sampling of
             Beta(1 + successes, 1 + failures) over the attempts of the clade
  dgm        DGM (github.com/jennyzzZt/dgm, `DGM_outer.py`): probability in proportion
             to sigmoid(10 (score − 0.5)) / (1 + children)
  best       the highest score. In DGM this rule sorts ascending and takes the front,
             and a missing comma joins its name with the one before it
  incumbent  the last keep: a single lineage
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
from collections.abc import Collection, Mapping
from typing import NamedTuple

from m2jax.checks import require
from m2jax.evolve.scaffold import Scaffold

METHODS = ('clade', 'dgm', 'best', 'incumbent')


@dataclasses.dataclass(frozen=True)
class ArchiveConfig:
  """How parents are chosen, and what is no new candidate.

  Attributes:
    method: rule of the parent, one of `METHODS`.
    readded_share: a candidate is a cycle if at least this share of the lines that it
      adds were deleted before in its line of descent; above 1 is off.
    allow_duplicates: evaluate candidates that are not new, for A/A rounds.
  """

  method: str = 'clade'
  readded_share: float = 1.0
  allow_duplicates: bool = False

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.method in METHODS, 'method', f'one of {METHODS}')
    check(self.readded_share > 0, 'readded_share', 'positive')


class Stone(NamedTuple):
  """A node with an evaluation.

  Attributes:
    parent: its parent, None of the start.
    total: sum of its scores.
    count: number of them.
  """

  parent: int | None
  total: float
  count: int

  @property
  def score(self) -> float:
    """Mean score."""
    return self.total / max(self.count, 1)


def clades(stones: Mapping[int, Stone]) -> dict[int, Stone]:
  """Each node with the scores of its clade."""
  found = dict(stones)
  for stone in stones.values():
    parent = stone.parent
    while parent is not None:
      of = found[parent]
      found[parent] = Stone(of.parent, of.total + stone.total, of.count + stone.count)
      parent = of.parent
  return found


def weights(stones: Mapping[int, Stone]) -> dict[int, float]:
  """DGM's weight of each node, in proportion to its probability."""
  children = dict.fromkeys(stones, 0)
  for stone in stones.values():
    if stone.parent is not None:
      children[stone.parent] += 1
  return {
    node: 1 / (1 + math.exp(-10 * (stone.score - 0.5))) / (1 + children[node])
    for node, stone in stones.items()
  }


def parent(
  stones: Mapping[int, Stone], incumbent: int, method: str, rng: random.Random
) -> int:
  """The next parent.

  Raises:
    ValueError: an unknown method.
  """
  if method == 'incumbent':
    return incumbent
  if method == 'best':  # the incumbent of equals, then the newest
    return max(stones, key=lambda node: (stones[node].score, node == incumbent, node))
  nodes = sorted(stones)
  if method == 'dgm':
    found = weights(stones)
    return rng.choices(nodes, [found[node] for node in nodes])[0]
  if method == 'clade':
    of = clades(stones)
    drawn = {
      node: rng.betavariate(1 + of[node].total, 1 + of[node].count - of[node].total)
      for node in nodes
    }
    return max(nodes, key=drawn.__getitem__)
  raise ValueError(f'archive.method={method!r}: must be one of {METHODS}')


def lines(scaffold: Scaffold) -> frozenset[str]:
  """The lines of a scaffold that edits add and delete."""
  values = {name: v for name, v in scaffold.values.items() if name != 'rules'}
  found = {f'{name} = {json.dumps(v, sort_keys=True)}' for name, v in values.items()}
  code = (line.strip() for line in scaffold.values['rules'].splitlines())
  return frozenset(found | {f'rules: {line}' for line in code if line})


def deleted(ancestors: list[Scaffold]) -> frozenset[str]:
  """Lines that edits in a line of descent deleted, from the start to its last node."""
  texts = [lines(scaffold) for scaffold in ancestors]
  pairs = zip(texts, texts[1:], strict=False)
  return frozenset().union(*(before - after for before, after in pairs))


def readded(parent: Scaffold, candidate: Scaffold, gone: Collection[str]) -> float:
  """Share of the lines that a candidate adds to its parent that were deleted before."""
  added = lines(candidate) - lines(parent)
  return len([line for line in added if line in gone]) / max(len(added), 1)
