"""What of a stranger's package runs, and what its tests can have installed."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import tarfile

import pytest

from m2jax_pipelines.swe import collect, environment, requirements

_BACKEND = """
import pathlib
pathlib.Path({marker!r}).write_text('ran')
def __getattr__(name):
  raise AttributeError(name)
"""
_PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


def _sdist(directory, marker, **more):
  texts = {
    'pyproject.toml': _PROJECT,
    'backend.py': _BACKEND.format(marker=str(marker)),
    'setup.py': _BACKEND.format(marker=str(marker)),
    'PKG-INFO': 'Metadata-Version: 2.1\nName: strange\nVersion: 1.0\nLicense: MIT\n'
    'Requires-Dist: declared-one>=2; extra == "test"\n',
    'strange/__init__.py': 'x = 1\n',
    **more,
  }
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode='w') as tar:
    for path, text in texts.items():
      entry = tarfile.TarInfo(f'strange-1.0/{path}')
      entry.size = len(text)
      tar.addfile(entry, io.BytesIO(text.encode()))
  data = gzip.compress(buffer.getvalue())
  (directory / 'strange-1.0.tar.gz').write_bytes(data)
  return data


def _index(monkeypatch, directory, data, digest=''):
  """An index of one file, as pip is configured to use it."""
  page = directory / 'simple' / 'strange'
  page.mkdir(parents=True)
  (page / 'strange-1.0.tar.gz').write_bytes(data)
  digest = digest or hashlib.sha256(data).hexdigest()
  link = f'<a href="strange-1.0.tar.gz#sha256={digest}">strange-1.0.tar.gz</a>'
  (page / 'index.html').write_text(f'<!DOCTYPE html><body>{link}</body>')
  for name in ('PIP_FIND_LINKS', 'PIP_EXTRA_INDEX_URL'):
    monkeypatch.setenv(name, '')
  monkeypatch.setenv('PIP_CONFIG_FILE', '/dev/null')
  monkeypatch.setenv('PIP_INDEX_URL', (directory / 'simple').as_uri())


def test_collecting_a_package_runs_nothing_of_it(tmp_path, monkeypatch):
  """`pip download` would run its build backend, on this machine."""
  marker = tmp_path / 'marker'
  _index(monkeypatch, tmp_path, _sdist(tmp_path, marker))
  found = asyncio.run(collect.fetch('strange==1.0', tmp_path / 'sources'))
  assert not marker.exists()
  assert found.files['strange/__init__.py'] == b'x = 1\n' and found.licence == 'MIT'
  assert found.requires == {'declared-one'}


def test_another_file_than_the_index_states_is_refused(tmp_path, monkeypatch):
  data = _sdist(tmp_path, tmp_path / 'marker')
  _index(monkeypatch, tmp_path, data, digest='0' * 64)
  with pytest.raises(collect.CollectError, match='hash'):
    asyncio.run(collect.fetch('strange==1.0', tmp_path / 'sources'))


def test_an_archive_that_grows_is_refused(tmp_path, monkeypatch):
  data = gzip.compress(bytes(70 << 20), compresslevel=1)
  _index(monkeypatch, tmp_path, data)
  with pytest.raises(collect.CollectError, match='more than'):
    asyncio.run(collect.fetch('strange==1.0', tmp_path / 'sources'))


def _wanted(why, requires=()):
  output = environment.Output({'t': {'status': 'ERROR', 'why': why}}, {}, {}, 0.0)
  source = collect.Source('own', '1', '', '', {}, None, frozenset(requires))
  return environment._repair(output, source)


def test_what_tests_print_installs_nothing_that_is_not_declared():
  """Anybody may register a name and print it."""
  why = "No module named 'evil_module'"
  assert _wanted(why) == set()
  assert _wanted(why, {'evil-module'}) == {'evil-module'}
  assert _wanted("No module named 'dateutil'") == {'python-dateutil'}


def test_declared_names_of_each_place():
  files = {
    'pyproject.toml': b'[project]\ndependencies = ["Aa_b>=1"]\n'
    b'[project.optional-dependencies]\ntest = ["bb[x]>2"]\n'
    b'[dependency-groups]\ndev = ["cc", {include-group = "test"}]\n',
    'setup.cfg': b'[options]\ninstall_requires =\n  dd>=1\n  ee\n'
    b'[options.extras_require]\nall = ff\n',
    'tox.ini': b'[testenv]\ndeps =\n  py311: gg\n  hh>=2\n',
    'setup.py': b'setup(install_requires=["ii"], extras_require={"x": ["jj==1"]})',
    'requirements-dev.txt': b'kk # a comment\n-r other.txt\nll==2\n',
    'docs/requirements.rst': b'nothing',
  }
  found = requirements.declared(files, ['mm (>=2)'])
  assert found == {'aa-b', *'bb cc dd ee ff gg hh ii jj kk ll mm'.split()}
