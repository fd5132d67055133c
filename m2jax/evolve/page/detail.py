"""What the page shows of one round, and of all keeps: pure functions of lines."""

from __future__ import annotations

import collections
import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax.evolve import gate, lineage
from m2jax.evolve.page import values
from m2jax.evolve.page.values import BadLine
from m2jax.observe.printable import clip, one_line

_DIFF, _TEXT, _FAILURE = 20_000, 8_000, 3_000  # characters
_CHANGES, _CHANGE = 50, 2_000  # fields, and characters of each
_PROBLEMS, _FAILURES, _LOOKS = 20, 6, 32
_PAIRS, _ROUNDS = 20_000, 1_000_000  # beyond which no gate is computed again
_FILES, _FILE = 8, 64 << 10  # of a scaffold, and characters of each
_FILE_LINES = 1_000  # that are compared: the time of a comparison is quadratic
_SETTINGS = 4_000


def start(
  begin: Mapping[str, Any], baseline: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Round 0: settings, the scaffold, and its failures. `baseline`: lines of round 0."""
  settings = {name: begin.get(name) for name in ('proposer', 'config')}
  failed = [x for line in baseline for x in _failures(line)]
  return {
    'round': 0,
    'settings': clip(_json(settings, 1), _SETTINGS),
    'files': [[n, clip(text, _TEXT)] for n, text in _files(begin).items()],
    'failures': failed[:_FAILURES],
    'costs': [['baseline', *values.cost(line)] for line in baseline[:1]],
  }


def of_round(
  lines: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> dict[str, Any]:
  """A round. `lines`: its lines, as `fold` took them; `config`: of the first line."""
  of: dict[str, Mapping[str, Any]] = {line['kind']: line for line in lines}
  looks = [line for line in lines if line['kind'] == 'look'][:_LOOKS]
  proposal, decision = of.get('proposal', {}), of.get('decision', {})
  checked, changes = of.get('checked', {}), proposal.get('changes')
  changes = changes if isinstance(changes, Mapping) else {}
  problems = checked.get('problems')
  ends = of.get('smoke', {}).get('ends')
  return {
    'round': values.integer(lines[0].get('round'), 'round') if lines else 0,
    'incumbent': looks[0].get('incumbent') if looks else None,
    'note': clip(proposal.get('note'), 300),
    'source': clip(proposal.get('source'), 100),
    'error': clip(proposal.get('error'), 600),
    'reason': clip(decision.get('reason'), 600),
    'diff': clip(proposal.get('diff'), _DIFF),
    'memory': clip(proposal.get('memory'), _TEXT),
    'criticism': clip(proposal.get('criticism'), _TEXT),
    'changes': [
      [one_line(k, 100), clip(v if isinstance(v, str) else _json(v), _CHANGE)]
      for k, v in list(changes.items())[:_CHANGES]
    ],
    'checked': bool(checked),
    'problems': [clip(p, 400) for p in _list(problems)[:_PROBLEMS]],
    'readded': values.number(checked.get('readded')),
    'smoke': _counted(ends) if isinstance(ends, list) else None,
    'looks': _looks(looks, config, _number(decision.get('round'))),
    'failures': [x for look in looks for x in _failures(look)][:_FAILURES],
    'costs': _costs(lines, looks),
  }


def final(
  start_files: Mapping[str, Any],
  incumbent_files: Mapping[str, Any],
  kept: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
  """From the start to the incumbent: the diff, and what each keep changed.

  Args:
    start_files, incumbent_files: lines that have `files`.
    kept: the proposals of the keeps, in order.
  """
  before, after = _files(start_files), _files(incumbent_files)
  lines: list[str] = []
  for name in sorted({*before, *after}):
    a, b = (files.get(name, '').splitlines()[:_FILE_LINES] for files in (before, after))
    lines += difflib.unified_diff(a, b, f'a/{name}', f'b/{name}', n=1, lineterm='')
  return {
    'diff': clip('\n'.join(lines), 2 * _DIFF),
    'keeps': [
      [line['round'], sorted(one_line(k, 60) for k in _mapping(line.get('changes')))]
      for line in kept
    ],
  }


def _looks(
  looks: Sequence[Mapping[str, Any]], config: Mapping[str, Any], number: int
) -> list[list[Any]]:
  """The gate at each look, computed again from the recorded pairs so far.

  Returns: pairs, effect, low, high, evidence, needed, wins, losses, and the pairs
    without a score, of each look.
  """
  rule = _gate(config, number)
  found, pairs, tokens = [], [], [0.0, 0.0]
  for i, look in enumerate(looks):
    pairs += values.rows(look.get('pairs'), 4, 'pairs')
    for j, key in enumerate(('cost', 'incumbent_cost')):
      tokens[j] += values.cost({'cost': look.get(key)})[0]
    d = lineage.compared(pairs)
    wins, losses = sum(x > 0 for x in d), sum(x < 0 for x in d)
    row = [len(d), sum(d) / len(d) if d else None, None, None, None, None]
    if d and rule and i < len(rule[0].looks) and len(d) <= _PAIRS:
      cost = tokens[0] / tokens[1] if tokens[1] else 1.0
      verdict = gate.decide(d, rule[0], rule[1], i, cost)
      row[2:] = verdict.low, verdict.high, verdict.evidence + 0.0, verdict.needed
    found.append([*row, wins, losses, len(pairs) - len(d)])
  return found


def _gate(
  config: Mapping[str, Any], number: int
) -> tuple[gate.GateConfig, float] | None:
  """The gate of a round and its level; None if the settings are none."""
  try:
    settings = config['gate']
    found = gate.GateConfig(**{**settings, 'looks': tuple(settings['looks'])})
    rounds = int(config['budget']['rounds'])
    if not 1 <= number <= rounds <= _ROUNDS:
      return None
    return found, float(gate.levels(found, rounds)[number - 1])
  except (TypeError, ValueError, KeyError, OverflowError):
    return None


def _costs(
  lines: Sequence[Mapping[str, Any]], looks: Sequence[Mapping[str, Any]]
) -> list[list[Any]]:
  """Tokens, seconds and episodes by phase."""
  found = {
    line['kind']: values.cost(line)
    for line in lines
    if line['kind'] in ('proposal', 'smoke', 'second')
  }
  for name, key in (('candidate', 'cost'), ('incumbent', 'incumbent_cost')):
    parts = [values.cost({'cost': look.get(key)}) for look in looks]
    if parts:
      found[name] = [sum(x) for x in zip(*parts, strict=True)]
  return [[name, *cost] for name, cost in found.items()]


def _failures(line: Mapping[str, Any]) -> list[list[Any]]:
  return [
    [values.number(x.get('score')), one_line(x.get('end_reason'), 60)]
    + [clip(x.get('text'), _FAILURE)]
    for x in _list(line.get('failures'))[:_FAILURES]
    if isinstance(x, Mapping)
  ]


def _files(line: Mapping[str, Any]) -> dict[str, str]:
  found = list(_mapping(line.get('files')).items())[:_FILES]
  return {one_line(n, 100): clip(text, _FILE) for n, text in found}


def _counted(ends: Sequence[Any]) -> list[list[Any]]:
  found = collections.Counter(one_line(end, 60) for end in ends[:1000])
  return [[end, n] for end, n in found.most_common(10)]


def _mapping(value: Any) -> Mapping[str, Any]:
  return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
  return value if isinstance(value, list) else []


def _number(value: Any) -> int:
  try:
    return values.integer(value, 'round')
  except BadLine:
    return 0


def _json(value: Any, indent: int | None = None) -> str:
  return json.dumps(value, ensure_ascii=False, indent=indent)
