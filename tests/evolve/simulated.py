"""A policy whose success is a formula: milliseconds a lineage."""

from __future__ import annotations

import random

from m2jax.agents.whitebox import WhiteboxConfig
from m2jax.evolve import loop, scaffold
from m2jax.evolve.archive import ArchiveConfig
from m2jax.evolve.budget import BudgetConfig
from m2jax.evolve.evaluator import Result
from m2jax.evolve.gate import GateConfig
from m2jax.evolve.lineage import LoopConfig
from m2jax.evolve.proposers import scripted

START = scaffold.of_agent(WhiteboxConfig(max_tokens=96))
SPLITS = loop.Splits(
  *([f'{name}/{i}' for i in range(20)] for name in ('dev', 'second', 'sealed'))
)
BETTER = {'sampling.temperature': 0.3}
BEST = {'loops.identical': 3}
WORSE = {'sampling.temperature': 2.0}


def success(values) -> float:
  """0.4 of the start; cooler and loop detection help."""
  p = 0.4 + 0.4 * (1 - values['sampling.temperature'])
  return min(max(p + 0.2 * (values['loops.identical'] == 3), 0.0), 1.0)


class Evaluator:
  """Draws each attempt by its spec and seed, the same for every scaffold."""

  def __init__(self):
    self.asked: list[tuple[str, int]] = []

  def run(self, one, specs, seeds):
    found = []
    for spec, seed in zip(specs, seeds, strict=True):
      self.asked.append((spec, seed))
      solved = random.Random(f'{spec} {seed}').random() < success(one.values)
      tokens = one.values['max_tokens']
      found.append(Result(float(solved), tokens=tokens, text='' if solved else 'no'))
    return found


def config(rounds: int, **changes) -> LoopConfig:
  defaults = dict(
    gate=GateConfig(looks=(16, 64, 256), alpha=0.2),
    archive=ArchiveConfig('incumbent'),
    budget=BudgetConfig(rounds=rounds),
  )
  return LoopConfig(**defaults | changes)


def script(*changes) -> scripted.Scripted:
  return scripted.Scripted(scripted.Config(script=changes))


def make(workdir, proposer, rounds=5, evaluator=None, **changes) -> loop.Loop:
  settings = config(rounds, **changes)
  return loop.Loop(workdir, settings, START, SPLITS, evaluator or Evaluator(), proposer)
