"""Interpreters with the packages of foreign environments, made once by pip.

`M2JAX_VERIFIERS_PYTHON` and `M2JAX_OPENENV_PYTHON` name ones that exist; else a venv in
pytest's cache is made, where a registry can be reached.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

VERSIONS = {'verifiers': '0.4.0', 'openenv': '0.10.0'}
# What a test's job has in its environment that is no interpreter's business.
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}


def python(config, package: str) -> str:
  """An interpreter that has the package; skips the test if there is none."""
  named = os.environ.get(f'M2JAX_{package.upper()}_PYTHON')
  if named:
    return named
  root = pathlib.Path(config.cache.mkdir('environments')) / package
  made = root / 'bin' / 'python'
  if not (root / 'complete').exists():
    shutil.rmtree(root, ignore_errors=True)
    requirement = f'{package}=={VERSIONS[package]}'
    _run(sys.executable, '-m', 'venv', root)
    _run(made, '-m', 'pip', 'install', '-q', requirement)
    (root / 'complete').touch()
  return str(made)


def fixtures(config, interpreter: str) -> pathlib.Path:
  """The small environments that verifiers' own source distribution has."""
  root = pathlib.Path(config.cache.mkdir('environments')) / 'verifiers_source'
  name = f'verifiers-{VERSIONS["verifiers"]}'
  if not (root / name).exists():
    options = '--no-deps', '--no-binary', ':all:'
    requirement = f'verifiers=={VERSIONS["verifiers"]}'
    _run(interpreter, '-m', 'pip', 'download', '-q', *options, '-d', root, requirement)
    with tarfile.open(root / f'{name}.tar.gz') as file:
      file.extractall(root, filter='data')
  return root / name / 'tests' / 'v1' / 'fixtures'


def _run(*command):
  done = subprocess.run(
    [str(part) for part in command], capture_output=True, text=True, env=_ENVIRONMENT
  )
  if done.returncode:
    pytest.skip(f'{" ".join(map(str, command[1:]))}: {done.stderr.strip()[-300:]}')
