"""Evaluation records as one row per stage: all tasks, by family and by length.

The report and `benchmarks.forge_table` show these rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

Pair = tuple[float, int]  # successes, tasks


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Success of one stage on one split.

  Attributes:
    stage: 'after SFT', 'after RL', or that of a control.
    sampled: result at temperature 1; (0, 0) if it was not measured.
    greedy: result at temperature 0; None if it was not measured.
    families: family → pair at temperature 1.
    lengths: chain length in tool calls → pair at temperature 1, ascending.
  """

  stage: str
  sampled: Pair
  greedy: Pair | None = None
  families: Mapping[str, Pair] = dataclasses.field(default_factory=dict)
  lengths: Mapping[int, Pair] = dataclasses.field(default_factory=dict)


def by_stage(
  records: Iterable[Mapping[str, Any]], split: str = 'held_out'
) -> list[Evaluation]:
  """One row per stage, in the order of the stages' first records.

  A later record of the same stage, temperature, family and chain length replaces an
  earlier one. Stage 'during RL' is not included: it is a curve, not a row.

  Args:
    records: records of any phase.
    split: 'held_out' or 'dev'; records without a split are held out.
  """
  found: dict[str, dict[tuple[bool, str, int | None], Pair]] = {}
  for record in records:
    if record.get('phase') != 'eval' or record.get('stage') in (None, 'during RL'):
      continue
    if record.get('split', 'held_out') != split:
      continue
    greedy = record.get('temperature') == 0
    key = greedy, record.get('family', 'all'), record.get('calls')
    pair = record['successes'], record['n']
    found.setdefault(record['stage'], {})[key] = pair
  return [_evaluation(stage, pairs) for stage, pairs in found.items()]


def name(record: Mapping[str, Any]) -> str:
  """The name of an evaluation, by which the trajectory page finds what it sampled."""
  return (
    f'{record.get("stage")}, step {record["step"]}, {record.get("split")}, '
    f'temperature {record.get("temperature", 1):g}'
  )


def total(pairs: Iterable[Pair]) -> Pair:
  """The sum of pairs; (0, 0) of none."""
  pairs = list(pairs)
  return sum(successes for successes, _ in pairs), sum(n for _, n in pairs)


def _evaluation(
  stage: str, pairs: Mapping[tuple[bool, str, int | None], Pair]
) -> Evaluation:
  families: dict[str, list[Pair]] = {}
  lengths: dict[int, list[Pair]] = {}
  for (greedy, family, calls), pair in pairs.items():
    if not greedy and family != 'all':
      families.setdefault(family, []).append(pair)
      if calls is not None:
        lengths.setdefault(calls, []).append(pair)
  return Evaluation(
    stage,
    sampled=pairs.get((False, 'all', None), (0, 0)),
    greedy=pairs.get((True, 'all', None)),
    families={family: total(found) for family, found in families.items()},
    lengths={calls: total(found) for calls, found in sorted(lengths.items())},
  )
