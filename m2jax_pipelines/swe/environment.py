"""Stage 2, environments: execute the tests, repair what is missing, execute again.

The report builds an image per change with an agent in an execute-and-repair loop. Here
an environment is a directory of packages beside the interpreter, mounted read-only; the
agent is a list of repairs, each triggered by what the tests printed. The tests run in
the sandbox, without a network; only pip, on the host, installs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
import re
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from m2jax import sandbox
from m2jax.tasks.harbor import compose, verifier
from m2jax_pipelines.make import LIMITS
from m2jax_pipelines.swe import alone, collect, grade, proved_canaries, requirements

HARNESS = Path(__file__).with_name('harness.py')
PYTEST = 'pytest==8.4.2'
_TEST_FILE = re.compile(r'(^|/)(test_[^/]*|[^/]*_test)\.py$')
_ROOTS = ('src', 'lib', '')
_PASS = ('PASSED', 'XFAIL')
_RUN_S = 480.0
_START_CHILD = 'os.fork multiprocessing/popen_fork.py:Popen._launch'
_END_CHILD = 'os.kill multiprocessing/popen_fork.py:Popen._send_signal'
_installing: dict[Path, asyncio.Event] = {}  # sites, by packages prepared at once
# Modes of the runs after the first. More of them show tests that are named by the order
# of a set: before Python 3.12 the hash of None is an address, another in each process.
_AGAIN = ('profile', *(['run'] * 3 if sys.version_info < (3, 12) else []))
_ATTEMPTS = 3  # a run of hours does not end because a sandbox failed


class NoEnvironment(Exception):
  """The tests of a package cannot be made to run; the message says why."""


@dataclasses.dataclass(frozen=True)
class Environment:
  """A package whose tests run.

  Attributes:
    source: the release.
    site: directory in sites/.
    requirements: the distributions installed there.
    roots: directories of the tree from which it is imported.
    code: pattern of the package's own sources (`compose`).
    files: test files.
    status, seconds: each test's status and time.
    import_s: CPU seconds before the first test, to import and collect them.
    calls: {path: {first line of a function: tests that call it}}.
    repairs: what was done, in order.
    audited: audit events of the right sources (guards.py).
    canaries: by number, the tests whose canary fails, as it must (canaries.py).
    untimed_canaries: files with canaries that leave threads when they fail.
    pytest: command that runs the tests in an agent's workspace; '' if none was found.
  """

  source: collect.Source
  site: str
  requirements: tuple[str, ...]
  roots: tuple[str, ...]
  code: tuple[str, ...]
  files: tuple[str, ...]
  status: Mapping[str, str]
  seconds: Mapping[str, float]
  import_s: float
  calls: Mapping[str, Mapping[int, Sequence[str]]]
  repairs: tuple[str, ...]
  audited: tuple[str, ...] = ()
  canaries: tuple[tuple[str, ...], ...] = ()
  untimed_canaries: frozenset[str] = frozenset()
  pytest: str = ''

  @property
  def module(self) -> str:
    """Name of the package's module."""
    [pattern] = self.code
    return Path(pattern.removesuffix('/*.py')).stem


@dataclasses.dataclass(frozen=True)
class Output:
  """What the harness sent: records of tests, the last record, the rest by mutant."""

  tests: dict[str, dict[str, Any]]
  end: Mapping[str, Any]
  mutants: dict[int, dict[str, Any]]
  wall_s: float


def layout(source: collect.Source) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """(roots, patterns of the package's sources). Raises NoEnvironment."""
  wanted = source.name.replace('-', '_').lower()
  short = wanted.removeprefix('python_')
  for root in _ROOTS:
    prefix = f'{root}/' if root else ''
    for name in (wanted, short):
      for path in source.files:
        if path.lower() == f'{prefix}{name}/__init__.py':
          return (root,), (f'{path.removesuffix("__init__.py")}*.py',)
        if path.lower() == f'{prefix}{name}.py':
          return (root,), (path,)
  raise NoEnvironment(f'{source.name}: no package in {_ROOTS}')


def is_test(path: str) -> bool:
  """Whether a path belongs to the tests: no work of an agent."""
  parts = path.split('/')
  return (
    bool(_TEST_FILE.search(path))
    or parts[-1] in ('conftest.py', 'sitecustomize.py', 'usercustomize.py')
    or any(part in ('tests', 'test', 'testing') for part in parts[:-1])
  )


EXCLUDE = (
  'test_*',
  '*/test_*',
  '*_test.py',
  'tests/*',
  'test/*',
  '*/tests/*',
  '*/test/*',
  '*conftest.py',
  '*customize.py',
  '*.pth',
)


async def build(
  source: collect.Source,
  dataset: Path,
  repairs: int,
  test_s: float = math.inf,
  suite_s: float = math.inf,
) -> Environment:
  """Finds an environment in which the tests run, twice alike.

  Args:
    source: the release.
    dataset: has the sites.
    repairs: most installations.
    test_s: a test that takes longer is not used.
    suite_s: tests are used, fastest first, until they take this long.

  Raises:
    NoEnvironment: within `repairs` installations none is found.
  """
  roots, code = layout(source)
  files = sorted(p for p in source.files if _TEST_FILE.search(p))
  if not files:
    raise NoEnvironment(f'{source.name}: no test files in the source distribution')
  installed, log, ran = await _installed(source, dataset, repairs, roots, files)
  key = await site(installed, dataset)
  seconds = {t: r.get('s', 0.0) for t, r in ran.tests.items() if r['status'] in _PASS}
  chosen = _fastest(seconds, test_s, suite_s)
  files = [f for f in files if any(t.startswith(f'{f}::') for t in chosen)]
  # As for the verdict: tests that need a process that raises no event are left out.
  alone_ = not alone.may_start(audited(ran))
  request = dict(roots=roots, files=files, keep=chosen, alone=alone_)
  # In the look that canaries have (canaries.py), which a few tests may be sensitive to.
  tree = {**source.files, **proved_canaries.changed_files(source.files, files)}
  runs = [ran]
  for mode in _AGAIN:
    runs.append(await run(dataset, key, tree, mode, **request))
    _require_results(runs[-1], source)
  again = runs[1]
  status, left_out = _stable(chosen, runs)
  log += left_out
  broken = [t for t, r in ran.tests.items() if r['status'] in ('ERROR', 'FAILED')]
  if broken:
    log.append(f'leave out {len(broken)} failing tests or files')
  right = audited(ran, again)
  canaries, untimed = await _canaries(dataset, key, source, status, request, right)
  calls = {
    path: {int(line): tests for line, tests in lines.items()}
    for path, lines in again.end.get('calls', {}).items()
  }
  return Environment(
    source=source,
    site=key,
    requirements=tuple(installed),
    roots=roots,
    code=code,
    files=tuple(f for f in files if any(t.startswith(f'{f}::') for t in status)),
    status=status,
    seconds={t: seconds[t] for t in status},
    import_s=ran.end['import_s'],
    calls=calls,
    repairs=tuple(log),
    audited=right,
    canaries=canaries,
    untimed_canaries=untimed,
    pytest=await pytest_command(dataset, key, source.files, roots),
  )


async def _installed(source, dataset, repairs, roots, files):
  """(what the tests need, how it was found, a run of them with it)."""
  installed, log = [PYTEST], []
  for _ in range(repairs + 1):
    key = await site(installed, dataset)
    ran = await run(dataset, key, source.files, 'run', roots=roots, files=files)
    wanted = _repair(ran, source) - set(installed)
    if not wanted:
      break
    installed = sorted({*installed, *wanted})
    log += [f'install {name}' for name in sorted(wanted)]
  _require_results(ran, source)
  return installed, log, ran


def _require_results(ran: Output, source: collect.Source) -> None:
  """Raises NoEnvironment if tests did not run to their end, or none passes."""
  if not ran.end:
    why = f'the tests did not run to their end, in {ran.wall_s:.0f} s'
    raise NoEnvironment(f'{source.name}: {why}')
  passes = any(r['status'] in _PASS for r in ran.tests.values())
  if ran.end.get('tampered') or not passes:
    errors = (r['why'] for r in ran.tests.values() if r.get('why'))
    why = next(errors, ran.end.get('tampered'))
    raise NoEnvironment(f'{source.name}: no test passes: {why}')


def _fastest(seconds: Mapping[str, float], test_s: float, suite_s: float) -> list[str]:
  """The tests that are used, in their order."""
  chosen, total = set(), 0.0
  for test in sorted(seconds, key=lambda t: (seconds[t], t)):
    total += seconds[test]
    if seconds[test] > test_s or total > suite_s:
      break
    chosen.add(test)
  return [t for t in seconds if t in chosen]


def audited(*ran: Output) -> tuple[str, ...]:
  """What guards.py saw in runs of the right sources, and what may follow from it:
  multiprocessing ends a child by a signal if it has not ended by itself."""
  seen = {event for one in ran for event in one.end.get('audited', ())}
  return tuple(sorted(seen | ({_END_CHILD} if _START_CHILD in seen else set())))


def _stable(chosen: Sequence[str], runs: Sequence[Output]) -> tuple[dict, list[str]]:
  """{test: status} of tests with the same name and status in all runs; the log.

  If a name is missing in a run, no test of that function is used: its parameters come
  in an unknown order, and what has the same name may be another test.
  """
  missing = {t for t in chosen for one in runs if t not in one.tests}
  varying = {t.partition('[')[0] for t in missing}
  named = [t for t in chosen if t.partition('[')[0] not in varying]
  first, log = runs[0].tests, []
  status = {
    t: first[t]['status']
    for t in named
    if all(one.tests[t]['status'] == first[t]['status'] for one in runs)
  }
  if len(named) < len(chosen):
    log.append(f'leave out {len(chosen) - len(named)} tests whose names vary')
  if len(status) < len(named):
    log.append(f'leave out {len(named) - len(status)} flaky tests')
  return status, log


async def _canaries(dataset, key, source, status, request, right):
  """`proved_canaries.proved` of the tests that pass."""

  async def replaced(changed, files):
    tree = {**source.files, **changed}
    return await run(dataset, key, tree, 'run', **{**request, 'files': files})

  passing = [t for t, s in status.items() if s == 'PASSED']
  return await proved_canaries.proved(
    replaced, source.files, request['files'], passing, right
  )


def _repair(ran: Output, source: collect.Source) -> set[str]:
  """Requirements that the errors ask for, of those that may be installed."""
  found, own = set(), source.name.replace('-', '_').lower()
  for record in ran.tests.values():
    why = record.get('why', '')
    for module in re.findall(r"No module named '(\w+)", why):
      wanted = requirements.distribution(module, source.requires)
      if wanted and module.lower() not in (own, 'tests', 'test', 'conftest'):
        found.add(wanted)
    if re.search(r'PackageNotFoundError', why):
      found.add(f'{source.name}=={source.version}')
    for fixture in re.findall(r"fixture '(\w+)' not found", why):
      if fixture in requirements.PLUGINS:
        found.add(requirements.PLUGINS[fixture])
  return found


async def site(wanted: Sequence[str], dataset: Path) -> str:
  """Installs requirements into a directory of sites/, once; returns its name.

  Wheels only, of which installing runs nothing.

  Raises:
    NoEnvironment: pip fails.
  """
  text = '\n'.join(sorted(wanted))
  key = hashlib.sha256(text.encode()).hexdigest()[:12]
  target = dataset / 'sites' / key
  while other := _installing.get(target):
    await other.wait()
  if target.is_dir():
    return key
  _installing[target] = done = asyncio.Event()
  try:
    await _install(wanted, text, target)
  finally:
    del _installing[target]
    done.set()
  return key


async def _install(wanted: Sequence[str], text: str, target: Path) -> None:
  partial = target.with_name(f'.{target.name}.partial')
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  try:
    options = ('--quiet', '--only-binary', ':all:', '--target', str(partial))
    await collect.pip('install', *options, *wanted)
  except collect.CollectError as error:
    shutil.rmtree(partial, ignore_errors=True)
    raise NoEnvironment(str(error)) from error
  (partial / 'requirements.txt').write_text(text + '\n')
  partial.rename(target)


def command(program: str) -> str:
  """Runs a program of the workspace on the file `request`, as grade.run does."""
  # A fixed seed, since some tests are named after elements of sets.
  return (
    'export PYTHONHASHSEED=0 HOME=/tmp LANG=C.UTF-8\n'
    f'python3 -s -S -P -B {program} < request'
  )


async def run(
  dataset: Path,
  key: str,
  tree: Mapping[str, bytes],
  mode: str,
  *,
  limit_s: float = _RUN_S,
  **request: Any,
) -> Output:
  """Runs the harness on a tree in a new sandbox.

  Args:
    dataset: has the sites.
    key: the site.
    tree: its files.
    mode: the harness's mode.
    limit_s: time limit of all together.
    request: further fields: roots, files, keep, mutants, options.

  Raises:
    SandboxError: the sandbox failed, also when it was tried again.
  """
  nonce = secrets.token_hex(16)
  request = {
    'mode': mode,
    'nonce': nonce,
    'tree': '/workspace/tree',
    'site': f'/sites/{key}',
    **request,
  }
  contents = {
    **{name: HARNESS.with_name(name).read_bytes() for name in grade.PROGRAMS},
    'request': json.dumps(request).encode(),
    **{f'tree/{path}': data for path, data in tree.items()},
  }
  # As for the verifier, but for mutants, which are written into the tree.
  read_only = '' if mode == 'screen' else 'chmod -R a-w tree\n'
  words = read_only + command('harness.py')
  return _parsed(await _executed(dataset, contents, words, limit_s), nonce)


async def pytest_command(
  dataset: Path, key: str, files: Mapping[str, bytes], roots: Sequence[str]
) -> str:
  """The first command with which pytest finds the tests in a workspace; '' if none.

  Roots may be missing in the path, and the package's own options may need plugins.
  """
  path = ':'.join(root for root in roots if root)
  path = f'PYTHONPATH={path}:$PYTHONPATH ' if path else ''
  for options in ('', ' -c /dev/null --rootdir=. --continue-on-collection-errors'):
    found = f'{path}python3 -m pytest{options}'
    words = f'export PYTHONPATH=/sites/{key}\n{found} --collect-only -q'
    done = await _executed(dataset, files, words, _RUN_S)
    if done.returncode in (0, 1):
      return found
  return ''


async def _executed(dataset, contents, words: str, limit_s: float):
  """The result of a command in a new sandbox, which is tried again if it fails."""
  for left in reversed(range(_ATTEMPTS)):
    try:
      async with await sandbox.create(
        limits=dataclasses.replace(LIMITS, output_bytes=32 << 20),
        host=verifier.host(dataset),
        contents=contents,
      ) as box:
        return await box.exec(words, timeout_s=limit_s)
    except sandbox.SandboxError as error:
      if isinstance(error, sandbox.SandboxUnavailable) or not left:
        raise
      logging.warning('a sandbox failed, its command is run again: %s', error)


async def statuses(
  env: Environment, dataset: Path, tree: Mapping[str, bytes]
) -> dict[str, str]:
  """{test: status} of an environment's tests on other sources."""
  request = dict(roots=env.roots, files=env.files, keep=list(env.status))
  request['alone'] = not alone.may_start(env.audited)
  ran = await run(dataset, env.site, tree, 'run', **request)
  return {test: record['status'] for test, record in ran.tests.items()}


def _parsed(done: sandbox.ExecResult, nonce: str) -> Output:
  tests, end, mutants = {}, {}, {}
  for line in done.stdout.splitlines():
    word, _, rest = line.partition(' ')
    if word != nonce:
      continue
    record = json.loads(rest)
    number = record.pop('mutant', None)
    if number is not None:
      new = {'tests': {}, 'seconds': {}, 'end': None, 'timeout': False}
      one = mutants.setdefault(number, new)
      if 'test' in record:
        one['tests'][record['test']] = record['status']
        one['seconds'][record['test']] = record.get('s', 0.0)
      elif 'end' in record:
        one['end'] = record['end']
      else:
        one['timeout'] = True
    elif 'end' in record:
      end = record
    else:
      tests[record['test']] = record
  return Output(tests, end, mutants, done.wall_s)


def shipped() -> dict[str, bytes]:
  """The verifier's programs, for a task's tests/."""
  ours = 'grade.py copies.py reaches.py canaries.py variants.py'.split()
  return {
    **{name: HARNESS.with_name(name).read_bytes() for name in (*grade.PROGRAMS, *ours)},
    'compose.py': Path(compose.__file__).read_bytes(),
  }
