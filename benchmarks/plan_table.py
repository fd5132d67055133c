"""Tabulates the plan of the full model: every workload on 256, 512 and 1,024 chips.

  python -m benchmarks.plan_table --directory=workdir/plan
  python -m benchmarks.plan_table --directory=workdir/plan --stages

Claim: the roofline of the train step is above 35 % of peak. Each cell is one run of
`experiments.plan --json` in a separate process, which compiles with libtpu on CPU for
minutes. The results are stored in the directory and reused; the table contains nothing
else.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from concurrent import futures

SLICES = ('v5p:4x8x8', 'v5p:8x8x8', 'v5p:8x8x16')
WORKLOADS = ('pretrain_8k', 'pretrain_32k', 'rl_192k', 'prefill', 'decode')
CONFIG = 'configs/m2.py'
GIB = 2**30


def file(directory: pathlib.Path, workload: str, topology: str) -> pathlib.Path:
  """The file of a plan."""
  return directory / f'{workload}_{topology.replace(":", "_")}.json'


def cell(directory: pathlib.Path, workload: str, topology: str, layers: int) -> dict:
  """One plan, from its file if that exists, else by compiling it."""
  path = file(directory, workload, topology)
  if not path.exists():
    command = [sys.executable, '-m', 'experiments.plan', f'--config={CONFIG}']
    command += [f'--topology={topology}', f'--workloads={workload}', '--json']
    command += [f'--layers={layers}']
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
      return {}
    path.write_text(done.stdout)
  (plan,) = json.loads(path.read_text())
  return plan


def mesh(plan: dict) -> str:
  """The mesh axes with more than one device."""
  sizes = {k: n for k, n in plan['mesh'].items() if k != 'rules' and n > 1}
  return ' · '.join(f'{axis} {n}' for axis, n in sizes.items())


def row(workload: str, topology: str, plan: dict) -> str:
  """One line of the table."""
  if not plan:
    return f'| {workload} | {topology} | does not compile |' + ' |' * 10
  worst = max(plan['programs'], key=lambda p: total(p['memory']))
  memory = worst['memory']
  links = sum(
    p['runs'] * c['bytes'] for p in plan['programs'] for c in p['collectives']
  )
  flops = sum(p['runs'] * s['flops'] for p in plan['programs'] for s in p['stages'])
  bound = plan['bound']
  seconds, devices = plan['seconds'], plan['devices']
  cells = (
    workload if plan['job'] else f'{workload} (no job yet)',
    devices,
    mesh(plan),
    plan['passes'],
    f'{plan["parameters_bytes"] / GIB:.1f}',
    f'{plan["optimizer_bytes"] / GIB:.1f}',
    f'{memory["saved"] / GIB:.1f}',
    f'{memory["temporaries"] / GIB:.1f}',
    f'{plan["memory_bytes"] / GIB:.1f}' + ('' if plan['fits'] else ' **too much**'),
    f'{flops / 1e12:,.0f}',
    f'{links / 1e9:,.0f}',
    f'{bound["compute_bound_s"] * 1e3:,.0f} + {bound["hbm_bound_s"] * 1e3:,.0f} '
    f'+ {bound["links_s"] * 1e3:,.0f}',
    f'{seconds * 1e3:,.0f}',
    f'{plan["tokens"] / seconds / devices:,.0f}',
    f'{plan["share_of_peak"]:.1%}',
  )
  return '| ' + ' | '.join(map(str, cells)) + ' |'


def total(memory: dict) -> int:
  """Bytes of a program's memory; padding is part of its arguments."""
  return sum(memory.values()) - memory['padding']


def stages(plan: dict) -> list[str]:
  """Stages and collectives of a plan's longest program."""
  longest = max(plan['programs'], key=lambda p: p['runs'] * p['seconds'])
  lines = [
    '',
    '| stage | TFLOP | GB of HBM | ms bound by compute | by HBM |',
    '|---|---|---|---|---|',
  ]
  for s in longest['stages']:
    if s['compute_bound_s'] + s['hbm_bound_s'] < 5e-5:
      continue
    lines.append(
      f'| {s["name"]} | {s["flops"] / 1e12:.1f} | {s["hbm_bytes"] / 1e9:.1f} | '
      f'{s["compute_bound_s"] * 1e3:.1f} | {s["hbm_bound_s"] * 1e3:.1f} |'
    )
  lines += ['', '| collective | group | count | GB | hidden ms | exposed ms |']
  lines += ['|---|---|---|---|---|---|']
  for c in longest['collectives']:
    lines.append(
      f'| {c["kind"]} | {c["group"]} | {c["count"]} | {c["bytes"] / 1e9:.2f} | '
      f'{c["hidden_s"] * 1e3:.1f} | {c["exposed_s"] * 1e3:.1f} |'
    )
  return lines


HEAD = (
  'workload', 'chips', 'mesh', 'passes', 'parameters', 'optimizer', 'activations',
  'temporaries', 'all, of 95 GiB', 'TFLOP', 'sent GB', 'compute + HBM + links, ms',
  'ms', 'tokens/s per chip', 'of peak, at most',
)  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('--directory', type=pathlib.Path, required=True)
  parser.add_argument('--workloads', nargs='+', default=WORKLOADS)
  parser.add_argument('--slices', nargs='+', default=SLICES)
  parser.add_argument(
    '--layers', type=int, default=0, help='reduce the number of layers'
  )
  parser.add_argument('--jobs', type=int, default=2, help='cells compiled at once')
  parser.add_argument('--made', action='store_true', help='compile nothing')
  parser.add_argument('--stages', action='store_true', help='one table for each plan')
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args()
  args.directory.mkdir(parents=True, exist_ok=True)
  cells = [
    (workload, topology)
    for workload in args.workloads
    for topology in args.slices
    if not args.made or file(args.directory, workload, topology).exists()
  ]
  with futures.ThreadPoolExecutor(args.jobs) as pool:
    plans = pool.map(lambda c: cell(args.directory, *c, args.layers), cells)
    found = dict(zip(cells, plans, strict=True))
  if args.json:
    print(json.dumps([plan for plan in found.values() if plan], indent=2))
    return
  print('| ' + ' | '.join(HEAD) + ' |')
  print('|---' * len(HEAD) + '|')
  for (workload, topology), plan in found.items():
    print(row(workload, topology, plan))
  if args.stages:
    for (workload, topology), plan in found.items():
      if plan:
        print(f'\n{workload}, {topology}:')
        print('\n'.join(stages(plan)))


if __name__ == '__main__':
  main()
