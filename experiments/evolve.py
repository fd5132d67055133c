"""Evolves the scaffold of the white-box agent around a checkpoint's policy.

  python -m experiments.evolve --config=configs/evolve.py --workdir=workdir/evolve \
    --config.checkpoint=workdir/forge

Each round proposes a change of the scaffold (`m2jax.evolve.scaffold`), and keeps it if
paired attempts show that it is better. WORKDIR/record.jsonl has every round, and the
branch `main` of WORKDIR/scaffolds.git the last keep, which is also in WORKDIR/best. The
same command continues after a stop. docs/self_evolution.md.

With --replay it makes every decision of the record again, and compares.
"""

from __future__ import annotations

import pathlib

from absl import flags

from experiments import common, served
from m2jax import sandbox
from m2jax.checkpoint import CheckpointError
from m2jax.evolve import config as config_lib
from m2jax.evolve import lineage, proposers, record, scaffold
from m2jax.evolve.evaluator import InProcess, Tokens
from m2jax.evolve.loop import AlreadyOpened, EvaluationFailed, Loop
from m2jax.evolve.page import serving as page
from m2jax.evolve.page.source import Source
from m2jax.evolve.trees import GitFailed
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.roles import in_process
from m2jax.sharding import MeshConfig
from m2jax.train.workdir import WorkdirError, open_workdir

REPLAY = flags.DEFINE_bool('replay', False, 'Only check the record of --workdir.')


def main():
  workdir = common.workdir()
  if REPLAY.value:
    _replay(workdir)
    return
  values = common.values()
  mesh = common.build(MeshConfig, values.pop('mesh'), 'config.mesh')
  config = common.build(config_lib.EvolveConfig, values)
  proposer = proposers.make(config.proposer)
  splits, base = config.splits(), config.episodes.agent
  bounds = scaffold.narrowed(config.loop.bounds)
  start = scaffold.of_agent(base)
  if config.scaffold:
    start = scaffold.read(pathlib.Path(config.scaffold), bounds)
  others = {
    name: scaffold.read(pathlib.Path(folder), bounds)
    for name, folder in config.others.items()
  }
  common.start(mesh)
  sharding = common.make_sharding(mesh)
  step = config.step if config.step >= 0 else None
  found = served.load(config.checkpoint, step, sharding, config.engine.weights_dtype)
  open_workdir(config, workdir, fresh=common.FRESH.value)
  tokens = Tokens()
  with (
    served.engine(found, config.engine, sharding) as engine,
    in_process.serving(
      *(engine, config.scheduler, config.gateway, found.variables),
      found.load_tokenizer(),
      tokens.add,
    ) as (scheduler, gateway),
  ):

    def check():
      if not scheduler.alive:
        raise RolloutsFailed(f'the engine has stopped: {scheduler.stopped_reason}')

    loop = Loop(
      workdir,
      config.loop,
      start,
      splits,
      InProcess(config.episodes, gateway.base_url, gateway.sessions, tokens, check),
      proposer,
      tools=config_lib.tools(splits.development[:16]),
      proposer_settings=vars(config.proposer),
      others=others,
    )
    state = loop.run()
    loop.close()
  state.nodes[state.incumbent].scaffold.write(workdir / 'best')
  page.write(Source(workdir), workdir / page.FILE_NAME)
  _report(state, workdir)


def _replay(workdir: pathlib.Path) -> None:
  path = workdir / record.FILE_NAME
  lines = record.read(path)
  if not lines:
    raise common.BadInput(f'{path}: no record')
  differing = list(lineage.replay(lines))
  if differing:
    raise common.BadInput(f'{path}: other decisions: {"; ".join(differing[:5])}')
  rounds = lineage.fold(lines).rounds
  print(f'{path}: {rounds} rounds, and every decision is the same')


def _report(state: lineage.Lineage, workdir: pathlib.Path) -> None:
  kept = [a for a in state.attempts if a.decision == 'keep']
  spent = state.spent
  print(
    f'\n{state.rounds} rounds, {len(kept)} kept; {spent.episodes:,} episodes, '
    f'{spent.tokens:,} tokens, {spent.seconds:,.0f} s; stopped: {state.stopped}'
  )
  for attempt in kept:
    print(f'round {attempt.round:>4}: {attempt.effect:+.3f}  {sorted(attempt.changes)}')
  sealed = state.sealed
  print(f'\n{"third split":<16} {"success":>7}')
  for name, mean in sealed['means'].items():
    print(f'{name:<16} {"-" if mean is None else format(mean, ".3f"):>7}')
  if sealed['effect'] is not None:
    print(
      f'incumbent − start {sealed["effect"]:+.3f}, 95 % interval '
      f'[{sealed["low"]:+.3f}, {sealed["high"]:+.3f}]'
    )
  print(f'\nthe scaffold: {workdir / "best"}; the record: {workdir / record.FILE_NAME}')


if __name__ == '__main__':
  expected = (CheckpointError, sandbox.SandboxUnavailable, RolloutsFailed, WorkdirError)
  common.run(main, *expected, AlreadyOpened, EvaluationFailed, GitFailed)
