r"""Near-duplicates among a pipeline's draws, by words and by facts.

  python -m benchmarks.near_duplicates --count=300 [--json] [PIPELINE ...]

Candidates are drawn as `experiments.make_tasks` draws them, without sandboxes and
without those that the pipeline itself rejects. A column counts near-duplicates of an
earlier candidate that was kept: by runs of three words at a Jaccard similarity of 0.9,
and as the pipeline does it, by facts where statements come from templates. The last
column has the families of the latter.
docs/pipelines.md.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import sys
import tempfile
from pathlib import Path

from m2jax import kinds
from m2jax_pipelines import duplicates
from m2jax_pipelines.candidate import Candidate
from m2jax_pipelines.context import Context
from m2jax_pipelines.llm import LLMClient

PIPELINES = ('spreadsheets', 'slides', 'reasoning', 'appdev')
_BY_WORDS = 0.9


async def draws(name: str, count: int, directory: Path) -> list[Candidate]:
  """The first `count` candidates of a pipeline that it does not reject itself."""
  module = kinds.module('m2jax_pipelines', name)
  config = module.Config()
  context = Context(directory, LLMClient(config.author, 'author'))
  found = []
  async for candidate in module.candidates(config, context):
    if candidate.draft is not None:
      found.append(candidate)
    if len(found) == count:
      break
  return found


def rejected(candidates, threshold: float, features) -> list[Candidate]:
  """Candidates that are near-duplicates of an earlier one that was kept."""
  near, out = duplicates.NearDuplicates(threshold), []
  for candidate in candidates:
    own = features(candidate)
    if near.find(own):
      out.append(candidate)
    else:
      near.add(candidate.id, own)
  return out


def count(name: str, number: int) -> dict:
  """The row of a pipeline."""
  with tempfile.TemporaryDirectory() as directory:
    candidates = asyncio.run(draws(name, number, Path(directory)))
  threshold = kinds.module('m2jax_pipelines', name).Config().near_duplicate
  words = rejected(candidates, _BY_WORDS, lambda c: duplicates.runs(c.text))
  own = rejected(candidates, threshold, lambda c: c.own or duplicates.runs(c.text))
  return {
    'words': len(words),
    'own': len(own),
    'families': dict(collections.Counter(c.family for c in own).most_common()),
  }


def main(argv=None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    'pipelines', nargs='*', metavar='PIPELINE', help=', '.join(PIPELINES)
  )
  parser.add_argument('--count', type=int, default=300, help='candidates of each')
  parser.add_argument('--json', action='store_true')
  options = parser.parse_args(argv)
  if unknown := set(options.pipelines) - set(PIPELINES):
    parser.error(f'no such pipeline: {sorted(unknown)}; expected {PIPELINES}')
  rows, names = {}, options.pipelines or PIPELINES
  if not options.json:
    print(f'| of {options.count} | by words | by the pipeline | its families |')
    print('|---|---|---|---|', flush=True)
  try:
    for name in names:
      row = rows[name] = count(name, options.count)
      families = ', '.join(f'{n} {f}' for f, n in row['families'].items())
      if not options.json:
        print(f'| {name} | {row["words"]} | {row["own"]} | {families} |', flush=True)
  except KeyboardInterrupt:
    sys.exit('stopped before all pipelines were counted')
  if options.json:
    print(json.dumps(rows))


if __name__ == '__main__':
  main()
