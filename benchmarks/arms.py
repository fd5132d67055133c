"""Benchmarks of several arms over seeds: common flags, kept results, spreads."""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from experiments import common
from m2jax.train.workdir import WorkdirError


def parser(doc: str) -> argparse.ArgumentParser:
  """The flags that all have: --workdir, --seeds and --json."""
  found = argparse.ArgumentParser(description=doc.split('\n', 1)[0])
  found.add_argument('--workdir', type=pathlib.Path, required=True)
  found.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
  found.add_argument('--json', action='store_true')
  return found


def run(
  args: argparse.Namespace,
  arms: Sequence[str],
  measure: Callable[[str, int, argparse.Namespace], dict[str, Any]],
  table: Callable[[list[dict[str, Any]]], str],
) -> None:
  """Measures each arm with each seed, once for a workdir, and prints the results.

  Ctrl-C and SIGTERM end it with one line and code 130; what was measured stays. So does
  a directory that cannot be used, with code 2.
  """
  args.workdir = args.workdir.absolute()
  args.workdir.mkdir(parents=True, exist_ok=True)
  common.quiet()
  runs = []
  with common.interruptible():
    for seed in args.seeds:
      for arm in arms:
        path = args.workdir / f'{arm}_{seed}.json'
        if not path.exists():
          try:
            path.write_text(json.dumps(measure(arm, seed, args)))
          except WorkdirError as error:
            common.fail(error)
        runs.append(json.loads(path.read_text()))
  if args.json:
    settings = vars(args) | {'workdir': str(args.workdir)}
    print(json.dumps({'settings': settings, 'runs': runs}, indent=1))
  else:
    print(table(runs))


def spread(values: Sequence[float], digits: int = 1) -> str:
  """Median, minimum and maximum: '12.0 [11.5, 14.0]'."""
  found = statistics.median(values), min(values), max(values)
  middle, low, high = (f'{value:.{digits}f}' for value in found)
  return f'{middle} [{low}, {high}]'
