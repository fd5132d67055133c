"""Law 6 for the learner: rows, chunks, replay, CISPO and MTP on a mesh are those of one
device. Processes of 8 virtual devices each."""

from __future__ import annotations

import itertools
import json

import pytest

from tests import processes
from tests.rl import mesh_worker

# With replay and without are compared with two references of one device; a process has
# the cases of one of them. tests/forge/test_processes.py has fsdp, expert and tensor.
LONG = ('data fsdp context',)
THOROUGH = ('fsdp expert tensor', 'tensor context')
FREE = ('expert context', 'imitation')
SEQUENCES = ('sequences',)  # and a reference, by passes of their own
CRITIC, OWN_CRITIC = ('critic',), ('own critic',)


def test_every_pair_of_axes_is_in_a_mesh():
  """Three axes at once where that saves a mesh."""
  axes = ('data', 'fsdp', 'expert', 'tensor', 'context')
  meshes = [mesh_worker.CASES[name].mesh for name in (*LONG, *THOROUGH, *FREE)]
  for pair in itertools.combinations(axes, 2):
    assert any(set(pair) <= mesh.keys() for mesh in meshes), pair


@pytest.mark.parametrize(
  'names',
  [
    pytest.param(LONG, marks=pytest.mark.long),
    pytest.param(THOROUGH, marks=pytest.mark.thorough),
    pytest.param(FREE, marks=pytest.mark.thorough),
    pytest.param(SEQUENCES, marks=pytest.mark.long),
    pytest.param(CRITIC, marks=pytest.mark.thorough),
    pytest.param(OWN_CRITIC, marks=pytest.mark.thorough),
  ],
)
def test_updates_do_not_depend_on_the_mesh(names):
  """Weights, moments, router biases and metrics after two updates; the state is on all
  devices, and what the engine gets on one."""
  child = processes.run('tests.rl.mesh_worker', *names, timeout_s=1200)
  results = {r['case']: r for r in map(json.loads, child.stdout.splitlines())}
  assert set(results) == set(names), child.stderr[-3000:]
  for name, result in results.items():
    assert result['leaves'] > 40, name
    assert result['worst'][1] < 1e-9, (name, result['worst'])
    assert result['devices'] == [8] and result['devices_of_copy'] == [1], name
