"""The main job: a tiny M2 learns shell tasks, by SFT and then by RL.

  python -m experiments.forge --config=configs/forge.py --workdir=workdir/forge

In processes of their own, each with the same --config and --workdir (docs/roles.md):

  python -m experiments.forge --role=learner …
  python -m experiments.forge --role=engine …   # one or several
  python -m experiments.forge --role=prefill …  # or none
  python -m experiments.forge --role=gateway …
  python -m experiments.forge --role=agents …   # any number of these
"""

from __future__ import annotations

import errno
import functools

from absl import flags

from experiments import common
from m2jax import sandbox
from m2jax.checkpoint import CheckpointError
from m2jax.forge import run
from m2jax.forge.config import ForgeConfig
from m2jax.forge.errors import ProcessLost, RolloutsFailed, Stopped
from m2jax.forge.processes.commands import Commands
from m2jax.forge.roles import agents, engine, gateway, in_process, learner, prefill
from m2jax.observe import stats
from m2jax.pool.data_pool import PoolBroken
from m2jax.train.workdir import WorkdirError

EXPECTED = (  # errors of the user and of the machine, reported in one line
  CheckpointError,
  WorkdirError,
  sandbox.SandboxUnavailable,
  RolloutsFailed,
  Stopped,
  PoolBroken,
)
_ADDRESS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
ROLE = flags.DEFINE_enum(
  'role',
  'all',
  ('all', 'learner', 'engine', 'prefill', 'gateway', 'agents'),
  'What this process does; all: everything.',
)


def main():
  config = common.build(ForgeConfig, common.values())
  if ROLE.value in ('all', 'learner'):
    _learn(config)
  else:
    _serve(config)


def _serve(config: ForgeConfig) -> None:
  """Any role but the learner's, until Ctrl-C, or SIGTERM, which is no success: a
  scheduler has to start the role again elsewhere."""
  for flag, given, where in (
    ('fresh', common.FRESH, 'learner or all'),
    ('distributed', common.DISTRIBUTED, 'all, learner or engine'),
  ):
    if given.value and ROLE.value not in where:
      raise common.BadInput(f'--{flag}: is for --role={where}, not {ROLE.value}')
  workdir, roles = common.workdir(), config.roles
  if ROLE.value == 'prefill' and not roles.prefill_address:
    raise common.BadInput(
      '--config.roles.prefill_address: is empty: give it to all roles, such as '
      'tcp:127.0.0.1:8104'
    )
  modules = {'prefill': prefill, 'gateway': gateway, 'agents': agents}
  meshes = {'engine': roles.engine_mesh, 'prefill': roles.prefill_mesh}
  if ROLE.value in meshes:
    common.start(meshes[ROLE.value])
  try:
    if ROLE.value == 'engine':
      common.join_processes()
      sharding = common.make_sharding(roles.engine_mesh, 'config.roles.engine_mesh')
      engine.run(config, workdir, sharding)
    else:
      modules[ROLE.value].run(config, workdir)
  except KeyboardInterrupt:
    pass
  except ProcessLost as error:
    common.fail(error, at_once=True)
  except OSError as error:
    urls = {
      'engine': ('engine_urls', roles.engine_urls[roles.engine]),
      'prefill': ('prefill_address', roles.prefill_address),
      'gateway': ('gateway_url', roles.gateway_url),
    }
    if ROLE.value not in urls or error.errno not in _ADDRESS:
      raise
    field, url = urls[ROLE.value]
    raise common.BadInput(
      f'--config.roles.{field}: {url}: {error.strerror}: choose another port, or end '
      'the process that has it'
    ) from error
  common.check_stopped()
  print('\nstopped')


def _learn(config: ForgeConfig) -> None:
  """The learner, or the whole run in one process, until it is complete."""
  common.start(config.mesh)
  process = common.join_processes()
  sharding = common.make_sharding(config.mesh)
  workdir = common.workdir()
  commands, publishes = Commands(), ROLE.value == 'learner'
  rollouts = in_process.rollouts_in(workdir)
  if publishes:
    rollouts = learner.rollouts_in(workdir, commands)
  evaluations = run.run(
    *(config, workdir, common.FRESH.value, sharding, rollouts, commands),
    publishes=publishes,
    watch=functools.partial(common.watching, pool_url=config.roles.pool_url),
  )
  if process:
    return  # process 0 reports
  print('\nheld-out success            temperature 1 [95 % interval]     greedy')
  for row in evaluations:
    successes, n = row.sampled
    low, high = stats.wilson(successes, n)
    greedy = f'{row.greedy[0] / row.greedy[1]:.3f}' if row.greedy else '-'
    rate = f'{successes / n:.3f} [{low:.3f}, {high:.3f}] of {n}'
    print(f'  {row.stage:<24}  {rate:<32}  {greedy}')
  print(f'\nreport: {common.workdir() / "report.html"}')


if __name__ == '__main__':
  common.run(main, *EXPECTED, distributed=True)
