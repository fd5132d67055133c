"""Harbor's own package accepts what is written, and refuses what is broken."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from benchmarks import harbor_check
from m2jax.tasks import harbor

_PYTHON = os.environ.get('M2JAX_HARBOR_PYTHON', '')


def _written(tmp_path):
  draft = harbor.Draft(
    'a',
    'Do it.',
    harbor.Metadata('test', 'test'),
    tests={'test.sh': b'echo 1 > "$M2JAX_LOGS/reward.txt"'},
    solution={'solve.sh': b':'},
    packages=('jq',),
  )
  return harbor.write(draft, tmp_path / 'tasks' / 'train')


@pytest.mark.skipif(
  not _PYTHON, reason='M2JAX_HARBOR_PYTHON names no interpreter with harbor'
)
def test_harbor_accepts_a_directory_and_refuses_a_broken_one(tmp_path, capsys):
  path = _written(tmp_path)
  options = [f'--python={_PYTHON}', f'--workdir={tmp_path}']
  assert harbor_check.main(options) == 0
  assert 'accepts 1 of 1' in capsys.readouterr().out
  shutil.copytree(path, path.with_name('b'))
  (path.with_name('b') / 'tests' / 'test.sh').unlink()
  assert harbor_check.main(options) == 1
  assert 'accepts 1 of 2' in capsys.readouterr().out


def test_an_interpreter_without_harbor_is_an_error(tmp_path):
  """Not a count of refused directories."""
  code = 'raise SystemExit("no module named harbor")'
  program = tmp_path / 'python'
  program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}'\n")
  program.chmod(0o755)
  with pytest.raises(RuntimeError, match='no module named harbor'):
    harbor_check.check(str(program), [_written(tmp_path)])
