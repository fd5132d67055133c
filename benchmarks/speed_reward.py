"""What the speed reward does where tools take time and may run in parallel.

  python -m benchmarks.speed_reward --workdir=DIR [--betas 0 0.5] [--seeds 0 1 2]

For each seed `configs/forge_speed.py` fine-tunes a tiny M2 on demonstrations that look
independent keys up one by one or all in one turn; from these weights RL runs once for
each β, the weight of the speed reward, with everything else equal. Each call sleeps for
its latency; the agent runs the calls of one turn at the same time.

Printed are medians over seeds with the range, of evaluations on held-out tasks after
SFT and after RL, at temperature 1: success on tasks with independent keys and on
chains; the share of calls on independent keys that share a turn; and the wall-clock
seconds of an episode, model and tools together, for both kinds, with the ratio of the
two. Episodes of both kinds run at the same time, and β changes nothing about chains, so
that the ratio does not depend on what else the machine does. Other flags go to the
runs. Results are lines of DIR/results.jsonl; a run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from m2jax.observe import metrics

CONFIG = 'configs/forge_speed.py'
KINDS = 'independent', 'chain'
COLUMNS = (
  ('success/independent', 'success', 2),
  ('success/chain', 'chains', 2),
  ('parallel', 'parallel calls', 2),
  ('wall_s/independent', 's/episode', 2),
  ('wall_s/chain', 'chains', 2),
  ('relative', 'ratio', 2),
)


def run(workdir: pathlib.Path, beta: float, seed: int, flags: Sequence[str]) -> dict:
  """Runs the job with one β and seed; returns its measurements."""
  first, started_s = workdir / f'seed{seed}', time.monotonic()
  here = first if not beta else workdir / f'seed{seed}_beta{beta:g}'
  command = [sys.executable, '-m', 'experiments.forge', f'--config={CONFIG}']
  command += [f'--workdir={here}', f'--config.seed={seed}', *flags]
  command += [f'--config.rl.learner.reward.beta={beta}']
  if beta:
    command += [f'--config.start={first}']
  done = subprocess.run(command, stdout=subprocess.DEVNULL)
  if done.returncode:
    sys.exit(done.returncode)  # the job has said why
  records = list(metrics.read(here))
  stages = {'RL': measure(records, 'after RL')}
  if not beta:
    stages['SFT'] = measure(records, 'after SFT')
  curve = [
    {k: r.get(k) for k in ('step', 'success', 'parallel_calls', 'wall_s')}
    for r in records
    if r['phase'] == 'rl'
  ]
  seconds = time.monotonic() - started_s
  return {'beta': beta, 'seed': seed, **stages, 'curve': curve, 'seconds': seconds}


def measure(records: Sequence[Mapping[str, Any]], stage: str) -> dict[str, float]:
  """Measurements of one evaluation on held-out tasks, at temperature 1."""
  out = {}
  for kind in KINDS:
    rows = [
      r
      for r in records
      if r['phase'] == 'eval'
      and (r['stage'], r['split'], r['temperature']) == (stage, 'held_out', 1.0)
      and r['family'].startswith(kind)
    ]
    tasks = np.array([r['n'] for r in rows])
    calls = tasks * [r['calls'] for r in rows]
    out[f'success/{kind}'] = sum(r['successes'] for r in rows) / tasks.sum()
    wall_s = [r['wall_s'] for r in rows]
    out[f'wall_s/{kind}'] = float(np.average(wall_s, weights=tasks))
    if kind == 'independent':
      share = [r.get('parallel_calls', 0.0) for r in rows]
      out['parallel'] = float(np.average(share, weights=calls))
  return out


def table(runs: Sequence[Mapping[str, Any]]) -> str:
  sides: dict[str, list[dict[str, float]]] = {}
  for row in runs:
    if 'SFT' in row:
      sides.setdefault('after SFT', []).append(dict(row['SFT']))
  for row in runs:
    sides.setdefault(f'RL, β = {row["beta"]:g}', []).append(dict(row['RL']))

  for found in sides.values():
    for m in found:
      m['relative'] = m['wall_s/independent'] / m['wall_s/chain']

  def cell(values: Sequence[float], digits: int) -> str:
    low, middle, high = (f'{f(values):.{digits}f}' for f in (min, np.median, max))
    return middle if low == high else f'{middle} [{low}, {high}]'

  lines = [
    '| | seeds | ' + ' | '.join(title for _, title, _ in COLUMNS) + ' |',
    '|---' * (2 + len(COLUMNS)) + '|',
  ]
  for side, found in sides.items():
    cells = [cell([m[name] for m in found], digits) for name, _, digits in COLUMNS]
    lines.append('| ' + ' | '.join([side, str(len(found)), *cells]) + ' |')
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--betas', type=float, nargs='+', default=[0.0, 0.5])
  parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
  parser.add_argument('--json', action='store_true')
  args, flags = parser.parse_known_args()
  if 0.0 not in args.betas:
    parser.error('--betas: 0 must be among them; the others start from its SFT')
  args.workdir.mkdir(parents=True, exist_ok=True)
  path = args.workdir / 'results.jsonl'
  lines = path.read_text().splitlines() if path.exists() else []
  known = [row for row in map(json.loads, lines) if row['flags'] == flags]
  done = {(row['beta'], row['seed']): row for row in known}
  for seed in args.seeds:
    for beta in sorted(args.betas):
      if (beta, seed) not in done:
        done[beta, seed] = run(args.workdir, beta, seed, flags) | {'flags': flags}
        with path.open('a') as file:
          print(json.dumps(done[beta, seed]), file=file)
        print(f'β = {beta:g}, seed {seed}: done', file=sys.stderr)
  found = [done[beta, seed] for beta in sorted(args.betas) for seed in args.seeds]
  print(json.dumps(found, indent=1) if args.json else table(found))


if __name__ == '__main__':
  main()
