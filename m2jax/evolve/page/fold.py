"""The page's data of a lineage: a fold over its record, in bounded memory.

A decided round is one row of `COLUMNS`, which never changes; row 0 is the start. The
texts of a round remain in the file (`detail`), which `Fold.places` finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from m2jax.evolve import record
from m2jax.evolve.page import values
from m2jax.evolve.page.values import BadLine, Scores
from m2jax.observe.printable import one_line

SCHEMA = 1
COLUMNS = (
  ('round', 'parent', 'decision', 'phase', 'note', 'reason', 'source')
  + ('mean', 'n', 'low', 'high')  # development, of the candidate's attempts
  + ('effect', 'effect_low', 'effect_high', 'pairs', 'evidence', 'needed')
  + ('incumbent', 'incumbent_mean', 'tokens', 'seconds', 'episodes')
)
MAX_ROUNDS = 100_000
_LINES = 64  # of a round that its detail reads
_PROBLEMS = 5  # that are listed; others are counted
_NAMES = 32  # scaffolds of the third split
_WHOLE = 'begin', 'stop', 'sealed'  # lines of no round
_DECISIONS = 'keep', 'revert', 'reject'
_PHASES = 'proposal', 'checked', 'smoke', 'gate'
_NUMBERS = 'effect', 'low', 'high', 'pairs', 'evidence', 'needed'  # of the gate
_LIMITS = 'rounds', 'seconds', 'tokens', 'failures', 'patience'


class Place(NamedTuple):
  """Where a line is in the file: offset and length in bytes."""

  offset: int
  length: int


class Fold:
  """The fold.

  Attributes:
    rows: rows of `COLUMNS`, of decided rounds.
    places: round → places of its lines.
    begin: the place of the first line. config: its settings.
    keeps: the rounds that were kept, in order.
    problems: number of lines that were left out.
  """

  def __init__(self):
    self.rows: list[list[Any]] = []
    self.places: dict[int, list[Place]] = {}
    self.begin: Place | None = None
    self.config: Mapping[str, Any] = {}
    self.problems = 0
    self._listed: list[str] = []
    self._proposer = ''
    self._node: dict[int, list[float]] = {0: [0.0, 0]}  # sum and number of scores
    self.keeps: list[int] = []
    self._incumbent = 0
    self._failures = self._since_keep = 0
    self._current: dict[str, Any] = {}
    self._spent = [0.0, 0.0, 0.0]
    self._of_second: dict[int, Scores] = {}
    self._stop_reason, self._third = '', None

  def apply(self, line: Any, place: Place, number: int) -> None:
    """Adds a line; one that is not as it should be counts as a problem."""
    try:
      kind = line.get('kind') if isinstance(line, Mapping) else None
      if kind not in record.KINDS or line.get('schema') != record.SCHEMA:
        raise BadLine(f'no record of schema {record.SCHEMA}')
      if (self.begin is None) != (kind == 'begin'):
        raise BadLine('the first line, and no other, must be `begin`')
      of_round = kind not in _WHOLE
      if of_round:
        self._to_round(values.integer(line.get('round'), 'round'), kind)
      getattr(self, f'_{kind}')(line)
      self.begin = self.begin or place
    except BadLine as error:
      self.problem(number, str(error))
      return
    found = values.cost(line)
    self._spent = [a + b for a, b in zip(self._spent, found, strict=True)]
    if not of_round:
      return
    if kind != 'second':
      spent = self._current.setdefault('spent', [0.0, 0.0, 0.0])
      self._current['spent'] = [a + b for a, b in zip(spent, found, strict=True)]
    known = self.places.setdefault(line['round'], [])
    if len(known) < _LINES:
      known.append(place)
    if kind in ('baseline', 'decision'):
      self._finish()

  def problem(self, number: int, why: str) -> None:
    """Counts a line that is left out."""
    self.problems += 1
    if len(self._listed) < _PROBLEMS:
      self._listed.append(f'line {number}: {one_line(why, 200)}')

  def summary(self) -> dict[str, Any]:
    """What is above the rows, as JSON values."""
    budget = self.config.get('budget')
    budget = budget if isinstance(budget, Mapping) else {}
    current = self._current
    counts: dict[str, int] = {}
    for row in self.rows[1:]:
      decision, phase = row[2], row[3]
      key = phase if decision == 'reject' else decision
      counts[key] = counts.get(key, 0) + 1
    return {
      'schema': SCHEMA,
      'columns': COLUMNS,
      'rounds': max(len(self.rows) - 1, 0),
      'counts': counts,
      'keeps': self.keeps,
      'incumbent': [self._incumbent, *self._scores(self._incumbent)],
      'start': [0, *self._scores(0)],
      'spent': dict(zip(('tokens', 'seconds', 'episodes'), self._spent, strict=True)),
      'limits': {name: values.number(budget.get(name)) or 0 for name in _LIMITS},
      'failures': self._failures,
      'since_keep': self._since_keep,
      'stopped': self._stop_reason,
      'proposer': self._proposer,
      'second': [[k, *found] for k, found in sorted(self._of_second.items())],
      'sealed': self._third,
      'current': [len(self.rows), phase] if (phase := current.get('phase')) else None,
      'problems': self._listed,
      'left_out': self.problems,
    }

  def _scores(self, node: int) -> Scores:
    return values.scores(*self._node.get(node, (0.0, 0)))

  # --- Rounds.

  def _to_round(self, number: int, kind: str) -> None:
    if kind == 'second':
      if number >= len(self.rows):
        raise BadLine('a second split of a round without a decision')
      return
    if number == len(self.rows) + 1:
      self._finish()  # its decision was left out
    if number != len(self.rows):
      raise BadLine(f'round {number} after round {len(self.rows) - 1}')
    if number > MAX_ROUNDS:
      raise BadLine(f'more than {MAX_ROUNDS} rounds')

  def _finish(self) -> None:
    """Makes a row of the current round."""
    now, number = self._current, len(self.rows)
    decision = now.get('decision', {})
    kept = decision.get('decision', '')
    evaluated = now.get('n', 0) > 0 or 'looked' in now
    total, n = now.get('total', 0.0), now.get('n', 0)
    against = self._incumbent
    if number == 0:
      decision, kept = {'decision': 'start'}, 'start'
      total, n = self._node[0]
    elif evaluated:
      self._node[number] = [total, n]
    self.rows.append(
      [number, now.get('parent'), kept, decision.get('phase', '')]
      + [now.get('note', ''), decision.get('reason', ''), now.get('source', '')]
      + list(values.scores(total, n))
      + [decision.get(name) for name in _NUMBERS]
      + [against, self._scores(against).mean, *now.get('spent', [0.0] * 3)]
    )
    if number:
      self._failures = 0 if evaluated else self._failures + 1
      self._since_keep = 0 if kept == 'keep' else self._since_keep + 1
    if kept == 'keep':
      self._incumbent = number
      self.keeps.append(number)
    self._current = {}

  # --- Lines.

  def _begin(self, line: Mapping[str, Any]) -> None:
    config, proposer = line.get('config'), line.get('proposer')
    self.config = config if isinstance(config, Mapping) else {}
    kind = proposer.get('kind') if isinstance(proposer, Mapping) else ''
    self._proposer = one_line(kind, 60)

  def _baseline(self, line: Mapping[str, Any]) -> None:
    self._node[0] = list(values.split(line.get('scores')))

  def _proposal(self, line: Mapping[str, Any]) -> None:
    parent = values.integer(line.get('parent'), 'parent')
    if parent >= len(self.rows):
      raise BadLine('parent: a later round')
    self._current |= {
      'phase': 'propose',
      'parent': parent,
      'note': one_line(line.get('note'), 120),
      'source': one_line(line.get('source'), 60),
    }

  def _checked(self, line: Mapping[str, Any]) -> None:
    self._current['phase'] = 'static checks'

  def _smoke(self, line: Mapping[str, Any]) -> None:
    self._current['phase'] = 'smoke'

  def _look(self, line: Mapping[str, Any]) -> None:
    incumbent = values.integer(line.get('incumbent'), 'incumbent')
    if incumbent >= len(self.rows):
      raise BadLine('incumbent: a later round')
    pairs = values.rows(line.get('pairs'), 4, 'pairs')
    found = [(values.score(i), values.score(c)) for *_, i, c in pairs]
    of = self._node.setdefault(incumbent, [0.0, 0])
    now = self._current
    for before, after in found:
      if before is not None:
        of[0], of[1] = of[0] + before, of[1] + 1
      if after is not None:
        now['total'] = now.get('total', 0.0) + after
        now['n'] = now.get('n', 0) + 1
    now |= {'phase': 'development evaluation', 'looked': True}

  def _decision(self, line: Mapping[str, Any]) -> None:
    if line['round'] == 0 or line.get('decision') not in _DECISIONS:
      raise BadLine(f'decision: must be one of {_DECISIONS}')
    if line.get('phase') not in _PHASES:
      raise BadLine(f'phase: must be one of {_PHASES}')
    self._current['decision'] = {
      'decision': line['decision'],
      'phase': line['phase'],
      'reason': one_line(line.get('reason'), 200),
      **{name: values.number(line.get(name)) for name in _NUMBERS},
    }

  def _second(self, line: Mapping[str, Any]) -> None:
    self._of_second[line['round']] = values.scores(*values.split(line.get('scores')))

  def _stop(self, line: Mapping[str, Any]) -> None:
    self._stop_reason = one_line(line.get('reason'), 200)

  def _sealed(self, line: Mapping[str, Any]) -> None:
    results = line.get('results')
    if not isinstance(results, Mapping) or len(results) > _NAMES:
      raise BadLine(f'results: not an object of at most {_NAMES}')
    self._third = {
      'means': [
        [one_line(name, 60), *values.scores(*values.split(found))]
        for name, found in results.items()
      ],
      **{name: values.number(line.get(name)) for name in ('effect', 'low', 'high')},
    }
