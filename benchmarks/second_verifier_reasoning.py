"""Problems of each generator of `reasoning`, solved a second time from their text.

  python -m benchmarks.second_verifier_reasoning --count=1200 [--json] [GENERATOR ...]

Prints a line per generator: how many problems `problems.defect` rejects and, of the
others, how many `m2jax_pipelines.recheck` solves alike, leaves open (the text does not
decide) or solves differently. Exits with 1 if it solves any differently.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys

from benchmarks import harness
from m2jax_pipelines import recheck
from m2jax_pipelines.tasks.reasoning import problems

COLUMNS = ('rejected', 'agree', 'open', 'disagree')


def count(generator: str, draws: int, levels: int) -> collections.Counter[str]:
  """Counts the outcomes of a generator's problems."""
  found: collections.Counter[str] = collections.Counter()
  for number in range(draws):
    level, key = number % levels, f'second/{number}'
    if problems.defect(generator, level, key):
      found['rejected'] += 1
      continue
    problem = problems.draw(generator, level, key)
    ours = recheck.SOLVERS[generator](problem.question)
    kind = 'agree' if str(ours) == problem.answer else 'disagree'
    found['open' if ours is None else kind] += 1
  return found


def main(argv=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('generators', nargs='*', default=sorted(recheck.SOLVERS))
  parser.add_argument('--count', type=int, default=100, help='problems of each')
  parser.add_argument('--levels', type=int, default=3, help='difficulties, in turn')
  parser.add_argument('--json', action='store_true')
  options = parser.parse_args(argv)
  rows = {
    name: count(name, options.count, options.levels) for name in options.generators
  }
  if options.json:
    print(json.dumps({name: dict(row) for name, row in rows.items()}))
  else:
    lines = [[name, *(row[c] for c in COLUMNS)] for name, row in rows.items()]
    print(harness.markdown(['generator', *COLUMNS], lines))
  return int(any(row['disagree'] for row in rows.values()))


if __name__ == '__main__':
  sys.exit(main())
