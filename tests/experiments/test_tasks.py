"""experiments.tasks: what is listed, checked and repeated; no container is started."""

from __future__ import annotations

import collections
import os
import subprocess
import sys

import pytest

from experiments import tasks
from m2jax import sandbox
from m2jax.sandbox.containers import images
from m2jax.tasks import harbor

_LIMITS = sandbox.Limits()


def _write(dataset, name, toml='', solution=True):
  path = dataset / name
  for folder in ('environment', 'tests', 'solution'):
    (path / folder).mkdir(parents=True)
  (path / 'task.toml').write_text(toml)
  (path / 'instruction.md').write_text('Do it.')
  (path / 'environment' / 'Dockerfile').write_text('FROM debian\n')
  (path / 'tests' / 'test.sh').write_text('true\n')
  if solution:
    (path / 'solution' / 'solve.sh').write_text('true\n')
  return path


def _run(*arguments, code=0):
  command = [sys.executable, '-m', 'experiments.tasks', *map(str, arguments)]
  done = subprocess.run(
    command, capture_output=True, text=True, env={**os.environ, 'COLUMNS': '200'}
  )
  assert done.returncode == code, done.stderr
  return done.stdout + done.stderr


def test_list_says_what_each_task_is_and_why_one_is_refused(tmp_path):
  """From files alone: limits, network, and what stands in the way; it is bounded."""
  _write(
    tmp_path,
    'plain',
    '[metadata]\ncategory = "games"\n[agent]\ntimeout_sec = 70.0\n'
    '[environment]\ncpus = 2\nmemory_mb = 512\nallow_internet = false\n',
  )
  _write(tmp_path, 'gpu', '[environment]\ngpus = 1\n')
  _write(tmp_path, 'open', solution=False)
  text = _run('list', tmp_path)
  lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
  for word in ('games', '70 s', '2 CPUs', '512 MB memory', 'none'):
    assert word in lines['plain']
  assert 'refused' in lines['gpu'] and 'environment.gpus' in lines['gpu']
  assert 'no solution' in lines['open'] and 'public' in lines['open']
  assert '3 tasks, of which 1 cannot run here' in text
  assert 'and 2 more' in _run('list', tmp_path, '--shown=1')


def test_wrong_arguments_are_sentences(tmp_path):
  """Code 2, and no traceback."""
  _write(tmp_path, 'a')
  cases = {
    (): 'give one of list, check, try',
    ('list', tmp_path / 'none'): 'no task',
    ('try', tmp_path, '--task=b'): '--task=b: not in',
    ('check', tmp_path): '--workdir is missing',
    ('list', tmp_path, 'more'): 'unexpected argument',
  }
  for arguments, words in cases.items():
    text = _run(*arguments, code=2)
    assert words in text and 'Traceback' not in text


def _checked(monkeypatch, dataset, path, outcomes, jobs=2):
  """`tasks.check` with attempts that give {(name, solve): reward or error}; returns
  causes and the attempts."""
  made = []

  async def attempt(config, limits, task, solve):
    made.append((task.path.name, solve))
    found = outcomes.get((task.path.name, solve), float(solve))
    if isinstance(found, Exception):
      raise found
    return found, 'why'

  monkeypatch.setattr(tasks, 'attempt', attempt)
  config = harbor.Config(dataset=str(dataset))
  present = list(tasks.found(config))
  return tasks.check(config, _LIMITS, present, path, jobs), made


def test_check_tells_causes_apart_and_repeats_what_has_not_passed(
  tmp_path, monkeypatch, capsys
):
  """A fault of the machine is neither a failed solution nor a pass."""
  dataset, path = tmp_path / 'tasks', tmp_path / 'check.jsonl'
  for name in ('good', 'weak', 'free', 'broken', 'down', 'mute', 'bare'):
    _write(dataset, name)
  _write(dataset, 'gpu', '[environment]\ngpus = 1\n')
  outcomes = {
    ('weak', True): 0.5,
    ('free', False): 1.0,
    ('broken', True): images.BuildFailed('no such base'),
    ('down', False): sandbox.SandboxError('podman run: gone'),
    ('mute', True): None,
    ('bare', True): harbor.BadTask('bare: no solution/solve.sh'),
  }
  causes, _ = _checked(monkeypatch, dataset, path, outcomes)
  assert causes == collections.Counter(
    {
      'ok': 1,
      'solution fails': 1,
      'nothing passes': 1,
      'image is not built': 1,
      'engine failed': 1,
      'verifier gives no reward': 1,
      'no solution': 1,
      'refused': 1,
    }
  )
  assert 'broken: solution -, nothing -: image is not built' in capsys.readouterr().out
  causes, made = _checked(monkeypatch, dataset, path, {('down', False): 0.0})
  assert causes == {'ok': 7, 'refused': 1}
  assert {name for name, _ in made} == {
    *('weak', 'free', 'broken', 'down', 'mute', 'bare')
  }
  (dataset / 'good' / 'tests' / 'test.sh').write_text('false\n')
  causes, made = _checked(monkeypatch, dataset, path, {})
  assert [name for name, _ in made] == ['good', 'good']


def test_an_engine_that_is_missing_ends_the_check(tmp_path, monkeypatch):
  """No task is blamed for it."""
  _write(tmp_path / 'tasks', 'a')
  missing = sandbox.SandboxUnavailable('no podman', 'apt-get install podman')
  outcomes = {('a', True): missing}
  with pytest.raises(sandbox.SandboxUnavailable, match='no podman'):
    _checked(monkeypatch, tmp_path / 'tasks', tmp_path / 'c', outcomes)
  assert not (tmp_path / 'c').read_text()
