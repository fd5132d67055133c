"""Patches in the sandbox: what the tests see, and a rerun of patched code."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

import pytest

from m2jax import sandbox
from m2jax.evolve import doctor
from m2jax.evolve.doctor import patches, trials, verify
from tests import processes
from tests.evolve import runs, scripted_job

CODE = 'LARGE = 40\n'
DIFF = '--- a/mine/code.py\n+++ b/mine/code.py\n@@ -1 +1 @@\n-LARGE = 40\n+LARGE = 1\n'
JOB = """\
import json, sys
from mine import code
from tests.evolve import runs
flags = dict(a.lstrip('-').partition('=')[::2] for a in sys.argv[1:] if '=' in a)
with open(flags['workdir'] + '/metrics.jsonl', 'w') as file:
  for row in runs.rl('white', 0, 60):
    row['grad_norm'] *= code.LARGE if row['step'] > 40 else 1
    file.write(json.dumps(row) + '\\n')
"""


@pytest.fixture(scope='module', autouse=True)
def _sandbox():
  async def tried():
    try:
      await (await sandbox.create()).destroy()
    finally:
      await sandbox.shutdown()

  try:
    asyncio.run(tried())
  except sandbox.SandboxUnavailable as error:
    pytest.skip(str(error))


@pytest.fixture
def checkout(tmp_path):
  root = tmp_path / 'repository'
  (root / 'mine').mkdir(parents=True)
  (root / 'mine' / 'code.py').write_text(CODE)
  (root / 'job.py').write_text(JOB)
  (root / 'tests' / 'evolve').mkdir(parents=True)
  shutil.copy(processes.ROOT / 'tests' / 'evolve' / 'runs.py', root / 'tests/evolve')
  git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@b']
  for command in (['init', '-q'], ['add', '-A'], ['commit', '-qm', 'all']):
    subprocess.run([*git, *command], cwd=root, check=True)
  return patches.find(['mine.code'], root)


def test_the_tests_decide_in_a_sandbox(checkout, tmp_path):
  """They see the patched files, the packages, and nothing else of this machine."""
  check = 'import mine.code, m2jax, numpy; assert mine.code.LARGE == 1'
  outside = tmp_path / 'outside'
  with patches.worktree(checkout, DIFF) as place:
    passed = trials.run_tests(place, f"python3 -c '{check}'", 1.0)
    assert passed == trials.Tests(True, ''), passed
    alone = f'echo x > mine/code.py; echo x > {outside}; '
    alone += f'test ! -e {checkout.root} && test ! -e .git && test ! -e {tmp_path}'
    assert trials.run_tests(place, alone, 1.0).passed
    failed = trials.run_tests(place, 'echo \x1b[2J; exit 7', 1.0)
    assert not failed.passed and '\x1b' not in failed.tail
    assert (place / 'mine' / 'code.py').read_text() == 'LARGE = 1\n'
    late = trials.run_tests(place, 'sleep 60', 0.01)
    assert not late.passed and late.tail.startswith('the time is over')
  assert not outside.exists()
  assert (checkout.root / 'mine' / 'code.py').read_text() == CODE


@pytest.mark.parametrize(
  ('diff', 'verdict'),
  [(DIFF, 'gone'), (DIFF.replace('+LARGE = 1', '+LARGE = 30'), 'still there')],
)
def test_the_rerun_is_of_the_patched_code(checkout, tmp_path, diff, verdict):
  run = tmp_path / 'run'
  run.mkdir()
  config = {'rl': {'learning_rate': 0.1}, 'mode': ''}
  runs.write(run, scripted_job.records(config))
  (found,) = doctor.examine(run, now_s=1.7e9)
  plan = verify.prepare(run, found, config)
  with patches.worktree(checkout, diff) as place:
    status = trials.rerun(place, plan, 'job', 1.0)
  outcome = verify.judge(plan, found, [found], status)
  assert outcome.verdict == verdict, outcome


def test_a_rerun_that_dies_says_why(checkout, tmp_path):
  runs.write(tmp_path, scripted_job.records({'rl': {'learning_rate': 0.1}}))
  (found,) = doctor.examine(tmp_path, now_s=1.7e9)
  plan = verify.prepare(tmp_path, found, {})
  with patches.worktree(checkout, DIFF.replace('+LARGE = 1', '+LARGE = (')) as place:
    status = trials.rerun(place, plan, 'job', 1.0)
  outcome = verify.judge(plan, found, [found], status)
  assert outcome.verdict == 'undecided' and 'SyntaxError' in outcome.why
