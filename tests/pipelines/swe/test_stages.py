"""The stages of SWE-scaling, each on a real tiny package made on the fly."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import sandbox
from m2jax.tasks import harbor
from m2jax_pipelines import llm, make, records, swe
from m2jax_pipelines.candidate import Candidate
from m2jax_pipelines.context import Context
from m2jax_pipelines.make import LIMITS
from m2jax_pipelines.source import Tasks
from m2jax_pipelines.swe import (
  collect,
  drafts,
  environment,
  grade,
  inject,
  mutate,
  releases,
  slow,
  statements,
  timing,
)
from tests.pipelines import test_llm
from tests.pipelines.model_server import Server
from tests.pipelines.swe import package

_CORE = 'src/tinycalc/core.py'


@pytest.fixture(scope='module')
def context(dataset):
  return Context(dataset, llm.LLMClient(llm.LLMConfig(), 'author'))


def _collected(stream, most=100):
  async def all_():
    try:
      found = []
      async for candidate in stream:
        found.append(candidate)
        if len(found) >= most:
          break
      return found
    finally:
      await sandbox.shutdown()

  return asyncio.run(all_())


# Environments -------------------------------------------------------------------------


def test_an_environment_knows_its_tests_and_who_calls_what(env):
  assert len(env.status) == 9 and set(env.status.values()) == {'PASSED'}
  assert 0 < env.import_s < 10
  assert env.roots == ('src',) and env.code == ('src/tinycalc/*.py',)
  line = 1 + package.CORE[: package.CORE.index('def mean')].count('\n')
  callers = env.calls[_CORE][line]
  assert callers == [
    'tests/test_more.py::test_mean',
    'tests/test_more.py::test_mean_of_none',
  ]


@pytest.mark.parametrize('failures', [2, 3])
def test_a_sandbox_that_fails_is_tried_again(env, context, monkeypatch, failures):
  """Rather than end a run of hours; three times in a row is no accident."""
  create, left = sandbox.create, failures

  async def failing(**options):
    nonlocal left
    left -= 1
    if left >= 0:
      raise sandbox.SandboxError('killed')
    return await create(**options)

  monkeypatch.setattr(sandbox, 'create', failing)

  async def run():
    try:
      files, roots = env.source.files, env.roots
      return await environment.run(
        context.dataset, env.site, files, 'run', roots=roots, files=env.files
      )
    finally:
      await sandbox.shutdown()

  if failures == 3:
    with pytest.raises(sandbox.SandboxError, match='killed'):
      asyncio.run(run())
  else:
    found = asyncio.run(run()).tests
    assert {t: r['status'] for t, r in found.items()} == env.status


def test_a_missing_module_is_repaired():
  """The error of a run names what to install."""
  why = "E   ModuleNotFoundError: No module named 'yaml'"
  output = environment.Output({'t': {'status': 'ERROR', 'why': why}}, {}, {}, 0.0)
  source = collect.Source('tinycalc', '2.0', '', '', {}, None)
  assert environment._repair(output, source) == {'pyyaml'}


def test_packages_that_need_the_same_site_install_it_once(tmp_path, monkeypatch):
  installed = []

  async def pip(*arguments):
    installed.append(arguments[-1])
    await asyncio.sleep(0.01)

  monkeypatch.setattr(collect, 'pip', pip)

  async def both():
    return await asyncio.gather(*(environment.site(['x==1'], tmp_path) for _ in 'ab'))

  one, other = asyncio.run(both())
  assert one == other and installed == ['x==1']
  assert (tmp_path / 'sites' / one / 'requirements.txt').read_text() == 'x==1\n'


def test_a_package_without_tests_is_refused(dataset, tmp_path):
  source = package.source(tmp_path)
  bare = dataclasses.replace(
    source, files={p: d for p, d in source.files.items() if 'tests/' not in p}
  )
  with pytest.raises(environment.NoEnvironment, match='no test files'):
    asyncio.run(environment.build(bare, dataset, 0))


def test_a_suite_that_does_not_end_is_refused(dataset, tmp_path):
  """Otherwise it is not known which functions its tests call, and no bug is made."""
  source = package.source(tmp_path)
  ending = b'import os\ndef test_end():\n  os.kill(os.getpid(), 9)\n'
  cut = dataclasses.replace(source, files={**source.files, 'tests/test_zzz.py': ending})
  with pytest.raises(environment.NoEnvironment, match='not run to their end'):
    asyncio.run(environment.build(cut, dataset, 0))


# Mutations ----------------------------------------------------------------------------


def test_mutations_change_one_place_of_one_function():
  found = mutate.mutations(_CORE, package.CORE, random.Random(0))
  assert {m.kind for m in found} >= {'comparison', 'condition', 'number'}
  for mutation in found:
    text = mutation.apply(package.CORE)
    assert text != package.CORE and mutate.parses(text), mutation
    outside = {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    assert outside == {'clamp', 'total', 'mean', 'words'}


@given(st.text('aé∂ \n#', max_size=30))
def test_offsets_are_right_behind_other_alphabets(comment):
  """ast counts columns in bytes; an edit must still replace exactly its expression."""
  comment = comment.replace('\n', ' ')
  text = f"def f(a):\n  '''{comment}'''; return a < 1\n"
  found = [
    m for m in mutate.mutations('f.py', text, random.Random(0)) if 'comp' in m.kind
  ]
  assert [text[m.start : m.end] for m in found] == ['a < 1']
  assert found[0].apply(text) == text.replace('a < 1', 'a <= 1')


def _outcomes(directory, files):
  """Test → outcome of a tree, by pytest alone: none of the harness takes part."""
  for path, data in files.items():
    (directory / path).parent.mkdir(parents=True, exist_ok=True)
    (directory / path).write_bytes(data)
  pytest_ = [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '-rA', 'tests']
  environ = {'PATH': os.environ['PATH'], 'PYTHONPATH': str(directory / 'src')}
  environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'
  done = subprocess.run(
    pytest_, cwd=directory, capture_output=True, text=True, env=environ
  )
  return {
    test: outcome
    for outcome, test in re.findall(r'^(PASSED|FAILED) (\S+)', done.stdout, re.M)
  }


def test_bugs_come_with_executed_proof(env, context, tmp_path):
  """Every F2P fails on the bug and passes without it, every P2P passes on both; the
  written test of SWE-Test fails on its bug alone: one of each family is run again, by
  pytest itself."""
  found = _collected(inject.candidates(env, package.CONFIG, context), most=40)
  drawn = [c for c in found if c.draft is not None]
  assert {c.family for c in drawn} >= {'bug', 'test', 'review'}
  reasons = {c.reason for c in found if c.draft is None}
  assert reasons <= {
    'survived: no test fails',
    'too obvious: most tests fail',
    'the package cannot be imported',
    'the tests do not end',
    'not Python',
  }
  assert len({c.id for c in found}) == len(found)
  right = _outcomes(tmp_path / 'right', env.source.files)
  assert len(right) == 9 and set(right.values()) == {'PASSED'}
  again = [
    candidate
    for family in ('bug', 'merged', 'test')
    for candidate in [c for c in drawn if c.family == family][:1]
  ]
  assert len(again) == 3
  for number, candidate in enumerate(again):
    draft, files = candidate.draft, dict(env.source.files)
    config = json.loads(draft.tests['config.json'])
    files |= draft.overlay
    if candidate.family == 'test':
      files[config['test']] = draft.solution[f'files/{config["test"]}']
    outcomes = _outcomes(tmp_path / str(number), files)
    if candidate.family == 'test':
      own = {t: o for t, o in outcomes.items() if t.startswith(config['test'])}
      assert 'FAILED' in own.values(), candidate.id
    else:
      wrong = dict.fromkeys(config['f2p'], 'FAILED')
      assert outcomes == wrong | dict.fromkeys(config['p2p'], 'PASSED'), candidate.id
      assert config['f2p'] and config['p2p']


def test_a_test_that_calls_nothing_may_be_f2p(env, context):
  """It may need the function through a cache or another process, which a profile does
  not show: here a profile that names one caller of each function."""

  async def proved(package_env):
    sites = inject.sites(package_env, 0)[:8]
    found = inject.screen(package_env, sites, context, package.CONFIG)
    async for mutation, bug in found:
      if not isinstance(bug, str):
        yield inject.identity(package_env, mutation), bug.f2p

  first = {
    path: {line: tests[:1] for line, tests in lines.items()}
    for path, lines in env.calls.items()
  }
  every = dict(_collected(proved(env)))
  found = dict(_collected(proved(dataclasses.replace(env, calls=first))))
  assert found and found.items() <= every.items()
  assert any(len(f2p) > 1 for f2p in found.values())


def test_tests_that_take_long_to_collect_are_no_hang(env, context):
  """More than the 3 s after which a mutant is ended; tomlkit collects for seconds."""
  slow = {
    path: b'import time\ntime.sleep(1.8)\n' + env.source.files[path]
    for path in env.files
  }
  source = dataclasses.replace(env.source, files={**env.source.files, **slow})
  late = dataclasses.replace(env, source=source, import_s=1.8 * len(slow))
  mutation, _ = inject.sites(env, 0)[0]

  async def all_():
    chosen = [(mutation, list(env.status))]
    async for _, _, _, ran in inject.screened(late, chosen, context):
      yield ran

  (ran,) = _collected(all_())
  assert not ran['timeout'] and len(ran['tests']) == len(env.status)


def test_imports_of_a_conftest_are_imports(env, dataset):
  """It imports the package before pytest begins to collect; so would work that was
  moved there be done in time that nobody counts."""
  busy = 'import time\nbegun = time.process_time()\n'
  busy += 'while time.process_time() < begun + 0.5:\n  pass\n'
  found = _end_with_conftest(env, dataset, busy)
  assert 0.5 < found['import_s'] < found['cpu_s'] and not found['tampered']


def test_what_a_conftest_imports_replaces_nothing_for_one_call(env, dataset):
  """pytest's session would be had by a method that puts the right one back."""
  once = 'from _pytest.main import Session\nreal = Session.perform_collect\n'
  once += 'def first(self, *a):\n  Session.perform_collect = real\n'
  once += '  return real(self, *a)\nSession.perform_collect = first\n'
  assert _end_with_conftest(env, dataset, once)['tampered'] == [
    'Session.perform_collect'
  ]


def _end_with_conftest(env, dataset, code):
  """The last record of a run with a conftest.py that imports `code`."""
  tree = {**env.source.files, _CORE: f'{code}{package.CORE}'.encode()}
  tree['tests/conftest.py'] = b'from tinycalc import core\n'

  async def end():
    try:
      files = ['tests/test_core.py']
      ran = await environment.run(
        dataset, env.site, tree, 'run', roots=env.roots, files=files
      )
      return ran.end
    finally:
      await sandbox.shutdown()

  return asyncio.run(end())


def test_the_same_seed_gives_the_same_candidates(env):
  one = [inject.identity(env, m) for m, _ in inject.sites(env, 3)]
  assert one == [inject.identity(env, m) for m, _ in inject.sites(env, 3)]
  assert one != [inject.identity(env, m) for m, _ in inject.sites(env, 4)]


def test_a_run_that_was_stopped_has_the_same_mixture(env, context, monkeypatch):
  """Every n-th bug is inverted or reviewed, every m-th candidate is followed by a task
  of performance: counted over all runs, not from each start."""

  async def screen(env, chosen, context, config):
    for mutation, tests in chosen:
      text = mutation.apply(env.source.files[mutation.path].decode())
      bug = inject.Bug(mutation, text, tuple(tests[:1]), tuple(tests[1:]))
      yield mutation, bug if mutation.start % 4 else 'survived: no test fails'

  async def slowed(env, config, context):
    for number in range(9):
      if f'slow{number}' not in context.done:
        name, reason = f'slow{number}', 'not slower' if number % 2 else ''
        yield Candidate(name, 'slowed code', 'performance', 'tinycalc', reason=reason)

  monkeypatch.setattr(inject, 'screen', screen)
  monkeypatch.setattr(slow, 'candidates', slowed)
  families = ('bug', 'test', 'review', 'performance')
  config = dataclasses.replace(
    package.CONFIG, families=families, invert=3, review_=5, slow=7
  )

  def made(rows, most):
    done = frozenset(row['id'] for row in rows)
    again = dataclasses.replace(context, done=done, rows=rows)
    return _collected(swe._injected_and_slowed(env, config, again), most)

  def record(candidate):
    tried = {} if candidate.draft is None else {'admission_s': 1.0}
    row = {'id': candidate.id, 'family': candidate.family, 'source': candidate.source}
    return row | tried

  whole = made((), 100)
  assert {c.family for c in whole} == set(families)
  assert len({c.reason for c in whole}) == 3
  for at in [at for at, c in enumerate(whole) if c.family == 'bug'][5::10]:
    first = tuple(record(candidate) for candidate in whole[:at])
    assert [c.id for c in made(first, 100)] == [c.id for c in whole[at:]]


# Performance --------------------------------------------------------------------------

_SLOWED = """\
def distinct(values):
  seen, found = set(), []
  for value in values:
    if value not in seen:
      seen.add(value)
      found.append(value)
  return found


def first(values):
  return [value for value in values if value in values[:1]]
"""


def test_edits_of_loops_give_the_same_in_more_time():
  space, edited = {}, {}
  exec(_SLOWED, space)
  for mutation in slow.edits('f.py', _SLOWED, random.Random(0)):
    text = mutation.apply(_SLOWED)
    exec(text, other := {})
    for values in ([], [1, 2, 1, 3], list('abca')):
      assert other['distinct'](values) == space['distinct'](values)
    edited[text[mutation.start :].splitlines()[0]] = mutation.kind
  assert edited == {
    'value not in list(seen):': 'membership',
    'seen.update(set(seen) | {value})': 'add',
    'found[:] = found + [value]': 'append',
  }


@pytest.mark.long
def test_slowed_code_is_a_task(tmp_path, monkeypatch):
  """Workloads, edits and draft; the solution passes, and doing nothing fails."""
  monkeypatch.setattr(timing, 'PAIRS', 4)  # of runs: the code is slowed twofold
  env = package.build(tmp_path, core=package.CORE + '\n\n' + _SLOWED)
  context = Context(tmp_path, llm.LLMClient(llm.LLMConfig(), 'author'))
  found = _collected(slow.candidates(env, package.CONFIG, context))
  assert {c.reason for c in found} <= {
    *('', 'not slower', 'not significantly slower', 'a test has another result'),
  }
  made = {c.facts['kind']: c for c in found if not c.reason}
  assert 'membership' in made
  assert made['membership'].facts['ratio'] > 2
  place = tmp_path / 'tasks' / 'train'
  place.mkdir(parents=True)
  task = harbor.of_directory(harbor.read(harbor.write(made['membership'].draft, place)))
  config = json.loads((next(place.iterdir()) / 'tests' / 'config.json').read_text())
  assert all('test_workloads.py::' in test for test in config['timed'])
  honest, idle, shown = _collected(_judged(task))
  assert honest.outcome == harbor.PASSED, honest
  assert idle.outcome == harbor.FAILED
  assert shown.outcome == harbor.FAILED


async def _judged(task):
  """Verdicts on the solution, on nothing, and on what is fast as far as it is seen."""
  for work in ('solution', '', 'shown'):
    async with task.open(backend='namespaces', limits=LIMITS) as environment:
      if work == 'solution':
        await task.solve(environment)
      elif work:
        text = (
          'slowly = distinct\ndef distinct(values):\n'
          '  fast = len(values) == 2000\n'
          '  return list(dict.fromkeys(values)) if fast else slowly(values)\n'
        )
        await environment.box.exec(f"cat >> {_CORE} <<'END'\n{text}\nEND")
      yield await task.judge(environment)


# Releases -----------------------------------------------------------------------------


def _pair(env, old, context):
  async def made():
    try:
      return await releases.candidate(env, old, context, 'pair', merged=False)
    finally:
      await sandbox.shutdown()

  return asyncio.run(made())


def test_a_pair_of_releases_is_a_task(env, context, tmp_path):
  """words is new and mean was repaired: F2P are their tests, from the real change."""
  found = _pair(env, package.source(tmp_path, '1.0'), context)
  assert found.family == 'bug'
  assert found.facts['f2p'] == 2 and found.facts['p2p'] == 7
  assert 'mean skips None; words is new.' in found.draft.instruction


def test_a_change_of_tests_alone_is_no_task(env, context, tmp_path):
  old = package.source(tmp_path)
  files = {**old.files, 'tests/test_more.py': b''}
  found = _pair(env, dataclasses.replace(old, files=files), context)
  assert found.draft is None and found.reason.startswith('test:')


def test_a_change_that_no_test_tells_is_a_refactoring(env, context, tmp_path):
  old = package.source(tmp_path)
  text = package.CORE.replace('LIMIT = 100', 'LIMIT = 99')
  found = _pair(
    env, dataclasses.replace(old, files={**old.files, _CORE: text.encode()}), context
  )
  assert found.draft is None and found.family == 'refactor'


def test_consecutive_releases_are_found_by_version():
  listed = ['1.10', '1.9', '1.8', '1.2']
  assert releases.older(listed, '1.9', 2) == ['1.8', '1.2']
  assert releases.older(listed, '7', 2) == []


# Statements ---------------------------------------------------------------------------


def test_a_statement_that_gives_the_repair_away_is_not_used(env):
  diff = '+++ b/x\n+  return low if value < low else value\n'
  words = 'tinycalc returns wrong values for small numbers. ' * 3
  shown = 'def test_mean():\n  assert core.mean([2]) == 3'
  words += 'mean([2]) is 2.'
  assert statements.acceptable(words, env, diff, shown)
  told = words + 'return low if value < low else value'
  assert not statements.acceptable(told, env, diff, shown)
  assert not statements.acceptable('something is wrong ' * 10, env, diff, shown)
  other = words.replace('mean', 'this')  # about the package, not about the bug
  assert not statements.acceptable(other, env, diff, shown)
  assert statements.acceptable(other, env, diff, '')


@pytest.mark.parametrize(
  'answer, author, invalid',
  [
    (lambda body: 500, 'scripted', True),
    (lambda body: test_llm.REFUSAL, 'scripted', False),
    (lambda body: _issue(body), 'm', False),
    (lambda body: test_llm.THINKING + _issue(body), 'm', False),
  ],
)
def test_an_author_of_issues(env, context, answer, author, invalid):
  """An outage is no rejection; a refusal is no issue; thinking is no part of it."""
  mutation, tests = inject.sites(env, 0)[0]
  text = mutation.apply(env.source.files[_CORE].decode())
  bug = inject.Bug(mutation, text, tuple(tests[:1]), tuple(tests[1:]))
  with Server(answer) as server:
    config = llm.LLMConfig(server.url, 'm', retries=0)
    asked = dataclasses.replace(context, author=llm.LLMClient(config, 'author'))
    made = asyncio.run(inject._repair(env, asked, [bug], random.Random(0)))
  assert made.invalid is invalid and made.id == inject.identity(env, mutation)
  if not invalid:
    assert made.draft.metadata.details['author'] == author
    assert not re.search('sorry|<think>|which I should', made.draft.instruction)


def _issue(body):
  check = body['messages'][-1]['content'].split('fails without it:')[1]
  return f'With tinycalc 2.0 this does not work any more: {check}. Can somebody look?'


def test_pytest_runs_as_the_statement_says(env, dataset):
  """The package is in src/, which is in no path of its own."""
  assert env.pytest == 'PYTHONPATH=src:$PYTHONPATH python3 -m pytest'
  mutation, tests = inject.sites(env, 0)[0]
  text = statements.bug(env, [mutation], tests, random.Random(0))
  told = re.search('`([^`]*pytest[^`]*)` runs', text)[1]
  draft = drafts.repair(env, 'told', 'bug', text, {}, [], list(env.status))
  task = harbor.of_directory(harbor.read(harbor.write(draft, dataset)))

  async def ran():
    try:
      async with task.open(limits=LIMITS) as environment:
        return await environment.box.exec(told)
    finally:
      await sandbox.shutdown()

  done = asyncio.run(ran())
  assert not done.returncode and f'{len(env.status)} passed' in done.stdout, done


@pytest.mark.parametrize(
  'option, least',
  [('--cov=x', 'rootdir'), pytest.param('', None, marks=pytest.mark.long)],
)
def test_options_of_the_package_need_not_be_known(env, dataset, option, least):
  """Of plugins that are not there; without tests there is no command."""
  files = {**env.source.files, 'pytest.ini': f'[pytest]\naddopts = {option}'.encode()}
  if least is None:
    files = {p: d for p, d in files.items() if 'tests/' not in p}

  async def found():
    try:
      return await environment.pytest_command(dataset, env.site, files, ('src',))
    finally:
      await sandbox.shutdown()

  command = asyncio.run(found())
  assert (least in command) if least else command == ''


_COPIES = """
import pathlib
texts = {p: p.read_text(errors='replace') for d in ('/sites', '/usr', '/opt')
         for p in pathlib.Path(d).rglob('core.py')}
print(sum('def clamp' in text for text in texts.values()))
"""


def test_no_copy_of_the_package_is_seen(env, tmp_path):
  """A site may have the package, since tests need its metadata, or another has it; and
  tools of this machine bring their own."""
  for place in ('one', 'two/other/_vendor'):
    copy = tmp_path / 'sites' / place / 'tinycalc'
    copy.mkdir(parents=True)
    (copy / 'core.py').write_text(package.CORE)
  draft = drafts.repair(env, 'copy', 'bug', 'Repair it.', {}, [], list(env.status))
  assert draft.metadata.hide == ('tinycalc',)

  async def seen(draft):
    task = harbor.of_directory(harbor.read(harbor.write(draft, tmp_path / 'tasks/dev')))
    async with task.open(limits=LIMITS) as environment:
      done = await environment.box.exec(f"python3 - <<'END'\n{_COPIES}\nEND")
      assert not done.returncode, done.stderr
      return int(done.stdout)

  async def both():
    try:
      shown = dataclasses.replace(draft.metadata, hide=())
      shown = dataclasses.replace(draft, metadata=shown, name='shown')
      return await seen(shown), await seen(draft)
    finally:
      await sandbox.shutdown()

  assert asyncio.run(both()) == (2, 0)


# Grading ------------------------------------------------------------------------------


def test_results_count_only_with_the_nonce():
  good = 'n {"test": "a", "status": "PASSED"}\nn {"end": 1, "tampered": []}\n'
  assert grade.parse('x {"test": "b"}\nPASSED c\n' + good, 'n') == {'a': 'PASSED'}
  for bad in (
    good + good,  # results after the end
    good.replace('"end": 1', '"end": 0'),  # the tests that must fail have not
    good[: good.index('\n') + 1],  # no end
    good.replace('[]', '["pytest.main"]'),
  ):
    with pytest.raises(grade.Failed):
      grade.parse(bad, 'n')


@pytest.mark.parametrize('seed', range(8))
def test_comments_of_a_review_change_nothing(seed):
  """Also where functions have docstrings; the line of the bug is followed."""
  function = 'def f{0}(\n  x,\n):\n  """One.\n\n  More.\n  """\n  return x + {0}\n'
  text = '\n\n'.join(function.format(i) for i in range(9))
  line = text.split('\n').index('  return x + 4') + 1
  changed, at = inject.commented(text, line, random.Random(seed))
  assert changed.count('#') == 3 and changed.split('\n')[at - 1] == '  return x + 4'
  assert ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text))


@given(
  st.lists(st.floats(1.0, 1.05), min_size=7, max_size=7),
  st.lists(st.floats(1.0, 3.0), min_size=7, max_size=7),
)
def test_noise_is_not_speed(small, large):
  """Equal programs are never faster; twice the speed is seen under little load."""
  same = [(a, a * b) for a, b in zip(large, small, strict=True)]
  assert not grade.faster(same, 0.2)
  slowly = [(2 * a, b) for a, b in zip(small, reversed(small), strict=True)]
  assert grade.faster(slowly, 0.2)


@pytest.mark.parametrize(
  'late, reward', [([0], 1.0), ([1], 1.0), ([0, 1], 0.0), ([], 1.0)]
)
@pytest.mark.parametrize('load', [1, 10])
def test_work_that_moved_is_no_gain(late, reward, load, monkeypatch):
  """On a busy machine one round of imports may take longer by chance, not two. How
  busy it is makes no difference: 0.02 s of work take 0.2 s there."""
  rounds = iter(range(2))

  def in_turns(*_):
    moved = 0.018 if next(rounds) in late else 0.0
    pairs, work = (0.02 * load, 0.001 * load), ((0.02, 0.32), (0.001, 0.301 + moved))
    return [pairs] * 7, [work] * 7

  monkeypatch.setattr(grade, '_refuse_reaching', lambda *_: None)
  monkeypatch.setattr(grade, '_with_canaries', lambda *_, **__: {})
  monkeypatch.setattr(grade, '_in_turns', in_turns)
  assert grade.performance({'p2p': [], 'least': 0.2}, '')['reward'] == reward


_SET = b"""\
import pytest


@pytest.mark.parametrize(
  'number, pair', {(number, (None, str(number))) for number in range(9)}
)
def test_of_a_set(number, pair):
  assert pair[1] == str(number)


def test_of_none():
  assert [None][0] is None
"""


_SERVED = b"""\
import threading
from tinycalc import core


def test_served():
  end = threading.Event()
  threading.Thread(target=end.wait, args=(20,)).start()
  assert core.total([1]) == 1
  end.set()
"""


@pytest.fixture(scope='module')
def env_of_more(dataset):
  """The environment of a package with both of these."""
  more = {'tests/test_set.py': _SET, 'tests/test_served.py': _SERVED}
  return package.build(dataset, more=more)


def test_tests_have_the_same_names_in_every_run(env_of_more, dataset):
  """Before Python 3.12 sets with None differ from process to process; isodate's tests
  are named by such sets."""
  env = env_of_more

  async def run():
    try:
      return await environment.statuses(env, dataset, env.source.files)
    finally:
      await sandbox.shutdown()

  again = asyncio.run(run())
  assert again == env.status
  assert 'tests/test_set.py::test_of_none' in again
  of_set = [t for t in again if t.startswith('tests/test_set.py::test_of_a_set')]
  assert len(of_set) == (0 if sys.version_info < (3, 12) else 9)


def test_canaries_that_leave_threads_are_not_run_where_time_is_measured(env_of_more):
  """Such a run would end, and the right solution fail; boltons serves sockets."""
  env, test = env_of_more, 'tests/test_served.py::test_served'
  assert env.untimed_canaries == {'tests/test_served.py'}
  draft = drafts.performance(
    env, 'slow', {}, ['tests/test_core.py::test_total'], timing.PAIRS, timing.LEAST
  )
  judged = [set(tests) for tests in json.loads(draft.tests['config.json'])['canaries']]
  assert test in env.canaries[0]
  assert judged == [set(tests) - {test} for tests in env.canaries]


@pytest.mark.parametrize('status', ['SKIPPED', 'XFAIL', 'FAILED', None])
def test_f2p_needs_exactly_the_right_status(status, monkeypatch, tmp_path):
  """Facts §3.4: a skipped or missing F2P fails; here also a skipped P2P."""
  config = {'f2p': ['a'], 'p2p': ['b'], 'files': [], 'limit_s': 1, 'known': []}
  config |= {'collect': [], 'exclude': [], 'canaries': []}
  monkeypatch.syspath_prepend(Path(grade.__file__).parent)  # as in a task's tests/
  for tests in ({'a': status, 'b': 'PASSED'}, {'a': 'PASSED', 'b': status}):
    monkeypatch.setattr(grade, 'run', lambda *a, strict, tests=tests: tests)
    monkeypatch.setattr(grade, '_refuse_reaching', lambda *a: None)
    assert grade.tests(config, str(tmp_path))['reward'] == 0.0


# All together -------------------------------------------------------------------------


def test_the_next_packages_are_prepared_meanwhile(context, monkeypatch):
  """While the tasks of one are tried; and they end when the caller does."""
  begun, closed = [], []

  async def made(requirement, config, context):
    begun.append(requirement)
    try:
      for number in range(3):
        yield f'{requirement}{number}'
      await asyncio.sleep(0.01 if requirement == 'a' else 60)
    finally:
      closed.append(requirement)

  monkeypatch.setattr(swe, '_package', made)
  config = swe.Config(packages=tuple('abcd'), batch=2, held_out=(), dev=())

  async def run():
    stream, found = swe.candidates(config, context), []
    async for candidate in stream:
      await asyncio.sleep(0)
      if not found:
        assert begun == ['a', 'b', 'c']  # two ahead, and no more
      found.append(candidate)
      if len(found) == 9:
        break
    await stream.aclose()
    return found

  found = asyncio.run(asyncio.wait_for(run(), 10))
  assert found == 'a0 a1 b0 b1 c0 c1 d0 d1 a2'.split()
  assert begun == sorted(closed) == list('abcd')


@pytest.mark.long
def test_the_pipeline_makes_tasks_of_every_family(tmp_path, monkeypatch):
  """From a package to admitted tasks, with the report and provenance."""
  package.offline(monkeypatch)
  package.site(tmp_path)
  config = dataclasses.replace(package.CONFIG, count=5)
  asyncio.run(make.run(config, tmp_path, show=False))
  rows = records.read(tmp_path / 'records.jsonl')
  admitted = [r for r in rows if r['outcome'] == 'admitted']
  assert len(admitted) == 5, [(r['family'], r['reason']) for r in rows]
  assert {r['family'] for r in admitted} >= {'bug', 'test'}
  task = Tasks(tmp_path, 'train')[0]
  assert task.directory.metadata.source['licence'] == 'MIT'
  assert 'SWE-Test inversion' in (tmp_path / 'report.html').read_text()


@pytest.mark.long
def test_a_real_package_from_the_registry(tmp_path):
  """isodate: downloaded by pip, hashed, its tests made to run, a few tasks admitted."""
  config = swe.Config(
    packages=('isodate==0.7.2',), count=2, releases=0, held_out=('isodate',)
  )
  done = asyncio.run(make.run(config, tmp_path, show=False))
  assert done.tasks == 2
  task = Tasks(tmp_path, 'held_out')[0]
  source = task.directory.metadata.source
  assert source['sha256'].startswith('4cd1aa0f43ca76f4') and 'BSD' in source['licence']
