"""The engine's calls that the plan compiles, on meshes, against the model."""

from __future__ import annotations

import json

import pytest

from tests import processes
from tests.plan import serving_worker


@pytest.fixture(scope='module')
def results():
  child = processes.run('tests.plan.serving_worker')
  lines = [json.loads(line) for line in child.stdout.splitlines()]
  assert len(lines) == len(serving_worker.MESHES), child.stderr[-3000:]
  return {line['case']: line for line in lines}


@pytest.mark.long
@pytest.mark.parametrize('name', serving_worker.MESHES)
def test_served_is_the_model(results, name):
  """Rows of unlike lengths, through the cache in two chunks and one step, against the
  model over whole rows, in float64: a mesh that sums a head or an expert twice, or a
  mask that shows padding, would be planned and timed all the same."""
  assert results[name]['same']
  assert results[name]['error'] < 1e-12
