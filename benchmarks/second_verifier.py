r"""A second verifier of SWE-scaling's tasks, which shares no code with the first.

python -m benchmarks.second_verifier --workdir=workdir/swe --count=50

It reads the files of a task directory itself, and runs pytest's command line with
--junitxml in a new sandbox, on the tree before and after the solution: every F2P test
must fail before and pass after, every P2P test pass on both. A written test must pass
on the right source and fail on the bug; timed tests must take longer before than after,
in each of three pairs of runs; the line of a review must be the only one whose
syntax tree differs. A disagreement with the admission is printed.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import collections
import itertools
import json
import random
import sys
import tarfile
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from m2jax import sandbox

_LIMITS = sandbox.Limits(
  cpu_s=300, memory_bytes=1 << 30, workspace_bytes=256 << 20, wall_s=300.0
)


def files_of(task: Path) -> tuple[dict[str, bytes], dict[str, bytes], dict]:
  """(the release, what the agent gets in its place, config of the verifier)."""
  release = {}
  with tarfile.open(task / 'environment' / 'workspace.tar.gz') as tar:
    for member in tar.getmembers():
      if member.isreg():
        release[member.name] = tar.extractfile(member).read()
  overlay = task / 'environment' / 'overlay'
  changed = {
    str(p.relative_to(overlay)): p.read_bytes()
    for p in overlay.glob('**/*')
    if p.is_file()
  }
  return release, changed, json.loads((task / 'tests' / 'config.json').read_bytes())


async def outcomes(dataset: Path, site: str, tree, roots, files) -> dict[tuple, str]:
  """{(class, name): outcome} of a run."""
  found = await cases(dataset, site, tree, roots, files)
  return {name: outcome for name, (outcome, _) in found.items()}


async def cases(
  dataset: Path, site: str, tree, roots, files
) -> dict[tuple, tuple[str, float]]:
  """{(class, name): (outcome, seconds)} from the junit file of a run."""
  host = sandbox.Host(
    read_only=(
      (sys.base_prefix, sys.base_prefix),
      (str((dataset / 'sites').resolve()), '/packages'),
    )
  )
  contents = {f'work/{path}': data for path, data in tree.items()}
  paths = ':'.join(
    [*(f'/workspace/work/{root}' for root in roots), f'/packages/{site}']
  )
  names = ' '.join(f"'{name}'" for name in files)
  command = (
    f'cd work; export PYTHONPATH={paths} PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1\n'
    f'python3 -m pytest -q -o addopts= --junitxml=/workspace/junit.xml {names}'
    ' --continue-on-collection-errors > /workspace/log 2>&1'
  )
  async with await sandbox.create(host=host, limits=_LIMITS, contents=contents) as box:
    await box.exec(command)
    try:
      text = await box.read('junit.xml')
    except FileNotFoundError:
      return {}
  found = {}
  for case in ElementTree.fromstring(text).iter('testcase'):
    bad = [c.tag for c in case if c.tag in ('failure', 'error', 'skipped')]
    outcome = bad[0] if bad else 'passed'
    found[case.get('classname', ''), case.get('name')] = (
      outcome,
      float(case.get('time')),
    )
  return found


def key(test: str) -> tuple[str, str]:
  """The junit names of a test's id."""
  path, _, rest = test.partition('::')
  head, bracket, parameters = rest.partition('[')
  *classes, name = head.split('::')
  module = path.removesuffix('.py').replace('/', '.')
  return '.'.join([module, *classes]), name + bracket + parameters


async def check(dataset: Path, task: Path) -> str:
  """'' if this verifier agrees that the task is right, else why not."""
  release, changed, config = files_of(task)
  facts = tomllib.loads((task / 'task.toml').read_text())['metadata']['m2jax']
  gone = [p for p in facts['remove'] if p not in {t.partition('::')[0] for t in
    config.get('f2p', ())}]  # fmt: skip
  site, roots = facts['site'], config['roots']
  if config['kind'] == 'review':
    return reviewed(release, changed, config, task)
  if config['kind'] == 'written_test':
    path = config['test']
    written = {path: (task / 'solution' / 'files' / path).read_bytes()}
    right = await outcomes(dataset, site, release | written, roots, [path])
    wrong = await outcomes(dataset, site, release | changed | written, roots, [path])
    if not right or set(right.values()) != {'passed'}:
      return 'the test does not pass on the right source'
    return '' if 'failure' in wrong.values() else 'the test does not find the bug'
  before = {p: d for p, d in release.items() if p not in gone} | changed
  solved = dict(before)
  for path in (task / 'solution' / 'files').glob('**/*'):
    if path.is_file():
      solved[str(path.relative_to(task / 'solution' / 'files'))] = path.read_bytes()
  if config['kind'] == 'performance':
    runs = [
      await cases(dataset, site, tree, roots, config['files'])
      for tree in (before, solved) * 3
    ]
    return compared(runs, config)
  old = await outcomes(dataset, site, before, roots, config['files'])
  new = await outcomes(dataset, site, solved, roots, config['files'])
  expected = dict.fromkeys((*config['f2p'], *config['p2p']), 'passed')
  expected |= {t: 'skipped' for t, s in config['status'].items() if s == 'XFAIL'}
  wrong = [t for t in config['f2p'] if old.get(key(t)) == expected[t]]
  wrong += [t for t in config['p2p'] if old.get(key(t)) != expected[t]]
  wrong += [t for t in expected if t in {*config['f2p'], *config['p2p']}
    and new.get(key(t)) != expected[t]]  # fmt: skip
  return f'{len(wrong)} tests differ, such as {wrong[0]}' if wrong else ''


def compared(runs, config) -> str:
  """Checks runs of the slow and the solved tree in turns; the first is the slow one."""
  for ran in runs:
    for test in config['p2p']:
      expected = 'skipped' if config['status'].get(test) == 'XFAIL' else 'passed'
      if ran.get(key(test), ('', 0.0))[0] != expected:
        return f'{test} differs'
  slow, fast = (
    [sum(ran[key(test)][1] for test in config['timed']) for ran in part]
    for part in (runs[::2], runs[1::2])
  )
  slower = all(a > b for a, b in zip(slow, fast, strict=True))
  return '' if slower else f'not slower each time: {slow} and {fast} s'


def reviewed(release, changed, config, task: Path) -> str:
  """Checks a review's line: the rest of the file must mean the same."""
  path = config['path']
  answer = json.loads((task / 'solution' / 'files' / 'review.json').read_bytes())
  before, after = ast.parse(release[path]), ast.parse(changed[path])
  if ast.dump(before) == ast.dump(after):
    return 'nothing but comments differs'
  line = _difference(before, after, 0)
  near = abs(line - answer['line']) <= 4
  return '' if near else f'the difference is at {line}'


def _difference(old: ast.AST, new: ast.AST, line: int) -> int:
  """Line of the first difference of two syntax trees, in the second; -1: none.

  A node without a line has that of the node around it.
  """
  line = getattr(new, 'lineno', line)
  if type(old) is not type(new):
    return line
  children = []
  for field in new._fields:
    a, b = getattr(old, field, None), getattr(new, field, None)
    if isinstance(a, list) and isinstance(b, list):
      children += itertools.zip_longest(a, b)
    else:
      children.append((a, b))
  for a, b in children:
    if isinstance(a, ast.AST) and isinstance(b, ast.AST):
      if (found := _difference(a, b, line)) >= 0:
        return found
    elif type(a) is not type(b) or a != b:
      return getattr(b, 'lineno', line)
  return -1


async def sample(dataset: Path, count: int, seed: int) -> dict:
  """Checks a sample of the admitted tasks."""
  found = sorted(p for p in (dataset / 'tasks').glob('*/*') if p.name[0] != '.')
  chosen = random.Random(seed).sample(found, min(count, len(found)))
  wrong, kinds = {}, collections.Counter()
  try:
    for number, task in enumerate(chosen, 1):
      kinds[json.loads((task / 'tests' / 'config.json').read_bytes())['kind']] += 1
      reason = await check(dataset, task)
      if reason:
        wrong[task.name] = reason
      print(f'\r{number} of {len(chosen)}', end='', file=sys.stderr)
  finally:
    await sandbox.shutdown()
  return {'checked': len(chosen), 'kinds': dict(kinds), 'disagreements': wrong}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--workdir', type=Path, required=True)
  parser.add_argument('--count', type=int, default=50)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--json', action='store_true')
  given = parser.parse_args()
  result = asyncio.run(sample(given.workdir, given.count, given.seed))
  if given.json:
    print(json.dumps(result))
    return
  print(f'\n{result["checked"]} tasks checked: {result["kinds"]}')
  for name, reason in result['disagreements'].items():
    print(f'{name}: {reason}')
  print(f'disagreements: {len(result["disagreements"])}')


if __name__ == '__main__':
  main()
