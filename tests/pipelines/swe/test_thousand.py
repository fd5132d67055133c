"""A thousand SWE tasks in one run: hours, so only by `make test-thousand`.

`make test-thousand COUNT=20 WORKDIR=DIR` makes fewer; a run that was stopped continues.
"""

from __future__ import annotations

import asyncio
import collections
import os
import re
from pathlib import Path

import pytest

from m2jax.tasks import harbor
from m2jax_pipelines import make, records, swe

_COUNT = int(os.environ.get('SWE_COUNT', 0))
pytestmark = [
  pytest.mark.hours,
  pytest.mark.skipif(not _COUNT, reason='takes hours: make test-thousand'),
]
# Of 1,000 tasks; a family's share varies with what the packages' tests can tell.
_LEAST = {'bug': 500, 'merged': 40, 'test': 40, 'review': 40, 'performance': 5}


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  workdir = os.environ.get('SWE_WORKDIR')
  workdir = Path(workdir) if workdir else tmp_path_factory.mktemp('thousand')
  config = swe.Config(count=_COUNT, parallel=1)
  asyncio.run(make.run(config, workdir))
  rows = records.read(workdir / 'records.jsonl')
  return config, workdir, rows, [r for r in rows if r['outcome'] == 'admitted']


def test_the_count_is_reached_with_every_family(made):
  _, _, _, admitted = made
  assert len(admitted) >= _COUNT
  families = collections.Counter(row['family'] for row in admitted)
  if _COUNT >= 1000:
    assert {f: n for f, n in _LEAST.items() if families[f] < n} == {}, families
  assert families['bug'] > 0


def test_splits_are_by_package(made):
  """Each package in the split that the settings say, in no other, on disk too."""
  config, workdir, _, admitted = made
  for row in admitted:
    assert row['split'] == config.split(row['source'])
    assert (workdir / 'tasks' / row['split'] / row['task'] / 'task.toml').is_file()
  found = {p.name for s in harbor.SPLITS for p in (workdir / 'tasks' / s).iterdir()}
  assert found == {row['task'] for row in admitted}


def test_no_task_is_there_twice(made):
  _, workdir, rows, admitted = made
  ids = collections.Counter(row['id'] for row in rows if row['outcome'] != 'invalid')
  assert [i for i, n in ids.items() if n > 1] == []
  assert len({row['task'] for row in admitted}) == len(admitted)
  works = collections.Counter(
    (directory.instruction, directory.solution().get('gold.patch', name))
    for name, directory in _directories(workdir, admitted)
  )
  assert [work for work, n in works.items() if n > 1] == []


def test_provenance_is_complete(made):
  _, workdir, _, admitted = made
  for name, directory in _directories(workdir, admitted):
    source = directory.metadata.source
    assert source['registry'] == 'PyPI' and source['name'] and source['version'], name
    assert re.fullmatch('[0-9a-f]{64}', source['sha256']), name
    assert source['licence'] not in ('', 'unknown', 'UNKNOWN'), (name, source)


def _directories(workdir, admitted):
  for row in admitted:
    path = workdir / 'tasks' / row['split'] / row['task']
    yield row['task'], harbor.read(path)
