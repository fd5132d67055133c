"""Queries, correct responses of each and passes over them, at fixed compute.

  python -m benchmarks.responses --workdir=DIR [--seeds 0 1 2] [--json]

A small model learns repair tasks (`m2jax_pipelines.tasks.repair`) from a teacher, then
attempts training tasks. All arms have the same number of attempts and training steps
and differ in how the attempts are spent: on many tasks once, or on few tasks often. SFT
then continues with every distinct attempt that the verifier accepts. Arms are named
QUERIESxRESPONSES; the first also trains for twice as many steps, which shows what more
passes over the same chats are worth. `base` is the model before the attempts.

Each is evaluated at temperature 1 on held-out tasks: of the sizes trained, and longer.
Prints medians over seeds with their range. Runs resume, and measurements in DIR are not
repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from benchmarks import harness, scaffolds
from experiments import common, fields
from m2jax.forge import run
from m2jax.forge.config import ForgeConfig
from m2jax_pipelines import verified

BASE, LONGER = 'base', '_longer'
SCAFFOLD = 'one'


def names(args: argparse.Namespace) -> tuple[str, ...]:
  """The arms; each QUERIESxRESPONSES has `args.attempted` attempts."""
  spent = [f'{args.attempted // trials}x{trials}' for trials in args.trials]
  return BASE, *spent, spent[0] + LONGER


def attempts_of(arm: str) -> tuple[int, int]:
  queries, responses = arm.removesuffix(LONGER).split('x')
  return int(queries), int(responses)


def config(arm: str, seed: int, args) -> ml_collections.ConfigDict:
  """SFT on demonstrations, or on what the base model's attempts gave."""
  c = scaffolds.config(SCAFFOLD, seed, args)
  if arm == BASE:
    return c
  path = chats_path(arm, seed, args)
  c.init_from = str(args.workdir / f'{BASE}-{seed}')
  c.sft.recorded = str(path)
  c.sft.demonstrations = len(path.read_text().splitlines())
  scaffolds.lower_rates(c)
  scaffolds.set_steps(c, args.more_steps * (2 if arm.endswith(LONGER) else 1))
  return fields.complete(c, ForgeConfig)


def chats_path(arm: str, seed: int, args):
  directory = args.workdir / f'attempts-{arm.removesuffix(LONGER)}-{seed}'
  return directory / 'verified.jsonl'


def sample(arm: str, seed: int, args) -> dict[str, int]:
  """The base model's attempts; returns how many there are of each outcome."""
  path, (queries, responses) = chats_path(arm, seed, args), attempts_of(arm)
  path.parent.mkdir(parents=True, exist_ok=True)
  built = common.build(ForgeConfig, config(BASE, seed, args))
  suite = scaffolds.suite(
    built, SCAFFOLD, split='train', count=queries, trials=responses, seed=seed + 1
  )
  with scaffolds.served_at(built, args.workdir / f'{BASE}-{seed}') as server:
    rows = scaffolds.attempts(server, suite, path.parent / 'attempts.jsonl')
  wanted = verified.SampleConfig(
    suite=suite, scaffolds={SCAFFOLD: suite.agent}, keep=responses, thinking=True
  )
  found = verified.select(wanted, {SCAFFOLD: rows}, f'{BASE}-{seed}')
  verified.write(path, found.chats)
  solved = {row['task'] for row in rows if row['success'] == 1.0}
  return {'attempts': len(rows), 'chats': len(found.chats), 'solved': len(solved)}


def held_out(built: ForgeConfig, workdir, args) -> dict[str, list[int]]:
  """Family -> successes and attempts, of trained sizes and longer ones."""
  found = {}
  low, high = built.tasks.steps
  with scaffolds.served_at(built, workdir) as server:
    for steps in ((low, high), (high + 1, high + 1)):
      tasks = dataclasses.replace(built.tasks, steps=steps)
      of_size = dataclasses.replace(built, tasks=tasks)
      options = dict(split='held_out', count=args.tasks, trials=1)
      suite = scaffolds.suite(of_size, SCAFFOLD, **options)
      name = 'trained' if steps[0] == low else 'longer'
      rows = scaffolds.attempts(server, suite, workdir / f'held_out_{name}.jsonl')
      found[name] = [sum(row['success'] for row in rows), len(rows)]
  return found


def measure(arm: str, seed: int, args) -> dict[str, Any]:
  """One arm, resumed if it was interrupted."""
  started, workdir = time.monotonic(), args.workdir / f'{arm}-{seed}'
  counts = {} if arm == BASE else sample(arm, seed, args)
  built = common.build(ForgeConfig, config(arm, seed, args))
  run.run(built, workdir)
  found = {'arm': arm, 'seed': seed, 'steps': built.sft.loop.steps, **counts}
  found['success'] = held_out(built, workdir, args)
  print(f'seed {seed}, {arm}: {time.monotonic() - started:.0f} s', file=sys.stderr)
  return found


def table(runs: Sequence[Mapping[str, Any]]) -> str:
  heads = ('queries × responses', 'solved', 'chats', 'SFT steps', 'trained', 'longer')
  lines = []
  for arm in dict.fromkeys(r['arm'] for r in runs):
    own = [r for r in runs if r['arm'] == arm]
    cells = ['none, before' if arm == BASE else ' × '.join(map(str, attempts_of(arm)))]
    for name in ('solved', 'chats', 'steps'):
      values = [r[name] for r in own if name in r]
      cells.append(f'{statistics.median(values):.0f}' if values else '')
    for name in ('trained', 'longer'):
      pairs = [r['success'][name] for r in own]
      cells.append(harness.spread([100 * good / n for good, n in pairs]))
    lines.append(cells)
  return harness.markdown(heads, lines)


def main() -> None:
  parser = harness.parser(__doc__, workdir=True)
  parser.add_argument('--layers', type=int, default=2)
  parser.add_argument('--steps', type=int, default=2, help='most, of a trained program')
  parser.add_argument('--demonstrations', type=int, default=400)
  parser.add_argument('--tokens', type=int, default=4096, help='of an SFT step')
  parser.add_argument('--sft_steps', type=int, default=600, help='of the base model')
  parser.add_argument('--attempted', type=int, default=960, help='attempts of an arm')
  parser.add_argument('--trials', type=int, nargs='+', default=[1, 4, 16])
  parser.add_argument('--more_steps', type=int, default=150, help='of SFT on attempts')
  parser.add_argument('--tasks', type=int, default=200, help='held out')
  args = parser.parse_args()
  harness.run(args, names(args), measure, table, ['trials'])


if __name__ == '__main__':
  main()
