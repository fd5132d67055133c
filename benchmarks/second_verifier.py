r"""A second verifier of SWE-scaling's tasks, which shares no code with the first.

python -m benchmarks.second_verifier --workdir=workdir/swe --count=50

It reads the files of a task directory itself, and runs pytest's command line with
--junitxml in a new sandbox, on the tree before and after the solution: every F2P test
must fail before and pass after, every P2P test pass on both. Other tests of these files
do not run, since a random one may never end on buggy code. A written test must pass on
the right source and fail on the bug; timed tests, which are P2P, must take longer
before than after, in each of three pairs of runs; the line of a review must be the only
one whose syntax tree differs. Prints disagreements with the admission and, separately,
tasks left undecided because a run was cut off.
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
from m2jax.observe.printable import printable

_LIMITS = sandbox.Limits(
  cpu_s=300, memory_bytes=1 << 30, workspace_bytes=256 << 20, wall_s=900.0
)

# A plugin of pytest that keeps the tests of a list.
_ONLY = """\
import json

def pytest_collection_modifyitems(items):
  with open('/workspace/only/tests.json') as file:
    tests = {*json.load(file)}
  items[:] = [item for item in items if item.nodeid in tests]
"""


class CutOffError(Exception):
  """A run was ended by a limit or a signal, so its outcomes say nothing."""


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


async def outcomes(
  dataset: Path, site: str, tree, roots, files, only=None
) -> dict[tuple, str]:
  """{(class, name): outcome} of a run."""
  found = await cases(dataset, site, tree, roots, files, only)
  return {name: outcome for name, (outcome, _) in found.items()}


async def cases(
  dataset: Path, site: str, tree, roots, files, only=None
) -> dict[tuple, tuple[str, float]]:
  """{(class, name): (outcome, seconds)} from the junit file of a run.

  Args:
    only: ids of the tests to run; None: all of `files`.

  Raises:
    CutOffError: pytest did not come to its end.
  """
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
  plugin = ''
  if only is not None:
    contents['only/keep_tests.py'] = _ONLY.encode()
    contents['only/tests.json'] = json.dumps(only).encode()
    paths, plugin = f'{paths}:/workspace/only', ' -p keep_tests'
  names = ' '.join(f"'{name}'" for name in files)
  command = (
    f'cd work; export PYTHONPATH={paths} PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1\n'
    f'python3 -m pytest -q -o addopts={plugin} --junitxml=/workspace/junit.xml {names}'
    ' --continue-on-collection-errors > /workspace/log 2>&1'
  )
  async with await sandbox.create(host=host, limits=_LIMITS, contents=contents) as box:
    ended = await box.exec(command)
    if ended.timed_out or ended.oom or ended.returncode >= 128:
      raise CutOffError(f'exit status {ended.returncode} after {ended.wall_s:.0f} s')
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


def _metadata(task: Path) -> dict:
  return tomllib.loads((task / 'task.toml').read_text())['metadata']['m2jax']


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
  facts = _metadata(task)
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
  tests = [*config.get('f2p', ()), *config['p2p']]
  if config['kind'] == 'performance':
    runs = [
      await cases(dataset, site, tree, roots, config['files'], tests)
      for tree in (before, solved) * 3
    ]
    return compared(runs, config)
  old = await outcomes(dataset, site, before, roots, config['files'], tests)
  new = await outcomes(dataset, site, solved, roots, config['files'], tests)
  expected = dict.fromkeys(tests, 'passed')
  expected |= {t: 'skipped' for t, s in config['status'].items() if s == 'XFAIL'}
  wrong = [t for t in config['f2p'] if old.get(key(t)) == expected[t]]
  wrong += [t for t in config['p2p'] if old.get(key(t)) != expected[t]]
  wrong += [t for t in tests if new.get(key(t)) != expected[t]]
  return f'{len(wrong)} tests differ, such as {wrong[0]}' if wrong else ''


def compared(runs, config) -> str:
  """Checks alternate runs of the slow and the solved tree, starting with the slow."""
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


def chosen(dataset: Path, count: int, seed: int, family: str = '') -> list[Path]:
  """A sample of the admitted tasks, of one family if it is given."""
  found = sorted(p for p in (dataset / 'tasks').glob('*/*') if p.name[0] != '.')
  if family:
    found = [p for p in found if _metadata(p)['family'] == family]
  return random.Random(seed).sample(found, min(count, len(found)))


async def checked(dataset: Path, tasks: list[Path]) -> dict:
  """Checks tasks; returns disagreements with their admission, and undecided tasks."""
  wrong, undecided, kinds = {}, {}, collections.Counter()
  try:
    for number, task in enumerate(tasks, 1):
      kinds[json.loads((task / 'tests' / 'config.json').read_bytes())['kind']] += 1
      try:
        if reason := await check(dataset, task):
          wrong[task.name] = reason
      except CutOffError as error:
        undecided[task.name] = str(error)
      print(f'\r{number} of {len(tasks)}', end='', file=sys.stderr)
  finally:
    await sandbox.shutdown()
  return {
    'checked': len(tasks),
    'kinds': dict(kinds),
    'disagreements': wrong,
    'undecided': undecided,
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--workdir', type=Path, required=True)
  parser.add_argument('--count', type=int, default=50)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--family', default='', help='such as performance')
  parser.add_argument('--json', action='store_true')
  given = parser.parse_args()
  tasks = chosen(given.workdir, given.count, given.seed, given.family)
  if not tasks:
    of = f' of the family {given.family}' if given.family else ''
    parser.error(f'there are no tasks{of} in {given.workdir / "tasks"}')
  try:
    result = asyncio.run(checked(given.workdir, tasks))
  except KeyboardInterrupt:
    sys.exit('\nstopped before all tasks were checked: there is no result')
  if given.json:
    print(json.dumps(result))
    return
  print(f'\n{result["checked"]} tasks checked: {result["kinds"]}')
  for verdict in ('undecided', 'disagreements'):
    for name, reason in result[verdict].items():
      print(printable(f'{name}: {reason}'))
    print(f'{verdict}: {len(result[verdict])}')


if __name__ == '__main__':
  main()
