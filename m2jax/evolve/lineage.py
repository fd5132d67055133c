"""The state of a lineage, a fold over its record, and its decisions as functions of it.

The loop makes a decision here and appends it; `replay` makes it again from the lines
before it and compares. A restart folds the record and continues after the last line.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from m2jax.checks import require
from m2jax.evolve import archive, budget, gate, proposers, scaffold
from m2jax.evolve.archive import ArchiveConfig, Stone
from m2jax.evolve.budget import BudgetConfig, Cost
from m2jax.evolve.evaluator import INVALID
from m2jax.evolve.gate import GateConfig
from m2jax.evolve.record import Line
from m2jax.evolve.scaffold import Scaffold

REJECT = 'reject'
_BAD_ENDS = 'rules', INVALID, 'infrastructure'  # of attempts in the smoke phase


@dataclasses.dataclass(frozen=True)
class LoopConfig:
  """What decides, as the record's first line has it.

  Attributes:
    gate, archive, budget: settings of the parts.
    bounds: narrower ranges of fields of the scaffold: (field, low, high).
    smoke_tasks: attempts of the smoke phase.
    seed: seed of tasks, attempts, parents and proposers.
    paired_seeds: whether candidate and incumbent attempt a task with the same seed.
      Without (for A/A rounds), with the same task only.
  """

  gate: GateConfig = GateConfig()
  archive: ArchiveConfig = ArchiveConfig()
  budget: BudgetConfig = BudgetConfig()
  bounds: Sequence[tuple[str, float, float]] = ()
  smoke_tasks: int = 2
  seed: int = 0
  paired_seeds: bool = True

  def __post_init__(self):
    scaffold.narrowed(self.bounds)
    require(self, self.smoke_tasks >= 1, 'smoke_tasks', 'at least 1')

  @classmethod
  def of(cls, values: Mapping[str, Any]) -> LoopConfig:
    """The settings from JSON."""
    gates = {**values['gate'], 'looks': tuple(values['gate']['looks'])}
    parts = dict(
      gate=GateConfig(**gates),
      archive=ArchiveConfig(**values['archive']),
      budget=BudgetConfig(**values['budget']),
    )
    return cls(**{**values, **parts})


@dataclasses.dataclass
class Node:
  """A scaffold that was evaluated, with its development scores."""

  scaffold: Scaffold
  parent: int | None
  scores: list[float] = dataclasses.field(default_factory=list)
  failures: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)


class Lineage:
  """The fold.

  Attributes:
    config: settings; bounds: the bounds that they give.
    splits: specs by split. tools: what proposers see of the tools.
    nodes: evaluated scaffolds by round, 0 is the start.
    incumbent: the last keep.
    digests: normalised hash → round, of all that were ever evaluated.
    rounds: rounds that have a decision.
    current: the lines of the round in progress, by kind; looks: its looks.
    attempts: what proposers see of the rounds. memory: what they last wrote.
    spent: cost of all lines.
    failures, since_keep: rounds in a row (`BudgetConfig`).
    stopped: the reason, or ''. second: rounds with a second split. sealed: the line.
  """

  def __init__(self):
    self.nodes: dict[int, Node] = {}
    self.incumbent = 0
    self.digests: dict[str, int] = {}
    self.rounds = 0
    self.current: dict[str, Line] = {}
    self.looks: list[Line] = []
    self.attempts: list[proposers.Attempt] = []
    self.memory = ''
    self.spent = Cost()
    self.failures = self.since_keep = 0
    self.stopped = ''
    self.second: set[int] = set()
    self.sealed: Line | None = None

  def apply(self, line: Line) -> None:
    """Adds a line of the record."""
    self.spent += Cost.of(line)
    getattr(self, f'_{line["kind"]}')(line)

  def _begin(self, line: Line) -> None:
    self.config = LoopConfig.of(line['config'])
    self.bounds = scaffold.narrowed(self.config.bounds)
    self.splits, self.tools = line['splits'], line['tools']
    self.levels = gate.levels(self.config.gate, self.config.budget.rounds)
    start = of_files(line['files'])
    self.nodes[0] = Node(start, None)
    self.digests[start.digest] = 0

  def _baseline(self, line: Line) -> None:
    start = self.nodes[0]
    start.scores += [score for *_, score in line['scores'] if score is not None]
    start.failures = line['failures']
    self.attempts.append(
      proposers.Attempt(
        0, None, start.scaffold.values, {}, mean(start.scores), 0.0, 'start', ''
      )
    )

  def _proposal(self, line: Line) -> None:
    self.current['proposal'] = line
    self.memory = line['memory'] or self.memory

  def _checked(self, line: Line) -> None:
    self.current['checked'] = line

  def _smoke(self, line: Line) -> None:
    self.current['smoke'] = line

  def _look(self, line: Line) -> None:
    self.looks.append(line)
    self.nodes[line['incumbent']].scores += [
      i for *_, i, _ in line['pairs'] if i is not None
    ]

  def _decision(self, line: Line) -> None:
    proposal = self.current['proposal']
    evaluated = bool(self.looks)
    if evaluated:
      pairs = [pair for look in self.looks for pair in look['pairs']]
      self.nodes[line['round']] = Node(
        of_files(proposal['files']),
        proposal['parent'],
        [c for *_, c in pairs if c is not None],
        self.looks[0]['failures'],
      )
      self.digests.setdefault(proposal['digest'], line['round'])
    kept = line['decision'] == gate.KEEP
    self.rounds = line['round']
    self.incumbent = line['round'] if kept else self.incumbent
    self.failures = 0 if evaluated else self.failures + 1
    self.since_keep = 0 if kept else self.since_keep + 1
    node = self.nodes.get(line['round'])
    self.attempts.append(
      proposers.Attempt(
        line['round'],
        proposal['parent'],
        node.scaffold.values if node else None,
        proposal['changes'],
        mean(node.scores) if node else None,
        line.get('effect'),
        line['decision'],
        line['reason'],
        proposal['note'],
        line.get('pairs', 0),
      )
    )
    self.current, self.looks = {}, []

  def _second(self, line: Line) -> None:
    self.second.add(line['round'])

  def _stop(self, line: Line) -> None:
    self.stopped = line['reason']

  def _sealed(self, line: Line) -> None:
    self.sealed = line

  # --- Decisions: functions of the lines so far.

  def seed(self, *of: Any) -> int:
    """A seed for one purpose."""
    return random.Random(json.dumps([self.config.seed, *of])).getrandbits(48)

  def parent(self, number: int) -> int:
    """The parent of a round's candidate."""
    stones = {
      k: Stone(node.parent, sum(node.scores), len(node.scores))
      for k, node in self.nodes.items()
    }
    rng = random.Random(self.seed('parent', number))
    return archive.parent(stones, self.incumbent, self.config.archive.method, rng)

  def view(self, number: int, parent: int) -> proposers.View:
    """What the proposer sees in a round."""
    return proposers.View(
      round=number,
      seed=self.seed('proposer', number),
      parent=self.nodes[parent].scaffold,
      parent_round=parent,
      bounds=self.bounds,
      tools=self.tools,
      attempts=tuple(self.attempts),
      failures=tuple(self.nodes[parent].failures),
      memory=self.memory,
    )

  def drawn(self, number: int, count: int, purpose: str) -> list[tuple[str, int]]:
    """Development tasks and seeds of a round: independent draws, so pairs are."""
    rng, specs = random.Random(self.seed(purpose, number)), self.splits['development']
    return [(rng.choice(specs), rng.getrandbits(40)) for _ in range(count)]

  def problems(self, proposal: Line) -> tuple[list[str], float]:
    """Static checks of a proposal; and the share of its lines that are re-added."""
    parent = self.nodes[proposal['parent']].scaffold
    proposed = parent.changed(proposal['changes'])
    if found := scaffold.problems(proposed.values, self.bounds):
      return found, 0.0
    ancestors, node = [parent], self.nodes[proposal['parent']]
    while node.parent is not None:
      node = self.nodes[node.parent]
      ancestors.insert(0, node.scaffold)
    share = archive.readded(parent, proposed, archive.deleted(ancestors))
    config = self.config.archive
    if not config.allow_duplicates and (same := proposed.digest) in self.digests:
      found.append(f'duplicate: the scaffold of round {self.digests[same]}')
    elif share >= config.readded_share:
      found.append(f'cycle: {share:.0%} of the lines it adds were deleted before')
    return found, share

  def decision(self) -> dict[str, Any] | None:
    """The decision that follows from the round's lines; None: the next phase runs."""
    proposal, checked = (self.current.get(k) for k in ('proposal', 'checked'))
    if proposal and proposal['error']:
      return _rejected('proposal', proposal['error'])
    if checked and checked['problems']:
      return _rejected('checked', '; '.join(checked['problems']))
    if smoke := self.current.get('smoke'):
      if bad := [end for end in smoke['ends'] if end in _BAD_ENDS]:
        return _rejected('smoke', f'{len(bad)} attempts ended with {bad[0]!r}')
    if not self.looks:
      return None
    differences = [d for look in self.looks for d in compared(look['pairs'])]
    spent = [
      sum(look[key]['tokens'] for look in self.looks)
      for key in ('cost', 'incumbent_cost')
    ]
    level = float(self.levels[self.rounds])
    cost = spent[0] / spent[1] if spent[1] else 1.0
    look = len(self.looks) - 1
    verdict = gate.decide(differences or [0.0], self.config.gate, level, look, cost)
    if verdict.decision == gate.CONTINUE:
      return None
    return {'phase': 'gate', **verdict.as_dict()}

  def stop(self) -> str:
    """Why no further round begins, or ''."""
    counts = self.rounds, self.spent, self.failures, self.since_keep
    return budget.stop_reason(self.config.budget, *counts)


def compared(pairs: Sequence[Sequence[Any]]) -> list[float]:
  """Differences of pairs (…, incumbent's, candidate's score).

  A pair whose incumbent has no score is left out. A candidate without a score where
  the incumbent has one counts as 0: else it would gain by failures that it causes.
  """
  return [(c or 0.0) - i for *_, i, c in pairs if i is not None]


def of_files(files: Mapping[str, str]) -> Scaffold:
  """The scaffold of a folder's texts, which were checked when they were recorded."""
  nested = json.loads(files[scaffold.JSON])
  del nested['schema']
  return Scaffold(scaffold.flat(nested) | {'rules': files.get(scaffold.RULES, '')})


def mean(values: Sequence[float]) -> float | None:
  """The mean; None of nothing."""
  return sum(values) / len(values) if values else None


def fold(lines: Sequence[Line]) -> Lineage:
  """The state after some lines."""
  found = Lineage()
  for line in lines:
    found.apply(line)
  return found


def replay(lines: Sequence[Line]) -> Iterator[str]:
  """Makes every decision again from the record alone; yields each that differs."""
  state = Lineage()
  for line in lines:
    kind, number = line['kind'], line.get('round', 0)
    wanted: dict[str, Any] = {}
    if kind == 'proposal':
      wanted = {'parent': state.parent(number)}
    elif kind == 'checked':
      wanted['problems'], wanted['readded'] = state.problems(state.current['proposal'])
    elif kind == 'look':
      drawn = look_of(state, number, line['look'])
      wanted = {
        'pairs': [[*one, *p[2:]] for one, p in zip(drawn, line['pairs'], strict=True)]
      }
      wanted['incumbent'] = state.incumbent
    elif kind == 'decision':
      wanted = state.decision() or {'decision': 'none'}
    elif kind == 'stop':
      wanted = {'reason': state.stop()}
    for field, value in wanted.items():
      if line.get(field) != value:
        was = line.get(field)
        yield f'round {number}, {kind}.{field}: recorded {was!r}, now {value!r}'
    state.apply(line)


def look_of(state: Lineage, number: int, look: int) -> list[tuple[str, int]]:
  """Tasks and seeds of a look."""
  looks = (0, *state.config.gate.looks)
  return state.drawn(number, looks[-1], 'pairs')[looks[look] : looks[look + 1]]


def _rejected(phase: str, reason: str) -> dict[str, Any]:
  return {'decision': REJECT, 'phase': phase, 'reason': reason[:600]}
