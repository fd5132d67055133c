"""`python -m benchmarks.claims`; the package's docstring has its commands."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys

from benchmarks import claims
from benchmarks.claims import claim as claim_lib
from experiments import common


def main() -> None:
  parser = argparse.ArgumentParser(prog='python -m benchmarks.claims')
  parser.description = claims.__doc__.split('\n', 1)[0]
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument('--list', action='store_true', help='names and questions')
  what.add_argument('--claim', choices=claim_lib.NAMES)
  parser.add_argument('--workdir', type=pathlib.Path)
  parser.add_argument('--tune', action='store_true', help='make the set-up to commit')
  parser.add_argument('--hours', type=float, default=claim_lib.HOURS, help='of a row')
  parser.add_argument(
    '--trial', type=int, metavar='UPDATES', help='tiny runs of one rate and seed'
  )
  parser.add_argument('--json', action='store_true')
  args = parser.parse_args()
  if args.list:
    for name in claim_lib.NAMES:
      print(f'{name}: {claim_lib.load(name).question}')
    return
  if args.workdir is None:
    parser.error('--workdir is required')
  claim = claim_lib.load(args.claim)
  common.quiet()
  with common.interruptible():
    try:
      if args.tune:
        setup = claim_lib.Row(claim, args.workdir, args.hours).tune()
        print(f'Commit {claim_lib.save_setup(claim, setup)}, then run without --tune.')
        return
      if args.trial:
        claim, setup = claim_lib.trial(claim, args.trial)
      else:
        setup = claim_lib.committed_setup(claim)
    except claim_lib.SetupError as error:
      common.fail(error)
    seeds = claim_lib.SEEDS[:1] if args.trial else claim_lib.SEEDS
    runs = claim_lib.Row(claim, args.workdir, args.hours).measure(setup, seeds)
  path = args.workdir / f'{claim.name}.svg'
  path.write_text(claim_lib.plot(claim, runs))
  if args.json:
    settings = dataclasses.asdict(claim.sizes)
    print(json.dumps({'settings': settings, 'setup': setup, 'runs': runs}, indent=1))
  else:
    given = [setup['commit']] if 'commit' in setup else []
    print(claim_lib.report(claim, runs, *given))
  print(f'Plot: {path}', file=sys.stderr)


if __name__ == '__main__':
  main()
