"""Kills the processes of a run in roles at random moments, and judges law 5.

Learner, engine, gateway, two agents' processes and a PostgreSQL server drain a finite
queue, undisturbed and with kills. Each kill is a SIGKILL of one of them, after 0 to 2
more updates and a random pause, so that some hit a process that has not finished its
start. Compared are the multisets of the items that the surviving weights were trained
on: each item once.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import random
import statistics
import sys
import time

from m2jax.observe import metrics as metrics_lib
from m2jax.pool import data_pool
from tests.faults import witness
from tests.forge.roles.role_processes import ROLES, Roles
from tests.pool import postgres

NAMES = (*ROLES, 'agents2')
DATABASE = 'database'


@dataclasses.dataclass(frozen=True)
class Kill:
  """SIGKILL of `victim` once `updates` more were made and `pause_s` has passed."""

  victim: str
  updates: int
  pause_s: float


def plan(kills: int, seed: int) -> list[Kill]:
  """Random kills, in which every victim has its turn before any has another."""
  rng, found, left = random.Random(seed), [], []
  for _ in range(kills):
    left = left or rng.sample([*NAMES, DATABASE], len(NAMES) + 1)
    found.append(Kill(left.pop(), rng.choice((0, 1, 1, 2)), rng.uniform(0.0, 1.5)))
  return found


def drain(
  directory: pathlib.Path, server: postgres.Server, items: int, kills: list[Kill]
) -> tuple[collections.Counter, dict]:
  """Runs until the queue of `items` is empty; returns what was trained, and figures.

  Raises:
    AssertionError: metrics or tokens are not those of the surviving updates, a role
      stopped, or nothing happened for `role_processes.TIMEOUT_S`.
  """
  directory.mkdir()
  url, started_s = server.new_url(), time.monotonic()
  flags = f'--config.roles.pool_url={url}', f'--config.rl.max_items={items}'
  recovery_s = collections.defaultdict(list)
  with Roles(directory, *flags) as roles:
    for name in NAMES:
      roles.start(name)
    roles.more_updates(1)
    for i, kill in enumerate(kills, 1):
      roles.more_updates(kill.updates)
      time.sleep(kill.pause_s)
      print(f'kill {i} of {len(kills)}: {kill.victim}', file=sys.stderr, flush=True)
      before, killed_s = len(roles.witness('update')), time.monotonic()
      if kill.victim == DATABASE:
        server.kill()
        server.start()
      else:
        roles.kill(kill.victim)
      if kill.updates:  # others have the next kill before they have recovered
        roles.more_updates(1, before)
        recovery_s[kill.victim.rstrip('2')].append(time.monotonic() - killed_s)
    roles.finish()
    trained, figures = judge(roles, url)
  by_victim = collections.Counter(kill.victim.rstrip('2') for kill in kills)
  return trained, figures | {
    'items': sum(trained.values()),
    'kills': len(kills),
    'by_victim': dict(sorted(by_victim.items())),
    'next_update_s': {
      name: [round(statistics.median(all_s), 1), round(max(all_s), 1)]
      for name, all_s in sorted(recovery_s.items())
    },
    'wall_s': round(time.monotonic() - started_s),
  }


def judge(roles: Roles, url: str) -> tuple[collections.Counter, dict]:
  """The items that the last weights were trained on, and what the faults cost."""
  updates, undone, _ = found = witness.surviving(roles.witness('resumed', 'update'))
  trained = collections.Counter(found.items)
  records = metrics_lib.read(roles.workdir, 'rl')
  assert [r['step'] for r in records] == sorted(updates)
  with data_pool.DataPool(url) as pool:
    assert not pool.failures() and pool.counts()['taken'] == len(trained)
    attempts = {item.index: item.attempt for item in pool.items()}
    for index in trained:
      group = pool.group(index)
      prefix = f'rl-{index}-{attempts[index]}-'
      assert [t.rank for t, _ in group] == [0, 1], index
      assert all(t.session.startswith(prefix) for t, _ in group), index
    lineages = pool.lineages().current
  return trained, {
    'updates': len(updates),
    'updates_undone': undone,
    'attempts_lost': sum(attempts.values()),
    'lineages_begun': lineages,
  }
