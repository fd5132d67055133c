"""RL and its controls: runs of the main job in one table.

  for s in 0 1 2; do
    make forge WORKDIR=workdir/seed$s ARGS=--config.seed=$s
    for c in more_sft expert_iteration shuffled; do
      python -m experiments.forge --config=configs/forge.py:$c --config.seed=$s \
        --config.start=workdir/seed$s --workdir=workdir/seed$s-$c
    done
  done
  python -m benchmarks.forge_table workdir/seed*
  python -m benchmarks.forge_table --families workdir/seed*
  python -m benchmarks.forge_table --means workdir/seed*

Every figure is read from the runs' metrics.jsonl and config.json.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks import harness
from m2jax.observe import evaluations, metrics, stats
from m2jax.observe.evaluations import Pair

_PHASE_OF_STAGE = {'after SFT': 'sft', 'after more SFT': 'more_sft', 'after RL': 'rl'}


@dataclasses.dataclass(frozen=True)
class Row:
  """The result of one stage of a run; pairs except `greedy` are at temperature 1.

  Attributes:
    run: name of the workdir.
    arm: 'SFT', 'RL', or the name of a control.
    seed: the run's seed.
    dev, held_out, greedy: all tasks of a split; None if it was not measured.
    by_calls: number of tool calls that suffice → held-out pair.
    families: family → held-out pair.
    longer: held-out pair of the chains longer than any demonstration.
    steps: updates of the phase.
    episodes: episodes of all groups that its updates took, used or not; 0 in SFT.
    tokens: tokens trained on, after merging prefixes.
    seconds: duration of the phase, including the evaluations during it.
  """

  run: str
  arm: str
  seed: int
  dev: Pair | None
  held_out: Pair | None
  greedy: Pair | None
  by_calls: Mapping[int, Pair]
  families: Mapping[str, Pair]
  longer: Pair | None
  steps: int
  episodes: int
  tokens: int
  seconds: float


def arm_of(stage: str, config: Mapping) -> str:
  """Name of the arm of a stage of a run with these settings, and its other agent."""
  agent = config.get('episodes', {}).get('agent', {}).get('kind', 'whitebox')
  return _phase(stage, config) + (f', {agent}' if agent != 'whitebox' else '')


def _phase(stage: str, config: Mapping) -> str:
  if stage == 'after SFT':
    return 'SFT'
  if stage == 'after more SFT':
    return 'more SFT'
  learner = config['rl']['learner']
  if learner['shuffle_rewards']:
    return 'shuffled rewards'
  names = {'cispo': 'RL', 'expert_iteration': 'expert iteration'}
  kind = learner['estimator']['kind']
  return names.get(kind, f'RL, {kind}')


def rows(workdir: pathlib.Path) -> list[Row]:
  """One row for each stage that a run evaluated, in order."""
  config = json.loads((workdir / 'config.json').read_text())
  records = list(metrics.read(workdir))
  by_split = {
    split: {row.stage: row for row in evaluations.by_stage(records, split)}
    for split in ('held_out', 'dev')
  }
  # The families of the demonstrations are steps_1, steps_2 …
  demonstrated = max(
    (int(name.rpartition('_')[2]) for name in config['sft']['families']), default=0
  )
  out = []
  for stage in dict.fromkeys(s for found in by_split.values() for s in found):
    if stage not in _PHASE_OF_STAGE:
      continue
    none = evaluations.Evaluation(stage, sampled=(0, 0))
    held_out, dev = (by_split[split].get(stage, none) for split in by_split)
    longer = [pair for n, pair in held_out.lengths.items() if n > demonstrated]
    trained = [r for r in records if r['phase'] == _PHASE_OF_STAGE[stage]]
    out.append(
      Row(
        run=workdir.name,
        arm=arm_of(stage, config),
        seed=config['seed'],
        dev=dev.sampled if dev.sampled[1] else None,
        held_out=held_out.sampled if held_out.sampled[1] else None,
        greedy=held_out.greedy,
        by_calls=held_out.lengths,
        families=dict(sorted(held_out.families.items())),
        longer=evaluations.total(longer) if longer else None,
        steps=max((r['step'] for r in trained), default=0),
        episodes=_episodes(trained, config),
        tokens=int(sum(r.get('forest_tokens', r.get('tokens', 0)) for r in trained)),
        seconds=trained[-1]['used_s'] if trained else 0.0,
      )
    )
  return out


def _episodes(records: Sequence[Mapping], config: Mapping) -> int:
  taken = max((r.get('pool/taken', 0) for r in records), default=0)
  return int(taken * config['rl']['group_size']) if taken else 0


def _share(pair: Pair | None) -> str:
  return f'{pair[0] / pair[1]:.2f}' if pair and pair[1] else ''


def _interval(pair: Pair | None) -> str:
  if not pair:
    return ''
  low, high = stats.wilson(*pair)
  return f'{pair[0] / pair[1]:.3f} [{low:.3f}, {high:.3f}]'


def print_runs(found: Sequence[Row]) -> None:
  """One line per stage: success on both splits, by chain length, and the cost."""
  calls = sorted({c for row in found for c in row.by_calls})
  by_calls = [f'{c} calls' for c in calls]
  groups = {
    'Success': ['dev [95 %]', 'held-out [95 %]', 'greedy'],
    'Held-out success by the tool calls that suffice': by_calls,
    'Cost of the phase': ['updates', 'episodes', 'tokens', 's'],
  }
  lines = [
    [row.arm, row.seed, _interval(row.dev), _interval(row.held_out)]
    + [_share(row.greedy)]
    + [_share(row.by_calls.get(c)) for c in calls]
    + [row.steps, f'{row.episodes:,}', f'{row.tokens:,}', f'{row.seconds:.0f}']
    for row in found
  ]
  head = ['run', 'seed', *(name for names in groups.values() for name in names)]
  print(harness.markdown(head, lines, groups))


def print_families(found: Sequence[Row]) -> None:
  """Held-out success: one line per family, one column per stage."""
  families = sorted({f for row in found for f in row.families})
  header = ['family'] + [f'{row.arm}, seed {row.seed}' for row in found]
  lines = [[f] + [_share(row.families.get(f)) for row in found] for f in families]
  print(harness.markdown(header, lines))


def print_means(found: Sequence[Row]) -> None:
  """One line per arm: mean and range of held-out success over the seeds."""
  arms: dict[str, list[Row]] = collections.defaultdict(list)
  for row in found:
    if row.held_out:
      arms[row.arm].append(row)
  calls = sorted({c for row in found for c in row.by_calls})
  lines = []
  for arm, of in arms.items():
    shares = [row.held_out[0] / row.held_out[1] for row in of]
    by_calls = [
      np.mean([row.by_calls[c][0] / row.by_calls[c][1] for row in of]) for c in calls
    ]
    longer = [row.longer[0] / row.longer[1] for row in of if row.longer]
    lines.append(
      [arm, len(of), f'{np.mean(shares):.3f}']
      + [f'{min(shares):.3f} to {max(shares):.3f}']
      + [f'{np.mean(longer):.3f}' if longer else '']
      + [f'{share:.2f}' for share in by_calls]
    )
  groups = {
    'Held-out success': ['seeds', 'mean', 'range', 'longer than shown'],
    'By the tool calls that suffice': [f'{c} calls' for c in calls],
  }
  head = ['run', *(name for names in groups.values() for name in names)]
  print(harness.markdown(head, lines, groups))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('workdir', nargs='+', type=pathlib.Path)
  how = parser.add_mutually_exclusive_group()
  how.add_argument('--families', action='store_true', help='one line per family')
  how.add_argument('--means', action='store_true', help='one line per arm, over seeds')
  how.add_argument('--json', action='store_true')
  args = parser.parse_args()
  missing = [str(w) for w in args.workdir if not (w / metrics.FILE_NAME).exists()]
  if missing:
    parser.error(f'no {metrics.FILE_NAME} in {", ".join(missing)}')
  found = [row for workdir in args.workdir for row in rows(workdir)]
  if args.json:
    print(json.dumps([dataclasses.asdict(row) for row in found], indent=2))
  elif args.families:
    print_families(found)
  elif args.means:
    print_means(found)
  else:
    print_runs(found)


if __name__ == '__main__':
  main()
