"""From nothing to a policy: tasks are made, then SFT and RL learn on them."""

from __future__ import annotations

import collections
import json

import pytest

from m2jax.observe import metrics
from m2jax.pool import database
from m2jax.pool.reader import Reader
from tests.experiments import conftest


@pytest.mark.long
def test_forge_learns_on_tasks_that_a_pipeline_made(tmp_path):
  """configs/forge_tasks.py:smoke, every phase: demonstrations are the tasks' solutions,
  run by calls and verified; RL's episodes are judged by the tasks' verifiers, and train
  on the training split alone."""
  pytest.importorskip('reasoning_gym', reason='pip install -e ./m2jax_pipelines')
  made, workdir = tmp_path / 'made', tmp_path / 'run'
  conftest.run_module(
    'experiments.make_tasks',
    '--pipeline=reasoning',
    f'--workdir={made}',
    '--config.count=12',
    "--config.generators=('gcd','lcm','products')",
    '--config.levels=(0,)',
  )
  flags = [
    f'--config.tasks.dataset={made}',
    f'--workdir={workdir}',
    '--config.mesh.expert=1',
    '--config.engine.contexts=(768,)',
    *(f'--config.model.{size}' for size in conftest.SMALL),
  ]
  conftest.run_module(
    'experiments.forge', '--config=configs/forge_tasks.py:smoke', *flags
  )
  demos = [
    json.loads(line)
    for line in (workdir / 'demonstrations.jsonl').read_text().splitlines()
  ]
  assert demos and all(demo['success'] == 1.0 for demo in demos)
  called = [m for demo in demos for m in demo['messages'] if m.get('tool_calls')]
  assert len(called) == len(demos)
  steps = [row['step'] for row in metrics.read(workdir, 'rl') if 'loss' in row]
  assert max(steps) == 3
  reader = Reader(database.open_read_only(workdir / 'pool.db'))
  trained = reader.newest_trajectories(1000, evaluation=False)
  splits = collections.Counter(t.trajectory.task.split('/')[1] for t in trained)
  assert set(splits) == {'train'}
  assert {t.trajectory.family for t in trained} == {'gcd'}
  assert not [t for t in trained if t.trajectory.end_reason == 'infrastructure']
  assert (workdir / 'report.html').exists()
