"""A tiny package made on the fly, two releases of it, and a site with pytest."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from m2jax import sandbox
from m2jax_pipelines.swe import collect, environment
from m2jax_pipelines.swe.config import Config

CORE = '''\
"""Arithmetic of small things."""

LIMIT = 100


def clamp(value, low, high):
  """value, but at least low and at most high."""
  if value < low:
    return low
  if value > high:
    return high
  return value


def total(values):
  """Sum of the values that are not None."""
  result = 0
  for value in values:
    if value is None:
      continue
    result += value
  return result


def mean(values):
  """Arithmetic mean; None of nothing."""
  count = len([v for v in values if v is not None])
  if not count:
    return None
  return total(values) / count


def words(text, most=3):
  """The first words of a text."""
  found = text.split()
  return found[:most] if len(found) > most else found
'''
# The older release: mean fails for None, and words does not exist.
OLD_CORE = CORE.replace('len([v for v in values if v is not None])', 'len(values)')
OLD_CORE = OLD_CORE[: OLD_CORE.index('def words')].rstrip() + '\n'
INIT = 'from tinycalc.core import *  # noqa\n'
TESTS = """\
import pytest

from tinycalc import core


@pytest.mark.parametrize('value, right', [(1, 2), (2, 2), (3, 3), (4, 4), (5, 4)])
def test_clamp(value, right):
  assert core.clamp(value, 2, 4) == right


def test_total():
  assert core.total([1, None, 2]) == 3
  assert core.total([]) == 0
"""
MORE_TESTS = """\
from tinycalc import core


def test_mean():
  assert core.mean([2, 4]) == 3
  assert core.mean([]) is None


def test_mean_of_none():
  assert core.mean([2, None, 4]) == 3


def test_words():
  assert core.words('a b c d') == ['a', 'b', 'c']
  assert core.words('a b') == ['a', 'b']
"""


def source(directory: Path, version: str = '2.0', core: str = '') -> collect.Source:
  """A release, as `collect.fetch` returns it; `core` instead of its code."""
  texts = {
    'src/tinycalc/__init__.py': INIT,
    'src/tinycalc/core.py': core or (CORE if version == '2.0' else OLD_CORE),
    'tests/test_core.py': TESTS,
    'tests/test_more.py': MORE_TESTS,
    'CHANGES.md': '# 1.0\n\nFirst.\n',
  }
  if version == '2.0':
    texts['CHANGES.md'] = '# 2.0\n\nmean skips None; words is new.\n\n# 1.0\n\nFirst.\n'
  files = {path: text.encode() for path, text in texts.items()}
  archive = directory / f'{version}.tar.gz'
  collect.pack(files, archive)
  digest = hashlib.sha256(archive.read_bytes()).hexdigest()
  return collect.Source('tinycalc', version, digest, 'MIT', files, archive)


def offline(patch: pytest.MonkeyPatch) -> None:
  """Two releases of the package, instead of the registry's."""

  async def fetch(requirement, directory):
    return source(directory, requirement.partition('==')[2])

  async def versions(name):
    return ['2.0', '1.0']

  patch.setattr(collect, 'fetch', fetch)
  patch.setattr(collect, 'versions', versions)


def site(dataset: Path) -> str:
  """Copies this environment's pytest to where `environment.site` would install it."""
  digest = hashlib.sha256(environment.PYTEST.encode()).hexdigest()[:12]
  target = dataset / 'sites' / digest
  target.mkdir(parents=True, exist_ok=True)
  for name in ('pytest', '_pytest', 'pluggy', 'iniconfig', 'packaging', 'pygments'):
    found = importlib.util.find_spec(name).submodule_search_locations[0]
    shutil.copytree(found, target / name, dirs_exist_ok=True)
  shutil.copy(importlib.util.find_spec('py').origin, target / 'py.py')
  facts = importlib.metadata.distribution('pluggy').locate_file('')
  for path in Path(facts).glob('pluggy-*.dist-info'):
    shutil.copytree(path, target / path.name, dirs_exist_ok=True)
  return digest


def build(
  dataset: Path,
  version: str = '2.0',
  core: str = '',
  more: Mapping[str, bytes] | None = None,
) -> environment.Environment:
  """The environment of a release with `more` files; `core` as in `source`."""
  site(dataset)
  release = source(dataset, version, core)
  release = dataclasses.replace(release, files={**release.files, **(more or {})})

  async def made():
    try:
      return await environment.build(release, dataset, 0)
    finally:
      await sandbox.shutdown()

  return asyncio.run(made())


CONFIG = Config(packages=('tinycalc==2.0',), merge=2, invert=2, review_=3, batch=8)
