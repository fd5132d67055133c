"""Held-out success of a checkpoint on tasks, by family and number of calls.

  python -m experiments.evaluate --config=configs/evaluate.py \
    --checkpoint=workdir/forge --workdir=workdir/evaluate

With --suite=NAME, a suite of configs/suites.py against a checkpoint or a --url.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

from absl import flags, logging

from experiments import common, served, suite
from m2jax import sandbox
from m2jax.checkpoint import CheckpointError, policy
from m2jax.forge import evaluation
from m2jax.forge.config import RolloutConfig
from m2jax.forge.errors import RolloutsFailed, Stopped
from m2jax.forge.roles import in_process
from m2jax.observe import stats
from m2jax.pool.data_pool import DataPool
from m2jax.sharding import MeshConfig

CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, 'A workdir or a directory of checkpoints; default: --workdir.'
)
STEP = flags.DEFINE_integer('step', None, 'Checkpoint step; default: the latest.')


def main():
  if suite.SUITE.value:
    suite.main(CHECKPOINT.value, STEP.value)
    return
  values, workdir = common.values(), common.workdir()
  temperatures = values.pop('temperatures')
  mesh = common.build(MeshConfig, values.pop('mesh'), 'config.mesh')
  common.start(mesh)
  common.join_processes()
  sharding = common.make_sharding(mesh)
  found = served.load(
    CHECKPOINT.value or workdir, STEP.value, sharding, values['engine']['weights_dtype']
  )
  values['model'] = dataclasses.asdict(found.model)
  config = common.build(RolloutConfig, values)
  logging.info('evaluating step %d of %s', found.step, found.directory)
  with served.engine(found, config.engine, sharding) as engine:
    if engine is not None:  # else this is not process 0
      rows = _evaluate(config, found, engine, workdir, temperatures)
      _report(found, rows, workdir)


def _evaluate(
  config: RolloutConfig,
  found: policy.Policy,
  engine: Any,
  workdir: pathlib.Path,
  temperatures: tuple[float, ...],
) -> list[dict]:
  """Rows of the table."""
  workdir.mkdir(parents=True, exist_ok=True)
  tok = found.load_tokenizer()
  rows = []
  with (
    DataPool(f'sqlite:///{workdir.absolute()}/evaluation.db') as pool,
    in_process.rollouts(config, found.variables, tok, pool, engine=engine) as running,
  ):
    for temperature in temperatures:
      tallies = evaluation.success_on(
        running, 'held_out', config.eval_tasks, temperature
      )
      rows += [_row(temperature, tally) for tally in tallies]
      logging.info('temperature %g: done', temperature)
  return rows


def _report(found: policy.Policy, rows: list[dict], workdir: pathlib.Path) -> None:
  path = workdir / 'evaluation.json'
  about = {'checkpoint': found.directory, 'step': found.step}
  path.write_text(json.dumps({**about, 'held_out': rows}, indent=2) + '\n')
  print(f'\nheld-out success of step {found.step} of {found.directory}')
  print(
    f'{"temperature":>11}  {"family":<16} {"calls":>5} {"success":>7}  '
    '95 % interval    tasks'
  )
  for row in rows:
    print(
      f'{row["temperature"]:>11g}  {row["family"]:<16} {row["calls"] or "":>5} '
      f'{row["success"]:>7.3f}  '
      f'[{row["low"]:.3f}, {row["high"]:.3f}]  {row["tasks"]:>5}'
    )
  print(f'\nwritten to {path}')


def _row(temperature: float, tally: evaluation.Tally) -> dict:
  """A row of the table, with a Wilson interval; `calls` is None for all lengths."""
  low, high = stats.wilson(tally.successes, tally.n)
  return {
    'temperature': temperature,
    'family': tally.family,
    'calls': tally.calls,
    'successes': tally.successes,
    'tasks': tally.n,
    'success': tally.successes / max(tally.n, 1),
    'low': low,
    'high': high,
  }


if __name__ == '__main__':
  expected = CheckpointError, sandbox.SandboxUnavailable, RolloutsFailed, Stopped
  sys.argv = suite.with_config(sys.argv)
  common.run(main, *expected, distributed=True)
