"""A made task, run by Harbor's own command in podman: opt-in.

M2JAX_HARBOR_PYTHON names an interpreter with harbor and podman-compose
(benchmarks/harbor_run.py).
"""

from __future__ import annotations

import asyncio
import os

import pytest

from benchmarks import harbor_run
from m2jax.sandbox.containers import engines
from m2jax.tasks import harbor
from m2jax_pipelines import make, reasoning

_REASON = engines.unavailable('podman')
PYTHON = os.environ.get('M2JAX_HARBOR_PYTHON', '')


def test_a_copy_changes_image_and_network_alone(tmp_path):
  """What is run is the task: workspace, tests, solution and limits are its own."""
  draft = harbor.Draft(
    'one',
    'x',
    harbor.Metadata('test', 'test'),
    tests={'test.sh': b':'},
    solution={'solve.sh': b':'},
    overlay={'a.txt': b'a'},
    setup='chmod 600 a.txt\n',
  )
  path = harbor.write(draft, tmp_path / 'tasks' / 'train')
  directory = harbor.read(path)
  with harbor_run.copied(directory) as copy:
    other = harbor.read(copy)
    assert (other.metadata, other.verifier_s) == (
      directory.metadata,
      directory.verifier_s,
    )
    assert (other.tests(), other.solution()) == (
      directory.tests(),
      directory.solution(),
    )
    steps = (copy / 'environment' / 'Dockerfile').read_text()
  mark = 'WORKDIR /workspace\n'
  ours = (path / 'environment' / 'Dockerfile').read_text()
  assert steps.partition(mark)[2] == ours.partition(mark)[2] != ''
  assert 'apt-get' not in steps and 'localhost' in steps


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason='M2JAX_HARBOR_PYTHON names no interpreter')
@pytest.mark.skipif(bool(_REASON), reason=_REASON or 'podman is here')
def test_harbor_rewards_the_solution_and_not_nothing(tmp_path, capsys):
  pytest.importorskip('reasoning_gym', reason='pip install -e ./m2jax_pipelines')
  config = reasoning.Config(generators=('gcd',), levels=(0,), count=1)
  asyncio.run(make.run(config, tmp_path, show=False))
  assert harbor_run.main([f'--python={PYTHON}', f'--workdir={tmp_path}']) == 0
  assert 'solution 1, nothing 0' in capsys.readouterr().out
