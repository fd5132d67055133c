r"""What the speed reward does where tools take time and may run in parallel.

  python -m benchmarks.speed_reward --workdir=DIR [--betas 0 0.5] [--seeds 0 1 2] \
    [--json]

For each seed `configs/forge_speed.py` fine-tunes a tiny M2 on demonstrations that look
independent keys up one by one or all in one turn; from these weights RL runs once for
each β, the weight of the speed reward, with everything else equal. Each call sleeps for
its latency; the agent runs the calls of one turn at the same time.

Prints medians over seeds with the range, for evaluations on held-out tasks after SFT
and after RL, at temperature 1: success on tasks with independent keys and on chains;
the share of calls on independent keys that share a turn; and the wall-clock seconds of
an episode, model and tools together, for both kinds, with the ratio of the two.
Episodes of both kinds run at the same time, and β does not affect chains, so the ratio
does not depend on other load. Runs resume, and measurements in DIR are not repeated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from benchmarks import harness
from configs import forge_speed
from experiments import common, fields
from m2jax.forge import run
from m2jax.forge.config import ForgeConfig
from m2jax.observe import metrics

FIRST = 'beta0'  # the other arms start from its SFT
KINDS = 'independent', 'chain'
COLUMNS = (
  ('success/independent', 'success', 2),
  ('success/chain', 'chains', 2),
  ('parallel', 'parallel calls', 2),
  ('wall_s/independent', 's/episode', 2),
  ('wall_s/chain', 'chains', 2),
  ('relative', 'ratio', 2),
)


def config(arm: str, seed: int, args) -> ml_collections.ConfigDict:
  """The job's config with one β."""
  c = forge_speed.get_config(args.variant)
  c.seed = seed
  if args.demonstrations:
    c.sft.demonstrations = args.demonstrations
  c.rl.learner.reward.beta = float(arm.removeprefix('beta'))
  if arm != FIRST:
    c.start = str(args.workdir / f'{FIRST}-{seed}')
  return fields.complete(c, ForgeConfig)


def measure_arm(arm: str, seed: int, args) -> dict[str, Any]:
  """One run, resumed if it was interrupted."""
  started_s, workdir = time.monotonic(), args.workdir / f'{arm}-{seed}'
  run.run(common.build(ForgeConfig, config(arm, seed, args)), workdir)
  records = list(metrics.read(workdir))
  found = {'arm': arm, 'seed': seed, 'RL': measure(records, 'after RL')}
  if arm == FIRST:
    found['SFT'] = measure(records, 'after SFT')
  found['curve'] = [
    {k: r.get(k) for k in ('step', 'success', 'parallel_calls', 'wall_s')}
    for r in records
    if r['phase'] == 'rl'
  ]
  print(f'seed {seed}, {arm}: {time.monotonic() - started_s:.0f} s', file=sys.stderr)
  return found


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
    side = 'RL, β = ' + row['arm'].removeprefix('beta')
    sides.setdefault(side, []).append(dict(row['RL']))
  for found in sides.values():
    for m in found:
      m['relative'] = m['wall_s/independent'] / m['wall_s/chain']

  def cell(values: Sequence[float], digits: int) -> str:
    low, middle, high = (f'{f(values):.{digits}f}' for f in (min, np.median, max))
    return middle if low == high else f'{middle} [{low}, {high}]'

  lines = []
  for side, found in sides.items():
    cells = [cell([m[name] for m in found], digits) for name, _, digits in COLUMNS]
    lines.append([side, len(found), *cells])
  return harness.markdown(['', 'seeds', *(title for _, title, _ in COLUMNS)], lines)


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--betas', type=float, nargs='+', default=[0.0, 0.5])
  parser.add_argument('--demonstrations', type=int, help="other than the config's")
  parser.add_argument(
    '--variant', default='', choices=('', 'smoke'), help='of the config'
  )
  args = parser.parse_args()
  if 0.0 not in args.betas or min(args.betas) < 0:
    parser.error('--betas: 0 must be the least; the others start from its SFT')
  names = [f'beta{beta:g}' for beta in sorted(set(args.betas))]
  harness.run(args, names, measure_arm, table, ['betas'])


if __name__ == '__main__':
  main()
