"""Law 6 for the engine: on a mesh every call returns what it does on one device.

Processes of 8 virtual devices each.
"""

from __future__ import annotations

import json
import math

import pytest

from tests import processes
from tests.rollout import mesh_worker

SHORT = ('fsdp expert tensor', 'data tensor')
LONG = tuple(name for name in mesh_worker.CASES if name not in SHORT)


def run(names):
  child = processes.start('tests.rollout.mesh_worker', *names)
  ((out, err),) = processes.finish([child])
  results = {r['case']: r for r in map(json.loads, out.splitlines())}
  assert set(results) == set(names), err[-3000:]
  return results


@pytest.fixture(scope='module')
def short():
  return run(SHORT)


@pytest.fixture(scope='module')
def long():
  return run(LONG)


def check(name, result):
  case = mesh_worker.CASES[name]
  tensor = case.mesh.get('tensor', 1)
  assert not result['differing'] and result['leaves'] > 19
  assert result['worst'][1] < 1e-5, result['worst']
  assert result['drawn'] > 20
  assert result['devices'] == math.prod(case.mesh.values())
  assert result['pages_of_device'] == mesh_worker.CONFIG.pages
  assert result['heads_of_device'] == (4 if tensor > 4 else 4 // tensor)
  assert result['experts_of_device'] == 8 // case.mesh.get('expert', 1)


@pytest.mark.parametrize('name', SHORT)
def test_calls_do_not_depend_on_the_mesh(short, name):
  """Tokens, versions and expert ids are equal and log-probabilities within 1e-5, of the
  scheduler's and of JetStream's calls: a shared prefix, rows that stop at different
  times, and new weights in between that come from another mesh. No weights are repeated
  on the devices that could split them, no pages on those that split the rows, and
  nothing compiles after the warm-up."""
  check(name, short[name])


@pytest.mark.long
@pytest.mark.parametrize('name', LONG)
def test_calls_do_not_depend_on_the_axis(long, name):
  """The same for each axis alone and for all pairs, and for loops over layers that are
  unrolled."""
  check(name, long[name])
