"""Law 6: each process publishes and reads its own shards, on whatever meshes."""

from __future__ import annotations

import numpy as np
import pytest

from m2jax.checkpoint import published
from tests import processes
from tests.checkpoint.published import mesh_worker


@pytest.mark.long
def test_shards_of_two_processes(tmp_path):
  """Two processes of two devices publish a matrix split both ways and one that is
  repeated; readers on another mesh of theirs get every bit of their parts, by whole
  versions and by differences, and hold no more than their parts; so does one alone."""
  found = processes.together(
    'tests.checkpoint.published.mesh_worker', 2, {'directory': str(tmp_path / 'w')}
  )
  assert [one['wrong'] for one in found] == [[], []]
  size = np.prod(mesh_worker.SHAPE) * 4
  assert all(one['held_bytes'] == size for one in found)  # half of each of two
  files = {p.name for p in (tmp_path / 'w' / 'versions' / '4').iterdir()}
  assert files >= {'delta.0.bin', 'delta.1.bin', 'delta.0.json', 'delta.1.json'}
  reader = published.Reader(tmp_path / 'w')
  alone = reader.load(reader.latest())
  for leaf in alone.values():
    np.testing.assert_array_equal(leaf, mesh_worker.values(4))
