"""Rules that read failing trajectories: what M2.7's agent does in a round, no model.

A round analyses, plans, modifies and keeps notes (docs/facts/m2-and-forge.md §9; small
changes that answer a weakness are Self-Harness's, arXiv 2606.09498):

  1. Each weakness (`evolve.weaknesses`) has a test of a trajectory. Its weight is its
     share of the lost score, divided by one plus the number of remedies that failed.
  2. The remedy of the heaviest weakness is proposed. A number takes one step; if an
     earlier step looked better but was not kept, the next one in its direction; if it
     looked worse, the opposite one.
  3. Every other round, two to four changes that were tried are combined: those with the
     highest draws from the distributions of what they are worth (Thompson sampling).
     Little evidence falsifies nothing, and several small effects pass a gate that
     none passes alone.
  4. With no remedy left, a step of one field, from the parent or from the best
     attempt, first in fields that looked better.

An atom is one value of one field; of the field 'system', whose sentences add up, it is
a line. What an atom is worth is estimated from all attempts by linear regression, one
attempt at a time: what the atoms of an attempt do not explain of its effect is divided
evenly among them, less the fewer its pairs. An atom that was tried is proposed again
only together with others.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from m2jax.evolve import gate, operators, proposers, scaffold, weaknesses
from m2jax.evolve.proposers import Attempt, Proposal, ProposerFailed, View
from m2jax.evolve.scaffold import Scaffold
from m2jax.evolve.weaknesses import WEAKNESSES, Step

Atom = tuple[str, str]  # a field, and its value as JSON
Values = Mapping[str, Any]
_PRIOR_PAIRS = 64  # an effect of this number of pairs counts by half
_DEVIATION = 0.35  # of a draw after one pair: half of that of a pair's difference
_UNTRIED = 0.005  # what a field is assumed to be worth before it is tried
_RUNGS = 6  # steps from one end of a range to the other
_LINES = 10  # of each part of the memory
_OPERATORS = {operator.field: operator for operator in operators.OPERATORS}

# Fields without effect unless one of others is set.
_RULES = 'loops.identical', 'loops.errors', 'loops.alternating'
_POLICY = ('context.policy',)
_NEEDS: Mapping[str, tuple[str, ...]] = {
  'loops.reaction': _RULES,
  'loops.message': _RULES,
  'loops.temperature': _RULES,
  'retry.temperature': ('retry.malformed', 'retry.length'),
  'context.threshold': _POLICY,
  'context.keep_turns': _POLICY,
  'context.keep_first': _POLICY,
  'context.notes_tokens': _POLICY,
}


@dataclasses.dataclass(frozen=True)
class Config(proposers.ProposerConfig):
  """No settings."""

  kind: str = 'analyst'


@dataclasses.dataclass(frozen=True)
class Analyst:
  """See the module."""

  config: Config

  def propose(self, view: View) -> Proposal:
    """See `Proposer.propose`."""
    known = Known.of(view)
    tried = list(known.tried.values())
    for chosen, note in _ideas(view, known):
      changes = applied(view.parent.values, chosen)
      proposed = view.parent.changed(changes)
      new = changes and proposed.values not in tried and not known.gone & {*chosen}
      idle = [f for f, of in _NEEDS.items() if f in changes and not _any(proposed, of)]
      if new and not idle and not scaffold.problems(proposed.values, view.bounds):
        notes = _memory(view, known), _criticism(view.attempts)
        return Proposal(changes, note, *notes)
    raise ProposerFailed('no change is left untried')


make = Analyst


def atoms(values: Values) -> set[Atom]:
  """The atoms of values."""
  found = {(f, _json(v)) for f, v in values.items() if f != 'system'}
  lines = (values.get('system') or '').splitlines()
  return found | {('system', _json(line)) for line in lines if line.strip()}


def applied(values: Values, chosen: Sequence[Atom]) -> dict[str, Any]:
  """What atoms change in values."""
  changes: dict[str, Any] = {}
  for field, text in chosen:
    value, current = json.loads(text), changes.get(field, values[field])
    if field == 'system' and current:
      has = value is None or value in current.splitlines()
      value = current if has else f'{current}\n{value}'
    if _json(value) != _json(values[field]):
      changes[field] = value
  return changes


@dataclasses.dataclass(frozen=True)
class Known:
  """What the attempts and trajectories of a view say.

  Attributes:
    weights: name of a weakness that occurs -> its weight.
    tried: round -> values, of rejected attempts too.
    worth: atom that was tried -> its estimated effect.
    pairs: atom -> pairs that it was measured on.
    best: atoms of the best attempt that was not kept.
    gone: atoms that ancestors of the parent had: to add one again is a cycle.
  """

  weights: Mapping[str, float]
  tried: Mapping[int, Values]
  worth: Mapping[Atom, float]
  pairs: Mapping[Atom, int]
  best: Sequence[Atom]
  gone: frozenset[Atom]

  @classmethod
  def of(cls, view: View) -> Known:
    """What a view says."""
    tried: dict[int, Values] = {}
    worth: collections.defaultdict[Atom, float] = collections.defaultdict(float)
    pairs: collections.Counter[Atom] = collections.Counter()
    better: list[list[Atom]] = []
    incumbent: Values = {}
    for a in view.attempts:
      before = {} if a.parent is None else tried[a.parent]
      tried[a.round] = {**before, **a.changes} if a.values is None else a.values
      own = sorted(_added(tried[a.round], incumbent)) if incumbent else []
      effect, n = a.effect or 0.0, a.pairs
      if a.reason.startswith('effort'):
        effect = min(effect, 0.0)  # it is better by effort, which is never kept
      if not incumbent or a.decision == gate.KEEP:
        incumbent = tried[a.round]
      elif effect > 0:
        better.append(own)
      left = effect - sum(worth[atom] for atom in own)
      for atom in own:
        pairs[atom] += n
        worth[atom] += left / len(own) * n / (pairs[atom] + _PRIOR_PAIRS)
    parents, gone = {a.round: a.parent for a in view.attempts}, set()
    node = parents[view.parent_round]
    while node is not None:
      gone |= _added(tried[node], view.parent.values)
      node = parents[node]
    has = atoms(view.parent.values)
    better = [[x for x in own if x not in has] for own in better if not gone & {*own}]
    best = max(better, key=lambda own: sum(worth[x] for x in own), default=[])
    found = weaknesses.weighed(view.failures)
    return cls(found, tried, dict(worth), pairs, best, frozenset(gone))


def _added(values: Values, before: Values) -> set[Atom]:
  """Atoms of values that others do not have."""
  other = {f: v for f, v in values.items() if v != before[f]}
  return atoms(other) - atoms({'system': before['system']})


def _ideas(view: View, known: Known) -> Iterator[tuple[list[Atom], str]]:
  """Changes as atoms, with their notes, in the order in which they are considered."""
  rng = random.Random(view.seed)
  if view.round % 2 == 0:
    yield from _combined(view, known, rng)
  yield from _remedies(view, known)
  for base in ([], known.best)[:: rng.choice((1, -1))]:
    for atom in _steps(view, base, known, rng):
      yield [*base, atom], f'a step{" from the best attempt" * bool(base)}: {atom[0]}'
  yield from _combined(view, known, rng)


def _remedies(view: View, known: Known) -> Iterator[tuple[list[Atom], str]]:
  """The remedies that are left, by weight."""
  ranked = []
  for weakness in WEAKNESSES:
    failed = 0
    for field, remedy in weakness.remedies if weakness.name in known.weights else ():
      if isinstance(remedy, Step):
        atom = _walk(view, field, remedy.value, known.worth)
      else:
        atom = field, _json(remedy)
      if atom is None or atom in known.worth:
        failed += 1
      elif applied(view.parent.values, [atom]):
        ranked.append((known.weights[weakness.name] / (1 + failed), weakness, atom))
  for _, weakness, atom in sorted(ranked, key=lambda one: -one[0]):
    yield [atom], f'{weakness.name}: {atom[0]}'


def _combined(
  view: View, known: Known, rng: random.Random
) -> Iterator[tuple[list[Atom], str]]:
  """Changes that were tried, together, by draws of what they are worth."""
  measured = [x for x in sorted(known.worth) if known.pairs[x] and x not in known.gone]
  open_ = [x for x in measured if applied(view.parent.values, [x])]
  for _ in range(20):
    deviations = [_DEVIATION / (known.pairs[x] + _PRIOR_PAIRS) ** 0.5 for x in open_]
    drawn = [
      rng.gauss(known.worth[x], d) for x, d in zip(open_, deviations, strict=True)
    ]
    chosen: list[Atom] = []
    most = rng.randint(2, 4)
    for draw, atom in sorted(zip(drawn, open_, strict=True), reverse=True):
      taken = {field for field, _ in chosen} - {'system'}
      if draw > 0 and atom[0] not in taken and len(chosen) < most:
        chosen.append(atom)
    if len(chosen) > 1:
      yield chosen, f'combined: {", ".join(field for field, _ in chosen)}'


def _walk(
  view: View, field: str, direction: int, worth: Mapping[Atom, float]
) -> Atom | None:
  """The next number that was not tried: on while it looks better, else back."""
  current = view.parent.values[field]
  for sign in (direction, -direction):
    ahead = [r for r in rungs(field, view.bounds) if (r - current) * sign > 0]
    for value in sorted(ahead, key=lambda r: abs(r - current)):
      atom = field, _json(value)
      if atom not in worth:
        return atom
      if worth[atom] == 0:
        return None
      if worth[atom] < 0:
        break
  return None


def rungs(field: str, bounds: Mapping[str, scaffold.Bound]) -> list[float]:
  """The numbers that steps of a field are between; none of a field that has others."""
  operator = _OPERATORS[field]
  if isinstance(operator, operators.Options):
    values = operators.allowed(operator, bounds)
    return sorted(values) if all(type(v) in (int, float) for v in values) else []
  low, high = operators.limits(operator, bounds)
  if operator.whole and low > 0:
    return sorted(
      {round(low * (high / low) ** (i / _RUNGS)) for i in range(_RUNGS + 1)}
    )
  return [round(low + (high - low) * i / _RUNGS, 4) for i in range(_RUNGS + 1)]


def _steps(
  view: View, base: Sequence[Atom], known: Known, rng: random.Random
) -> list[Atom]:
  """Untried steps of one field, first of fields whose other values looked better."""
  worth, taken = known.worth, {field for field, _ in base} - {'system'}
  near, far = [], []
  for operator in operators.OPERATORS:
    field = operator.field
    if field in taken:
      continue
    if numbers := rungs(field, view.bounds):
      near += [_walk(view, field, sign, worth) for sign in (1, -1)]
      far += [(field, _json(value)) for value in numbers]
    elif isinstance(operator, operators.Options):
      near += [(field, _json(v)) for v in operators.allowed(operator, view.bounds)]
  rng.shuffle(near)
  best = {field: worth[field, v] for field, v in sorted(worth, key=worth.__getitem__)}
  near.sort(key=lambda x: -best.get(x[0], _UNTRIED) if x else 0)
  return [x for x in (*near, *far) if x and x not in worth]


def _memory(view: View, known: Known) -> str:
  """What is known: made anew from all attempts, at most a page."""
  worth = known.worth
  kept = [a for a in view.attempts if a.decision == gate.KEEP]
  ranked = sorted(worth, key=lambda atom: -worth[atom])
  has = atoms(view.parent.values) | known.gone
  shown = [f'{_shown(atom)}: {worth[atom]:+.3f}' for atom in ranked if atom not in has]
  above = sum(worth[atom] > 0 for atom in ranked if atom not in has)
  parts = {
    f'Kept of {len(view.attempts) - 1}': [
      f'round {a.round}, {a.effect or 0:+.3f}: {a.note}' for a in kept[-_LINES:]
    ],
    'Weaknesses, by share': [
      f'{name}: {share:.2f}' for name, share in known.weights.items()
    ],
    'Looked better, not kept (estimated effect)': shown[:above],
    'Did not help': shown[above:][::-1],
  }
  return '\n'.join(
    '\n'.join((f'## {title}', *(f'- {line}' for line in lines[:_LINES])))
    for title, lines in parts.items()
    if lines
  )


def _criticism(attempts: Sequence[Attempt]) -> str:
  """What the last rounds got wrong."""
  wrong = []
  for attempt in attempts[1:][-3:]:
    effect = f'{attempt.effect:+.3f}' if attempt.effect is not None else 'not evaluated'
    if attempt.decision != gate.KEEP:
      why = attempt.reason.partition(':')[0]
      wrong.append(f'- round {attempt.round}, {attempt.note}: {effect}, {why}')
  return '\n'.join(wrong)


def _shown(atom: Atom) -> str:
  return f'{atom[0]} = {atom[1] if len(atom[1]) <= 60 else atom[1][:57] + "…"}'


def _any(proposed: Scaffold, fields: Sequence[str]) -> bool:
  return any(proposed.values[field] for field in fields)


def _json(value: Any) -> str:
  """A value's key: 1.0 is 1."""
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  return json.dumps(value, sort_keys=True)
