"""Law 5 over processes: SIGKILL of every role and of the database server."""

from __future__ import annotations

import pytest

from tests.faults import kills


@pytest.mark.long
def test_every_process_is_killed_at_a_random_moment(postgresql, tmp_path):
  """Every item is trained once along the surviving lineage, none fails.

  `python -m tests.faults.kills` is the same, fifty times, beside an undisturbed run.
  """
  plan = kills.plan(6, seed=3)
  assert {kill.victim for kill in plan} == {*kills.NAMES, kills.DATABASE}
  figures = kills.drain(tmp_path, postgresql, 100, plan)
  assert figures['kills'] == 6 and figures['lineages_begun'] == 1
  assert figures['attempts_lost'] > 0  # else the kills did not hit anything
