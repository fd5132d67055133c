"""Held-out success of several forge runs side by side: seeds and controls.

  for s in 0 1 2; do make forge WORKDIR=workdir/seed$s ARGS=--config.seed=$s; done
  python -m benchmarks.forge_table workdir/seed0 workdir/seed1 workdir/seed2
  python -m benchmarks.forge_table --families --stage='after RL' workdir/seed?

Every figure is read from the runs' metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import pathlib

from m2jax.observe import metrics, report, stats


def rows(workdir: pathlib.Path) -> list[dict]:
  """One dict per evaluation stage of a run."""
  out = []
  for e in report.evaluations(metrics.read(workdir)):
    successes, n = e.sampled
    low, high = stats.wilson(successes, n)
    out.append(
      {
        'run': workdir.name,
        'stage': e.stage,
        'success': successes / n,
        'low': low,
        'high': high,
        'tasks': n,
        'greedy': e.greedy[0] / e.greedy[1] if e.greedy else None,
        'families': {name: good / of for name, (good, of) in e.families.items()},
      }
    )
  return out


def _print_stages(found: list[dict]) -> None:
  print('| run | stage | temperature 1 [95 %] | greedy | tasks |')
  print('|---|---|---|---|---|')
  for r in found:
    greedy = '' if r['greedy'] is None else f'{r["greedy"]:.3f}'
    interval = f'{r["success"]:.3f} [{r["low"]:.3f}, {r["high"]:.3f}]'
    print(f'| {r["run"]} | {r["stage"]} | {interval} | {greedy} | {r["tasks"]} |')


def _print_families(found: list[dict]) -> None:
  names = [f'{r["run"]} {r["stage"]}' for r in found]
  print('| family | ' + ' | '.join(names) + ' |')
  print('|---|' + '---|' * len(names))
  for family in sorted({name for r in found for name in r['families']}):
    cells = (
      f'{r["families"][family]:.2f}' if family in r['families'] else '' for r in found
    )
    print(f'| {family} | ' + ' | '.join(cells) + ' |')


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('workdir', nargs='+', type=pathlib.Path)
  parser.add_argument('--families', action='store_true', help='one row per family')
  parser.add_argument('--stage', help='only this one, such as "after RL"')
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args()
  missing = [str(w) for w in args.workdir if not (w / metrics.FILE_NAME).exists()]
  if missing:
    parser.error(f'no {metrics.FILE_NAME} in {", ".join(missing)}')
  found = [row for workdir in args.workdir for row in rows(workdir)]
  if args.stage:
    stages = sorted({row['stage'] for row in found})
    if args.stage not in stages:
      parser.error(f'no stage {args.stage!r}: there are {", ".join(stages)}')
    found = [row for row in found if row['stage'] == args.stage]
  if args.json:
    print(json.dumps(found, indent=2))
  elif args.families:
    _print_families(found)
  else:
    _print_stages(found)


if __name__ == '__main__':
  main()
