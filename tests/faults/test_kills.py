"""Law 5 over processes: SIGKILL of every role and of the database server."""

from __future__ import annotations

import collections
import json
import os

import pytest

from tests.faults import kills

# `make test-kills`: 50.
KILLS = int(os.environ.get('KILLS', 0))
SEED = int(os.environ.get('SEED', 3))
ITEMS = max(100, 8 * KILLS)  # enough for the kills to hit a run that goes on


@pytest.mark.hours
@pytest.mark.skipif(not KILLS, reason='takes ten minutes and more: make test-kills')
def test_every_process_is_killed_at_a_random_moment(postgresql, tmp_path):
  """What the surviving weights were trained on is what an undisturbed run trains on,
  each item once; none fails. Prints the figures. `make test-long` kills each process
  once, in tests/forge/roles/test_roles.py."""
  plan = kills.plan(KILLS, SEED)
  undisturbed, calm = kills.drain(tmp_path / 'undisturbed', postgresql, ITEMS, [])
  trained, figures = kills.drain(tmp_path / 'killed', postgresql, ITEMS, plan)
  print(json.dumps({'undisturbed': calm, 'killed': figures}, indent=2))
  assert trained == undisturbed == collections.Counter(range(ITEMS))
  assert figures['updates'] == calm['updates']
  assert (calm['attempts_lost'], calm['updates_undone']) == (0, 0)
  if KILLS >= 20:  # fewer may find no group in work
    assert figures['attempts_lost'] > 0
  # A learner that is killed in its start may not have begun one.
  assert figures['lineages_begun'] <= figures['by_victim'].get('learner', 0)
  if KILLS > len(kills.NAMES):
    assert {kill.victim for kill in plan} == {*kills.NAMES, kills.DATABASE}
    assert figures['lineages_begun'] >= 1
