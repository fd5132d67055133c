"""The plan's collectives of small programs, by both supported compilers.

  python -m benchmarks.plan_compilers .venv311/bin/python .venv312/bin/python

Claim: Python 3.11 with jax 0.10 and Python 3.12 with jax 0.12, each with its libtpu,
give the plan the same collectives: kinds, groups and bytes. Their notations of
asynchronous collectives differ, and one that the parser overlooked would be missing
from every figure. Each interpreter has the package with its extra `tpu` installed; one
layer of M2 is compiled for 64 chips. Exit status 1: a kind's bytes differ by more than
TOLERANCE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

TOLERANCE = 0.02
SMALL = 0.002  # of all bytes: counts and norms, which compilers combine as they like
TOPOLOGY, DEVICES, CONTEXT = 'v5p:4x4x4', 64, 1024
MESHES = {
  'fsdp tensor': dict(fsdp=16, tensor=4, rules='fsdp'),
  'fsdp context': dict(fsdp=16, context=4, rules='fsdp'),
  'fsdp expert': dict(fsdp=8, expert=8),
}


def worker(name: str) -> None:
  """Prints versions, and [kind, group, bytes] of one case's step."""
  import dataclasses
  import importlib.metadata

  import jax

  jax.config.update('jax_platforms', 'cpu')
  from configs import m2
  from m2jax import config, sharding
  from m2jax.plan import plan, topology, workloads

  mesh = sharding.MeshConfig(**MESHES[name])
  model = dataclasses.replace(config.m2(), num_layers=1, num_mtp_modules=0)
  load = workloads.Workload('pretrain', DEVICES, CONTEXT, meshes=(mesh,))
  options = {**m2.COMPILER_OPTIONS, 'xla_optimization_level': 'EFFORT_O1'}
  one = workloads.PlanConfig(model, {'step': load}, compiler_options=options)
  placed = workloads.place('step', load, DEVICES)
  made = plan.make(one, placed, topology.load(TOPOLOGY))
  micro = made.programs[0]
  versions = f'jax {jax.__version__}, libtpu {importlib.metadata.version("libtpu")}'
  found = [[c.kind, c.group, c.bytes] for c in micro.collectives]
  print(json.dumps(dict(versions=versions, found=found)))


def run(interpreter: str, name: str) -> dict:
  """One case by one interpreter."""
  command = [interpreter, '-m', 'benchmarks.plan_compilers', '--worker', name]
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
  if done.returncode:
    raise SystemExit(f'{interpreter}: {name} does not compile')
  found = json.loads(done.stdout.splitlines()[-1])
  sizes = {(kind, group): size for kind, group, size in found['found']}
  return dict(versions=found['versions'], sizes=sizes)


def differences(first: dict, second: dict) -> list[tuple[str, int]]:
  """(kind, group) of collectives whose bytes differ."""
  least = SMALL * max(sum(first.values()), sum(second.values()))
  found = []
  for key in sorted(set(first) | set(second)):
    a, b = first.get(key, 0.0), second.get(key, 0.0)
    if abs(a - b) > max(least, TOLERANCE * max(a, b)):
      found.append(key)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('interpreters', nargs='*', help='two, one of each compiler')
  parser.add_argument('--cases', nargs='+', default=list(MESHES))
  parser.add_argument('--worker', choices=MESHES)
  args = parser.parse_args()
  if args.worker:
    worker(args.worker)
    return
  if len(args.interpreters) != 2:
    parser.error('give two interpreters, one of each compiler')
  wrong = 0
  for name in args.cases:
    one, other = (run(interpreter, name) for interpreter in args.interpreters)
    print(f'{name}: {one["versions"]} | {other["versions"]}')
    differ = differences(one['sizes'], other['sizes'])
    for key in sorted(set(one['sizes']) | set(other['sizes'])):
      a, b = (found['sizes'].get(key, 0.0) / 1e9 for found in (one, other))
      mark = '  DIFFERENT' if key in differ else ''
      print(f'  {key[0]:18s} {key[1]:4d} {a:10.3f} GB {b:10.3f} GB{mark}')
    wrong += len(differ)
  sys.exit(1 if wrong else 0)


if __name__ == '__main__':
  main()
