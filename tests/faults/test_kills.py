"""Law 5 over processes: SIGKILL of every role and of the database server."""

from __future__ import annotations

import collections
import json
import os

import pytest

from tests.faults import kills
from tests.forge.remote import roles_config

# `make test-kills`: 50.
KILLS = int(os.environ.get('KILLS', 0))
SEED = int(os.environ.get('SEED', 3))
ITEMS = max(100, 8 * KILLS)  # enough for the kills to hit a run that goes on


@pytest.mark.hours
@pytest.mark.skipif(not KILLS, reason='takes ten minutes and more: make test-kills')
def test_every_process_is_killed_at_a_random_moment(postgresql, tmp_path):
  """The surviving weights were trained on each item once, in as many updates as without
  kills; no item fails. Prints the figures. One kill of each process is in
  tests/forge/remote/test_roles.py."""
  plan = kills.plan(KILLS, SEED)
  trained, figures = kills.drain(tmp_path / 'killed', postgresql, ITEMS, plan)
  print(json.dumps(figures, indent=2))
  assert trained == collections.Counter(range(ITEMS))
  assert figures['updates'] == -(-ITEMS // roles_config.PER_STEP)
  if KILLS >= 20:  # fewer may find no group in work
    assert figures['attempts_lost'] > 0
  # A learner that is killed in its start may not have begun one.
  assert figures['lineages_begun'] <= figures['by_victim'].get('learner', 0)
  assert figures['lineages_begun'] >= (KILLS >= len(kills.NAMES) + 1)
