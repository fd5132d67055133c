"""What must hold of a table of block pairs that two cores share."""

from __future__ import annotations

import numpy as np


def check_cuts(cuts, ids, split):
  """No result is written by two cores, each core has one, and no other cut between two
  results is nearer to the middle."""
  possible = np.flatnonzero(np.diff(ids)) + 1
  assert len(cuts) == int(split and len(possible) > 0)
  for cut in cuts:
    assert cut in possible
    assert abs(2 * cut - len(ids)) == min(abs(2 * possible - len(ids)))
