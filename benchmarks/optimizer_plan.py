"""What an optimizer of the hidden matrices adds to M2's step on TPU v5p slices.

  python -m benchmarks.optimizer_plan                  # a table; --json for the numbers
  python -m benchmarks.optimizer_plan --names muon_sphere sso --slices v5p:8x8x8

Compiles the update (`apply` of `train.step`) of the full model with libtpu, without a
TPU, on the mesh of pretrain_8k in configs/m2.py. These are compile-time figures of one
chip: the optimizer's state and the program's temporaries, FLOPs of matmuls as passes of
the matrix unit (fp32 at the highest precision is six in bfloat16), HBM, bytes sent by
each kind of collective, and the time with every instruction at its roof. `of the step`
is that time over itself plus the formula of `plan.search` for the rest of the step.

The compiler cannot bound the loop in SSO's solver and counts its body once. The
compiled muon_sphere therefore has one evaluation of msign, the compiled sso two, and
`sso` with E evaluations is muon_sphere plus E − 1 times their difference. Chips that
exchange matrices wait for the slowest, so E is the largest number in a step, not the
mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # nothing runs here

from benchmarks import harness
from configs import m2
from experiments import plan as plan_job
from m2jax.plan import compile as compile_lib
from m2jax.plan import estimate, plan, programs, search, topology, workloads

WORKLOAD = 'pretrain_8k'
NAMES = ('adam', 'muon', 'muon_sphere', 'sso')
ADDED = ('tflop', 'hbm_gb', 'seconds', 'sent')


def measure(name: str, slice_name: str, layers: int) -> dict[str, Any]:
  """Figures of one optimizer on one slice; `layers` 0 is the whole model."""
  config = plan_job.configuration(m2.get_config().to_dict())
  where = topology.load(slice_name)
  placed = workloads.place(WORKLOAD, config.workloads[WORKLOAD], len(where.devices))
  optimizer = dataclasses.replace(config.optimizer, name=name)
  cfg = placed.model(programs.layers(config.model, layers))
  config = dataclasses.replace(config, model=cfg, optimizer=optimizer)
  mesh = plan.sharding(placed, where)
  made = programs.train(config, placed, mesh)
  update = next(program for program in made if program.name == 'apply')
  compiled = compile_lib.compile_program(update, config.compiler_options)
  found = estimate.estimate(compiled, {}, where)
  sent: dict[str, float] = {}
  for one in found.collectives:
    sent[one.kind] = sent.get(one.kind, 0.0) + one.bytes / 1e9
  rest, _ = search.formula(config, placed, mesh, where)
  return {
    'name': name,
    'slice': slice_name,
    'layers': layers,
    'chips': len(where.devices),
    'state_gib': programs.state_bytes(made)[1] / 2**30,
    'temporaries_gib': (found.memory.temporaries + found.memory.saved) / 2**30,
    'tflop': sum(s.flops for s in found.stages) / 1e12,
    'hbm_gb': sum(s.hbm_bytes for s in found.stages) / 1e9,
    'sent': sent,
    'seconds': found.seconds,
    'rest_s': rest,
    'compile_s': compiled.seconds,
  }


def at(sphere: dict, sso: dict, evaluations: float) -> dict[str, Any]:
  """SSO with a number of evaluations of msign."""

  def line(key):
    return sphere[key] + (evaluations - 1) * (sso[key] - sphere[key])

  figures = {key: line(key) for key in ADDED if key != 'sent'}
  return {**sso, **figures, 'name': f'sso, {evaluations:g} evaluations'}


def table(rows: list[dict[str, Any]]) -> str:
  """Markdown."""
  kinds = sorted({kind for row in rows for kind in row['sent']})
  names = ['chips', 'optimizer', 'state, GiB', 'temporaries, GiB', 'TFLOP', 'HBM, GB']
  names += [f'{kind}, GB' for kind in kinds] + ['bound, ms', 'of the step']
  groups = {'Memory and work': names[2:6], 'Links and time': names[6:]}
  lines = []
  for row in rows:
    share = row['seconds'] / (row['seconds'] + row['rest_s'])
    cells = [str(row['chips']), row['name']]
    cells += [f'{row[key]:.1f}' for key in ('state_gib', 'temporaries_gib')]
    cells += [f'{row["tflop"]:,.1f}', f'{row["hbm_gb"]:,.0f}']
    cells += [f'{row["sent"].get(kind, 0.0):,.1f}' for kind in kinds]
    cells += [f'{1e3 * row["seconds"]:,.0f}', f'{share:.1%}']
    lines.append(cells)
  return harness.markdown(names, lines, groups)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('--names', nargs='+', default=list(NAMES), choices=NAMES)
  parser.add_argument('--slices', nargs='+', default=list(m2.TOPOLOGIES))
  parser.add_argument('--evaluations', type=float, nargs='+', default=[4, 6, 9])
  parser.add_argument('--layers', type=int, default=0, help='0: all of them')
  parser.add_argument(
    '--results', type=pathlib.Path, help='programs are not compiled again'
  )
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args()
  known, rows = [], []
  if args.results and args.results.exists():
    known = list(map(json.loads, args.results.read_text().splitlines()))
  done = {(row['name'], row['slice'], row['layers']): row for row in known}
  for slice_name in args.slices:
    found = {}
    for name in args.names:
      key = name, slice_name, args.layers
      found[name] = done.get(key) or measure(*key)
      if args.results and key not in done:
        with args.results.open('a') as file:
          print(json.dumps(found[name]), file=file)
      seconds = found[name]['compile_s']
      print(f'{slice_name} {name}: compiled in {seconds:.0f} s', file=sys.stderr)
    rows += [row for name, row in found.items() if name != 'sso']
    if {'sso', 'muon_sphere'} <= set(found):
      pair = found['muon_sphere'], found['sso']
      rows += [at(*pair, number) for number in args.evaluations]
  if args.json:
    print(json.dumps(rows, indent=2))
    return
  print(table(rows))


if __name__ == '__main__':
  main()
