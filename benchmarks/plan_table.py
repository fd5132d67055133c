"""Tabulates the plan of the full model: every workload on 256, 512 and 1,024 chips.

  python -m benchmarks.plan_table --directory=workdir/plan
  python -m benchmarks.plan_table --directory=workdir/plan --stages

Goal: an estimate of at least 40 % of peak for pretrain_8k and rl_192k on 512 chips.
Each cell is one run of `experiments.plan --json` in a separate process, which compiles
with libtpu on CPU for minutes. Results and compiled programs are stored in the
directory: of a program that did not change only the figures are computed again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
from concurrent import futures

from benchmarks import harness
from m2jax.plan import efficiency, estimate

SLICES = ('v5p:4x8x8', 'v5p:8x8x8', 'v5p:8x8x16')
WORKLOADS = ('pretrain_8k', 'pretrain_32k', 'rl_192k', 'prefill', 'decode')
CONFIG = 'configs/m2.py'
GIB = 2**30


def file(directory: pathlib.Path, workload: str, topology: str) -> pathlib.Path:
  """The file of a plan."""
  return directory / f'{workload}_{topology.replace(":", "_")}.json'


def cell(
  directory: pathlib.Path, workload: str, topology: str, options: list[str]
) -> dict:
  """One plan, from its file if that exists, else by compiling it."""
  path = file(directory, workload, topology)
  if not path.exists():
    command = [sys.executable, '-m', 'experiments.plan', f'--config={CONFIG}']
    command += [f'--topology={topology}', f'--workloads={workload}', '--json']
    command += [f'--store={directory / "programs"}', *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
      return {}
    path.write_text(done.stdout)
  (plan,) = json.loads(path.read_text())
  return plan


def mesh(plan: dict) -> str:
  """The mesh axes with more than one device, and the dtype of summed gradients."""
  sizes = {k: n for k, n in plan['mesh'].items() if isinstance(n, int) and n > 1}
  parts = [f'{axis} {n}' for axis, n in sizes.items()]
  if plan['mesh']['gradient_dtype']:
    parts.append(f'gradients {plan["mesh"]["gradient_dtype"]}')
  return ' · '.join(parts)


def row(workload: str, topology: str, plan: dict) -> list:
  """One line of the table."""
  if not plan:
    return [workload, topology, 'does not compile'] + [''] * (len(HEAD) - 3)
  worst = max(
    (p for p in plan['programs'] if p['runs']), key=lambda p: total(p['memory'])
  )
  memory = worst['memory']
  links = sum(
    p['runs'] * c['bytes'] for p in plan['programs'] for c in p['collectives']
  )
  flops = sum(p['runs'] * s['flops'] for p in plan['programs'] for s in p['stages'])
  bound, seconds, estimated = plan['bound'], plan['seconds'], plan['estimate_s']
  per_chip = plan['tokens'] / plan['devices']
  left = (plan['hbm_bytes'] - plan['memory_bytes']) / GIB
  return [
    workload if plan['job'] else f'{workload} (no job yet)',
    plan['devices'],
    mesh(plan),
    plan['passes'],
    f'{(plan["parameters_bytes"] + plan["optimizer_bytes"]) / GIB:.1f}',
    f'{memory["saved"] / GIB:.1f}',
    f'{memory["temporaries"] / GIB:.1f}',
    f'{plan["memory_bytes"] / GIB:.1f}' + ('' if plan['fits'] else ' **too much**'),
    f'{left:.1f}',
    f'{flops / 1e12:,.0f}',
    f'{links / 1e9:,.0f}',
    f'{bound["compute_bound_s"] * 1e3:,.0f} + {bound["hbm_bound_s"] * 1e3:,.0f} '
    f'+ {bound["links_s"] * 1e3:,.0f}',
    f'{seconds * 1e3:,.0f}',
    f'{plan["share_of_peak"]:.1%}',
    f'{estimated * 1e3:,.0f}',
    f'**{plan["estimated_share"]:.1%}**',
    f'{per_chip / estimated:,.0f}',
  ]


def chunks(plan: dict) -> list[list]:
  """Lines about the programs that are not part of every step."""
  lines = []
  for p in plan['programs']:
    if not p['runs']:
      size = total(p['memory'])
      fits = '' if size <= plan['hbm_bytes'] else ' **too much**'
      name = f'{plan["workload"]}: {p["name"]}'
      times = [f'{p[key] * 1e3:,.0f}' for key in ('seconds', 'estimate_s')]
      lines.append(
        [name, plan['devices'], mesh(plan), f'{size / GIB:.1f}{fits}', *times]
      )
  return lines


def sensitivity(workload: str, plan: dict) -> list[list]:
  """Lines about the balance of experts, where one chip can wait for another's."""
  if not plan['splits_experts']:
    return []
  cells = [f'{plan["estimate_s"] * 1e3:,.0f}']
  cells += [f'{seconds * 1e3:,.0f}' for seconds in plan['imbalance_s'].values()]
  return [[workload, plan['devices'], *cells]]


def improvements(workload: str, plan: dict) -> list:
  """A line: the estimated share of peak, and with one improvement after the other."""
  share = efficiency.CALIBRATED
  dense = dataclasses.replace(share, experts=share.matmul)

  def of_peak(share, **changes) -> str:
    seconds = sum(p['runs'] * _seconds(p, share, **changes) for p in plan['programs'])
    return f'{plan["useful_flops"] / (seconds * plan["peak_flops"]):.1%}'

  return [
    workload,
    plan['devices'],
    of_peak(share),
    of_peak(dense),
    of_peak(dense, rest=False),
    of_peak(dense, rest=False, recompute=False),
    of_peak(dense, rest=False, recompute=False, exposed=False),
  ]


def _seconds(program: dict, share, *, rest=True, recompute=True, exposed=True) -> float:
  """Time of a program at shares of the roofline, without some of its parts."""
  stages = []
  for fields in program['stages']:
    stage = estimate.Stage(**fields)
    if not rest and stage.name.endswith(' rest'):
      stage = dataclasses.replace(stage, hbm_bound_s=0.0)
    if not recompute and stage.name == 'recompute attention':
      products = stage.compute_bound_s - stage.core_s
      stage = dataclasses.replace(stage, compute_bound_s=products, core_s=0.0)
    stages.append(stage)
  passes = [estimate.Links(**fields) for fields in program['passes']]
  if not exposed:
    passes = [dataclasses.replace(one, exposed_s=0.0) for one in passes]
  one = estimate.Estimate('', 1, None, tuple(stages), (), tuple(passes), 0.0)
  return one.seconds_at(share)


def total(memory: dict) -> int:
  """Bytes of a program's memory; padding is part of its arguments."""
  return sum(memory.values()) - memory['padding']


def stages(plan: dict) -> str:
  """Stages and collectives of a plan's longest program."""
  longest = max(plan['programs'], key=lambda p: p['runs'] * p['seconds'])
  kept = [
    s for s in longest['stages'] if s['compute_bound_s'] + s['hbm_bound_s'] >= 5e-5
  ]
  computed = [
    (s['name'], f'{s["flops"] / 1e12:.1f}', f'{s["hbm_bytes"] / 1e9:.1f}')
    + tuple(f'{s[key] * 1e3:.1f}' for key in ('compute_bound_s', 'hbm_bound_s'))
    for s in kept
  ]
  sent = [
    (c['kind'], c['group'], c['count'], f'{c["bytes"] / 1e9:.2f}')
    + tuple(f'{c[key] * 1e3:.1f}' for key in ('hidden_s', 'exposed_s'))
    for c in longest['collectives']
  ]
  return f'{harness.markdown(STAGES, computed)}\n\n{harness.markdown(LINKS, sent)}'


HEAD = (
  'workload', 'chips', 'mesh', 'passes', 'state', 'activations', 'temporaries',
  'all, of 95 GiB', 'left', 'TFLOP', 'sent GB', 'bound: compute + HBM + links, ms',
  'bound, ms', 'of peak, at most', 'estimate, ms', 'of peak', 'tokens/s a chip',
)  # fmt: skip
CHUNKS = ('program', 'chips', 'mesh', 'GiB', 'bound, ms', 'estimate, ms')
BALANCE = ('workload', 'chips', 'balanced, ms', 'load 1.25', 'load 1.5')
STAGES = ('stage', 'TFLOP', 'GB of HBM', 'ms bound by compute', 'by HBM')
LINKS = ('collective', 'group', 'count', 'GB', 'hidden ms', 'exposed ms')
GROUPS = {
  'Memory of a chip, GiB': (
    'mesh', 'state', 'activations', 'temporaries', 'all, of 95 GiB', 'left',
  ),
  'Work of a step, and the least time that it can take': (
    'passes', 'TFLOP', 'sent GB', 'bound: compute + HBM + links, ms', 'bound, ms',
    'of peak, at most',
  ),
  'Estimated time': ('estimate, ms', 'of peak', 'tokens/s a chip'),
}  # fmt: skip
IMPROVED = (
  'workload', 'chips', 'estimate', 'experts as fast as dense matmuls',
  'and no copies of weights', 'and attention not recomputed',
  'and all collectives hidden',
)  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('--directory', type=pathlib.Path, required=True)
  parser.add_argument('--workloads', nargs='+', default=WORKLOADS)
  parser.add_argument('--slices', nargs='+', default=SLICES)
  parser.add_argument(
    '--layers', type=int, default=0, help='reduce the number of layers'
  )
  parser.add_argument('--quick', action='store_true', help='see experiments.plan')
  parser.add_argument('--tokens', type=int, default=0, help='of a training step')
  parser.add_argument(
    '--gradient_dtype', help='of every mesh: see MeshConfig; in a directory of its own'
  )
  parser.add_argument('--nochunks', action='store_true', help="without RL's chunks")
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
    options = [f'--layers={args.layers}', f'--tokens={args.tokens}']
    options += ['--quick'] * args.quick + ['--nochunks'] * args.nochunks
    if args.gradient_dtype:
      options.append(f'--gradient_dtype={args.gradient_dtype}')
    plans = pool.map(lambda c: cell(args.directory, *c, options), cells)
    found = dict(zip(cells, plans, strict=True))
  if args.json:
    print(json.dumps([plan for plan in found.values() if plan], indent=2))
    return
  made = {key: plan for key, plan in found.items() if plan}
  lines = [row(*key, plan) for key, plan in found.items()]
  print(harness.markdown(HEAD, lines, GROUPS))
  trained = {key: plan for key, plan in made.items() if plan['optimizer_bytes']}
  for head, lines in (
    (CHUNKS, [line for plan in made.values() for line in chunks(plan)]),
    (IMPROVED, [improvements(w, plan) for (w, _), plan in trained.items()]),
    (BALANCE, [line for (w, _), p in made.items() for line in sensitivity(w, p)]),
  ):
    if lines:
      print(f'\n{harness.markdown(head, lines)}')
  if args.stages:
    for (workload, topology), plan in found.items():
      if plan:
        print(f'\n{workload}, {topology}:\n\n{stages(plan)}')


if __name__ == '__main__':
  main()
