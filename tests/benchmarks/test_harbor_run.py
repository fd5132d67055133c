"""A made task, run by Harbor's own command in podman: opt-in.

M2JAX_HARBOR_PYTHON names an interpreter with harbor and podman-compose
(benchmarks/harbor_run.py).
"""

from __future__ import annotations

import asyncio
import os

import pytest

from benchmarks import harbor_bases, harbor_run
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
  with harbor_run.copied([path]) as place:
    other = harbor.read(place / 'one')
    assert (other.metadata, other.verifier_s) == (
      directory.metadata,
      directory.verifier_s,
    )
    assert (other.tests(), other.solution()) == (
      directory.tests(),
      directory.solution(),
    )
    steps = (place / 'one' / 'environment' / 'Dockerfile').read_text()
    settings = (place / 'one' / 'task.toml').read_text()
  ours = (path / 'environment' / 'Dockerfile').read_text()
  assert steps == ours.replace('python:3.13-slim', 'localhost/m2jax/base-one:1') != ours
  assert 'network_mode = "public"' in settings and 'no-network' not in settings


def test_images_that_tasks_name_are_found_and_replaced(tmp_path):
  """Of every form; a stage of a Dockerfile is no image, nor is a longer name."""
  environment = tmp_path / 'a' / 'environment'
  environment.mkdir(parents=True)
  lines = (
    'FROM --platform=linux/amd64 ubuntu:24.04 AS first',
    'COPY --from=ghcr.io/astral-sh/uv:0.9.7 /uv /bin/',
    'FROM ubuntu:24.04-extra',
    'COPY --from=first /a /b',
    'FROM swebench/one:latest',
  )
  (environment / 'Dockerfile').write_text('\n'.join(lines))
  (tmp_path / 'a' / 'task.toml').write_text(
    '[environment]\ndocker_image = "python:3.13-slim"\n'
  )
  names = {*harbor_bases.named(tmp_path)}
  known = {'ubuntu:24.04', 'ghcr.io/astral-sh/uv:0.9.7', 'python:3.13-slim'}
  known.add('ubuntu:24.04-extra')
  assert names == known | {'swebench/one:latest'}
  assert {*harbor_bases.replacements(names)} == known
  with harbor_run.copied([tmp_path / 'a']) as place:
    found = (place / 'a' / 'environment' / 'Dockerfile').read_text().splitlines()
    settings = (place / 'a' / 'task.toml').read_text()
  image = 'localhost/m2jax/base-a:1'
  assert found[0] == f'FROM --platform=linux/amd64 {image} AS first'
  assert found[1:3] == [f'COPY --from={image} /uv /bin/', f'FROM {image}']
  assert found[3:] == list(lines[3:])
  assert f'docker_image = "{image}"' in settings


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason='M2JAX_HARBOR_PYTHON names no interpreter')
@pytest.mark.skipif(bool(_REASON), reason=_REASON or 'podman is here')
def test_harbor_rewards_the_solution_and_not_nothing(tmp_path, capsys):
  pytest.importorskip('reasoning_gym', reason='pip install -e ./m2jax_pipelines')
  config = reasoning.Config(generators=('gcd',), levels=(0,), count=1)
  asyncio.run(make.run(config, tmp_path, show=False))
  harbor_bases.build()
  assert harbor_run.main([f'--python={PYTHON}', f'--dataset={tmp_path}']) == 0
  assert 'differs' not in capsys.readouterr().out
