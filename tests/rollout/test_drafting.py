"""The acceptance by position that RL's records have."""

from __future__ import annotations

import numpy as np

from m2jax.rollout.decode_state import Drafted
from m2jax.rollout.drafting import Drafting, acceptance


def drafted(tested, accepted) -> Drafted:
  tested, accepted = np.array(tested), np.array(accepted)
  rows = len(tested)
  return Drafted(np.full(rows, 4), tested, accepted, np.ones(rows, bool))


def test_acceptance_between_two_records():
  """Shares of the drafts between the two, not of all; a position that had none is
  absent, and so is everything if the engine was restarted since."""
  drafts = Drafting(most=3)
  drafts.count(2, drafted([[4, 2], [4, 0]], [[2, 1], [0, 0]]))
  first = drafts.stats()
  assert acceptance(first, {}) == {1: 2 / 8, 2: 1 / 2}
  drafts.count(1, drafted([[4], [4]], [[4], [3]]))
  assert acceptance(drafts.stats(), first) == {1: 7 / 8}
  assert acceptance(first, drafts.stats()) == {}
  assert acceptance(drafts.stats(), {}) == {1: 9 / 16, 2: 1 / 2}
  assert acceptance({}, {}) == acceptance(Drafting(most=0).stats(), {}) == {}
