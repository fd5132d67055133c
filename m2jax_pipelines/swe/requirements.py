"""Distributions that may be installed for a package's tests.

What tests print names modules, and anybody may print anything. So only those are
installed that the package's own metadata declare, or that the table below knows.
"""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

MODULES = {
  'attr': 'attrs',
  'attrs': 'attrs',
  'bs4': 'beautifulsoup4',
  'dateutil': 'python-dateutil',
  'docutils': 'docutils',
  'freezegun': 'freezegun',
  'hypothesis': 'hypothesis',
  'jinja2': 'jinja2',
  'mock': 'mock',
  'numpy': 'numpy',
  'pytz': 'pytz',
  'setuptools': 'setuptools',
  'six': 'six',
  'typing_extensions': 'typing-extensions',
  'yaml': 'pyyaml',
}
PLUGINS = {'benchmark': 'pytest-benchmark', 'mocker': 'pytest-mock'}
_NAME = re.compile(r'\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)')
_FILE = re.compile(r'(^|/)[\w.-]*requirements[\w.-]*\.txt$|(^|/)requirements/[\w.-]+$')
_FIELDS = ('install_requires', 'extras_require', 'tests_require')


def canonical(name: str) -> str:
  """A distribution's name as indexes compare it (PEP 503)."""
  return re.sub(r'[-_.]+', '-', name).lower()


def distribution(module: str, declared: Iterable[str]) -> str | None:
  """The distribution to install for a module; None if it may not be."""
  if module in MODULES:
    return MODULES[module]
  name = canonical(module)
  return name if name in declared else None


def declared(files: Mapping[str, bytes], stated: Iterable[str]) -> set[str]:
  """Canonical names that a release declares.

  Args:
    files: the release's files.
    stated: `Requires-Dist` of its metadata.
  """
  found = list(stated)
  for path, data in files.items():
    text = data.decode(errors='replace')
    if _FILE.search(path):
      found += text.splitlines()
    elif path == 'pyproject.toml':
      found += _of_pyproject(text)
    elif path in ('setup.cfg', 'tox.ini'):
      found += _of_ini(text)
    elif path == 'setup.py':
      found += _of_setup(text)
  names = (_NAME.match(line) for line in found)
  return {canonical(match[1]) for match in names if match}


def _of_pyproject(text: str) -> list[str]:
  try:
    table = tomllib.loads(text)
  except (tomllib.TOMLDecodeError, RecursionError):
    return []
  project = table.get('project', {})
  found = [table.get('dependency-groups')]
  if isinstance(project, dict):
    found += [project.get('dependencies'), project.get('optional-dependencies')]
  return [text for item in found for text in _strings(item)]


def _strings(value: Any) -> list[str]:
  """Texts of lists, and of lists in the values of a table."""
  if isinstance(value, dict):
    return [text for item in value.values() for text in _strings(item)]
  if isinstance(value, list | tuple):
    return [text for text in value if isinstance(text, str)]
  return [value] if isinstance(value, str) else []


def _of_ini(text: str) -> list[str]:
  parser = configparser.ConfigParser(interpolation=None, strict=False)
  try:
    parser.read_string(text)
  except (configparser.Error, ValueError):
    return []
  found = []
  for section in parser.sections():
    for key, value in parser.items(section):
      extras = section == 'options.extras_require'
      if extras or key in (*_FIELDS, 'deps'):
        # tox: `condition: requirement`
        found += [line.rpartition(': ')[2] for line in value.splitlines()]
  return found


def _of_setup(text: str) -> list[str]:
  try:
    tree = ast.parse(text)
  except (SyntaxError, ValueError, RecursionError):
    return []
  found = []
  for node in ast.walk(tree):
    if isinstance(node, ast.keyword) and node.arg in _FIELDS:
      try:
        found += _strings(ast.literal_eval(node.value))
      except (ValueError, TypeError, MemoryError, RecursionError):
        continue
  return found
