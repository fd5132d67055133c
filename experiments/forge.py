"""The main job: a tiny M2 learns shell tasks, by SFT and then by RL.

python -m experiments.forge --config=configs/forge.py --workdir=workdir/forge
"""

from __future__ import annotations

from experiments import common
from m2jax import sandbox
from m2jax.checkpoint import CheckpointError
from m2jax.forge import run
from m2jax.forge.commands import Stopped
from m2jax.forge.config import ForgeConfig
from m2jax.forge.roles import RolloutsFailed
from m2jax.observe import stats
from m2jax.train.workdir import WorkdirError


def main():
  config = common.build(ForgeConfig, common.values())
  common.virtual_devices(config.mesh)
  process = common.join_processes()
  sharding = common.make_sharding(config.mesh)
  evaluations = run.run(config, common.workdir(), common.FRESH.value, sharding)
  if process:
    return  # process 0 reports
  print('\nheld-out success            temperature 1 [95 % interval]     greedy')
  for row in evaluations:
    successes, n = row.sampled
    low, high = stats.wilson(successes, n)
    greedy = row.greedy[0] / row.greedy[1] if row.greedy else float('nan')
    rate = f'{successes / n:.3f} [{low:.3f}, {high:.3f}] of {n}'
    print(f'  {row.stage:<24}  {rate:<32}  {greedy:.3f}')
  print(f'\nreport: {common.workdir() / "report.html"}')


if __name__ == '__main__':
  expected = (
    CheckpointError,
    WorkdirError,
    sandbox.SandboxUnavailable,
    RolloutsFailed,
    Stopped,
  )
  common.run(main, *expected, distributed=True)
