r"""Checks admitted AppDev tasks by a verifier that shares no code with the pipeline's.

python -m benchmarks.second_verifier_appdev --dataset=workdir/appdev --tasks=50

The DevTools protocol is spoken over Chromium's pipe, without playwright. Requests are
answered by the protocol's Fetch domain, without a server; controls are found in
Chromium's own accessibility tree, without a selector engine; input is that of the mouse
and keyboard; time is the protocol's virtual time. The steps are those of spec.json.

For each task: the solution must meet every criterion, and a mutant of the solution, in
which one flag is flipped, must fail the criterion that needs the flag; with --first=N,
the pipeline's verifier judges the mutants of N tasks too, and both must fail the same
criteria. Everything runs in sandboxes. Prints disagreements; exits with 1 if there is
one. docs/pipelines_appdev.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import sys
import time
import tomllib

from benchmarks import devtools_appdev
from m2jax.observe.printable import printable


def jobs_of(path: pathlib.Path) -> tuple[dict[str, tuple[dict[str, str], dict]], str]:
  """('solution' and 'mutant FLAG': app and spec; the criterion that needs the flag)."""
  spec = json.loads((path / 'tests' / 'spec.json').read_text())
  places = (path / 'environment' / 'overlay' / 'app', path / 'solution' / 'app')
  files = {p.name: p.read_text() for place in places for p in sorted(place.glob('*'))}
  first, _, rest = files['app.js'].partition('\n')
  config = json.loads(first.removeprefix('const CONFIG = ').rstrip(';'))
  table = tomllib.loads((path / 'task.toml').read_text())
  mutants = table['metadata']['m2jax']['details']['mutants']
  flag = sorted(mutants)[sum(map(ord, path.name)) % len(mutants)]
  config[flag] = not config[flag]
  script = f'const CONFIG = {json.dumps(config)};\n{rest}'
  jobs = {'solution': (files, spec)}
  jobs[f'mutant {flag}'] = {**files, 'app.js': script}, spec
  return jobs, mutants[flag]


async def second(jobs, timeout_s: float) -> dict:
  """The judgements of this module, in a sandbox."""
  from m2jax import sandbox

  limits = sandbox.Limits(
    **dict(processes=512, memory_bytes=3 << 29, workspace_bytes=256 << 20),
    **dict(cpu_s=300, wall_s=timeout_s, output_bytes=8 << 20),
  )
  contents = {
    'second.py': pathlib.Path(devtools_appdev.__file__).read_bytes(),
    'request.json': json.dumps(jobs).encode(),
  }
  async with await sandbox.create(contents=contents, limits=limits) as box:
    found = await box.exec('python3 -I -B second.py')
  if found.returncode:
    raise RuntimeError(f'{found.returncode}: {found.stderr[-1000:]}')
  return json.loads(found.stdout)


async def first(path: pathlib.Path, files: dict[str, str]) -> dict[str, str]:
  """The judgement of the pipeline's verifier."""
  import tempfile

  from m2jax.tasks import harbor
  from m2jax.tasks.harbor import verifier

  with tempfile.TemporaryDirectory() as place:
    (pathlib.Path(place) / 'app').mkdir()
    for name, text in files.items():
      (pathlib.Path(place) / 'app' / name).write_text(text)
    verdict = await verifier.verify(harbor.read(path), pathlib.Path(place))
  if verdict.outcome == verifier.INVALID:
    raise RuntimeError(f'{path.name}: no first verdict: {verdict.reason}')
  rows = verdict.details['criteria']
  return {
    row['id']: '' if row['passed'] else row['evidence']
    for row in rows
    if row['layer'] == 'interaction'
  }


async def check(path: pathlib.Path, with_first: bool) -> list[str]:
  """What disagrees on a task."""
  jobs, criterion = jobs_of(path)
  found = await second(jobs, 240.0)
  wrong = [f'solution {k}: {v}' for k, v in found['solution'].items() if v]
  name = next(key for key in jobs if key != 'solution')
  bad = {k for k, v in found[name].items() if v}
  if criterion not in bad:
    wrong.append(f'{name} meets {criterion}')
  if with_first:
    theirs = await first(path, jobs[name][0])
    other = {k for k, v in theirs.items() if v}
    if other != bad:
      wrong.append(f'{name}: {sorted(bad)}, the first verifier {sorted(other)}')
  return wrong


async def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument('--dataset', type=pathlib.Path, required=True)
  parser.add_argument('--tasks', type=int, default=50)
  parser.add_argument('--first', type=int, default=0)
  arguments = parser.parse_args()
  from m2jax import sandbox

  paths = sorted((arguments.dataset / 'tasks').glob('[a-z]*/*'))[: arguments.tasks]
  started, disagree = time.monotonic(), 0
  for number, path in enumerate(paths):
    wrong = await check(path.resolve(), number < arguments.first)
    disagree += bool(wrong)
    print(printable('\n  '.join([path.name, *(wrong or ['agrees'])])), flush=True)
  await sandbox.shutdown()
  print(
    f'{len(paths)} tasks in {time.monotonic() - started:.0f} s: {disagree} disagree'
  )
  return int(disagree > 0)


if __name__ == '__main__':
  sys.exit(asyncio.run(main()))
