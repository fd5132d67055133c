"""The report page of a dataset: counts and rates by stage, rejections, examples."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m2jax.observe import page
from m2jax.observe.printable import clip
from m2jax.tasks import harbor
from m2jax_pipelines import evidence, records

_EXAMPLES = 12
_SHOWN_CHARS = 4000


def write(
  path: Path, rows: Sequence[Mapping[str, Any]], config: Any, dataset: Path
) -> None:
  """Writes the page; an old one is replaced when the new one is complete."""
  text = render(rows, config, dataset)
  temporary = path.with_name(path.name + '.new')
  temporary.write_text(text, encoding='utf-8')
  os.replace(temporary, path)


def render(rows: Sequence[Mapping[str, Any]], config: Any, dataset: Path) -> str:
  """The page as text."""
  admitted = [row for row in rows if row['outcome'] == records.ADMITTED]
  tables = [
    ('Stages', table(rows, 'stage')),
    ('Families', table(rows, 'family')),
    ('Sources', table(rows, 'source')),
  ]
  return page.render(
    'pipeline.html',
    title=f'{config.kind}: {len(admitted)} tasks',
    facts={
      'candidates': len(rows),
      'admitted': len(admitted),
      'seconds a task': f'{seconds(rows) / max(1, len(admitted)):.2f}',
      **{split: sum(r['split'] == split for r in admitted) for split in harbor.SPLITS},
    },
    tables=tables,
    reasons=reasons(rows),
    examples=_examples(admitted, dataset),
    config=dataclasses.asdict(config),
  )


def table(rows: Sequence[Mapping[str, Any]], field: str) -> list[dict[str, Any]]:
  """A line per value of a field: candidates, outcomes, rate, seconds per task."""
  groups = collections.defaultdict(list)
  for row in rows:
    groups[str(row[field])].append(row)
  lines = []
  for name, members in sorted(groups.items()):
    count = collections.Counter(row['outcome'] for row in members)
    admitted = count[records.ADMITTED] + count[records.PASSED]
    lines.append(
      {
        'name': name,
        'candidates': len(members),
        'passed': admitted,
        **{key: count[key] for key in ('rejected', 'invalid')},
        'rate': f'{admitted / len(members):.0%}',
        'seconds': f'{seconds(members) / max(1, admitted):.2f}',
      }
    )
  return lines


def seconds(rows: Sequence[Mapping[str, Any]]) -> float:
  """Elapsed time of making and admitting candidates, as if one after the other."""
  return sum(row.get('wall_s', 0) + row.get('admission_s', 0) for row in rows)


def reasons(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
  """Reasons of rejections, without their particulars, most frequent first."""
  count = collections.Counter(
    (row['stage'], re.sub(r'near-duplicate of .*', 'near-duplicate', row['reason']))
    for row in rows
    if row['outcome'] not in (records.ADMITTED, records.PASSED)
  )
  short = collections.Counter()
  for (stage, reason), n in count.items():
    short[f'{stage}: {reason.partition(": ")[0][:80]}'] += n
  return short.most_common()


def _examples(admitted, dataset: Path) -> list[dict[str, Any]]:
  """Tasks of different families, in turn."""
  by_family = collections.defaultdict(list)
  for row in admitted:
    by_family[row['family']].append(row)
  chosen = []
  for turn in range(_EXAMPLES):
    chosen += [group[turn] for group in by_family.values() if len(group) > turn]
  found = []
  for row in chosen[:_EXAMPLES]:
    path = dataset / 'tasks' / row['split'] / row['task']
    if not path.is_dir():
      continue
    directory = harbor.read(path)
    solution = directory.solution()
    main = solution.get('gold.patch') or solution.get('app/app.js')
    main = main or solution['solve.sh']
    found.append(
      {
        'name': row['task'],
        'family': row['family'],
        'source': row['source'],
        'instruction': clip(directory.instruction, _SHOWN_CHARS),
        'solution': clip(main.decode(errors='replace'), _SHOWN_CHARS),
        'evidence': evidence.texts(dataset, row['task']),
        'images': evidence.images(dataset, row['task']),
      }
    )
  return found
