"""Law 6 for the engine: on a mesh every call returns what it does on one device.

Processes of 8 virtual devices each.
"""

from __future__ import annotations

import json
import math

import pytest

from tests import processes
from tests.rollout import mesh_worker

FAST = ('data tensor',)
LONG = ('fsdp expert tensor', 'tensor, few heads', 'expert tensor', 'drafts')
THOROUGH = tuple(name for name in mesh_worker.CASES if name not in FAST + LONG)


def run(names):
  child = processes.start('tests.rollout.mesh_worker', *names)
  ((out, err),) = processes.finish([child])
  results = {r['case']: r for r in map(json.loads, out.splitlines())}
  assert set(results) == set(names), err[-3000:]
  return results


@pytest.fixture(scope='module')
def fast():
  return run(FAST)


@pytest.fixture(scope='module')
def long():
  return run(LONG)


@pytest.fixture(scope='module')
def thorough():
  return run(THOROUGH)


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


@pytest.mark.parametrize('name', FAST)
def test_calls_do_not_depend_on_the_mesh(fast, name):
  """Tokens, versions and expert ids are equal and log-probabilities within 1e-5, of the
  scheduler's calls: a shared prefix, rows that stop at different times, and new weights
  in between that come from another mesh. No weights are repeated on the devices that
  could split them, no pages on those that split the rows, and nothing compiles after
  the warm-up."""
  check(name, fast[name])


@pytest.mark.long
@pytest.mark.parametrize('name', LONG)
def test_calls_do_not_depend_on_the_axes(long, name):
  """The same for three axes at once, with JetStream's calls, for heads that are not
  split, for drafts, and for loops over layers that are unrolled."""
  check(name, long[name])


@pytest.mark.thorough
@pytest.mark.parametrize('name', THOROUGH)
def test_calls_do_not_depend_on_the_axis(thorough, name):
  """The same for axes that the others lack, and for drafts and unrolled layers."""
  check(name, thorough[name])
