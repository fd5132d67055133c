"""A run whose roles are processes: each is killed, nothing is trained twice.

`make test-kills` kills them at random moments (tests/faults/test_kills.py).
"""

from __future__ import annotations

import pytest

from m2jax.observe import metrics as metrics_lib
from m2jax.pool import data_pool, database, leases
from tests import processes
from tests.faults import witness
from tests.forge.roles import roles_config
from tests.forge.roles.role_processes import Roles


def handovers(roles: Roles, engine: int) -> int:
  """Prompts that an engine has taken from the prefill process since its start.

  Raises:
    AssertionError: it holds what that process has sent to be malformed.
  """
  stats = roles.engine_stats(engine)
  assert not stats.get('prefill_engine_protocol_errors'), stats
  return stats.get('handovers', 0)


def served(roles: Roles) -> bool:
  """Whether the engine of several processes draws tokens, after new weights."""
  stats = roles.engine_stats(1)
  return bool(stats.get('weight_updates') and stats['sampled_tokens'])


def holds_an_item(url: str, pid: int) -> bool:
  """Whether an agents' process has a lease."""
  opened, _ = database.open_database(url)
  try:
    with opened.engine.connect() as connection:
      held = [lease.lease.partition('/')[0] for lease in leases.current(connection)]
  finally:
    opened.close()
  return any(owner.endswith(f':{pid}') for owner in held)


@pytest.mark.long
def test_every_role_and_the_database_are_killed(tmp_path, postgresql):
  """Every item is trained exactly once along the lineage of the last weights, none
  fails, all of its recorded tokens are of one attempt, and the roles stop cleanly."""
  items, url = list(range(roles_config.ITEMS)), postgresql.new_url()
  flags = (
    f'--config.roles.pool_url={url}',
    f'--config.roles.prefill_address=tcp:127.0.0.1:{processes.free_port()}',
    '--config.roles.handover.local_tokens=16',
  )
  # An engine on a mesh, another and the learner of two processes.
  mesh = ['--config.roles.engine_mesh.expert=2']
  of, several = {'engine': mesh, 'engine2': mesh}, {'engine2': 2, 'learner': 2}
  with Roles(tmp_path, *flags, engines=2, of=of, processes=several) as roles:
    for name in ('learner', 'engine', 'gateway', 'engine2', 'prefill'):
      roles.start(name)
    key = roles.workdir / 'keys' / 'engine'
    roles.wait(lambda: key.exists() and all(roles.engine_stats(i) for i in (0, 1)))
    # Only now: else the items may end before engine2 serves.
    for name in ('agents', 'agents2'):
      roles.start(name)
    roles.more_updates(2)
    roles.wait(lambda: handovers(roles, 0) and served(roles))
    both = ('engine', 'engine2')  # then every request fails until one has started
    for names in (both, (), ('agents',), ('gateway',), ('learner',), ('prefill',)):
      for name in names:
        if name == 'agents':  # so that an attempt is lost
          pid = roles.children[name].pid
          roles.wait(lambda pid=pid: holds_an_item(url, pid))
        roles.kill(name)
      if not names:
        postgresql.kill()
        postgresql.start()
      roles.more_updates(2)
    roles.wait(lambda: handovers(roles, 0) and served(roles))
    roles.finish()
    assert (roles.workdir / 'report.html').exists()

    found = witness.surviving(roles.witness('resumed', 'update'))
  assert found.lives == 2 and sorted(found.items) == items
  with data_pool.DataPool(url) as pool:
    assert not pool.failures() and pool.counts()['taken'] == len(items)
    attempts = {item.index: item.attempt for item in pool.items()}
    for index in items:
      group = pool.group(index)
      prefix = f'rl-{index}-{attempts[index]}-'
      assert [t.rank for t, _ in group] == [0, 1]
      assert all(t.session.startswith(prefix) for t, _ in group)
    assert pool.lineages().current == 1
  assert sum(attempts.values()) > 0  # else no attempt was lost
  useful = [r['useful'] for r in roles.witness('update')]
  assert sum(useful) > len(items) / 4  # else the weights hardly changed
  records = metrics_lib.read(roles.workdir, 'rl')
  assert [r['step'] for r in records] == sorted(found.updates)
  wrote = [f'weights/published_{kind}_bytes' for kind in ('delta', 'whole')]
  assert all(any(r[name] for name in wrote) for r in records)
  assert any(r[wrote[0]] for r in records)
