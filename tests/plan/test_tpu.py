"""The full-width model's step compiles for TPUs of three generations."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from m2jax import config
from tests.plan import tpu_worker

_ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [
  pytest.mark.long,
  pytest.mark.tpu_backend,
  pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='needs libtpu'),
]


@pytest.mark.parametrize('name', tpu_worker.SLICES)
def test_step_compiles(name):
  """What no test on CPU sees: that kernels, layouts and collectives exist on the chip,
  that the step fits, and that the program sends and holds what its specs say."""
  child = subprocess.run(
    [sys.executable, '-m', 'tests.plan.tpu_worker', name],
    cwd=_ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=2700,
  )
  assert child.returncode == 0, child.stderr[-3000:]
  plan = json.loads(child.stdout.splitlines()[-1])
  assert plan['fits']
  assert 0 < plan['share_of_peak'] < 1
  micro, apply = plan['programs']
  state = plan['parameters_bytes'] + plan['optimizer_bytes']
  assert apply['memory']['arguments'] >= state
  sent = {c['kind']: c for c in micro['collectives'] if c['group'] == 8}
  # there and back; forward, again for the backward pass, and backward
  assert sent['ragged-all-to-all']['count'] in (5, 6)
  cfg, tokens = config.m2(), tpu_worker.CONTEXT
  once = 2 * tokens * cfg.experts_per_token * cfg.embed_dim
  count = sent['ragged-all-to-all']['count']
  assert sent['ragged-all-to-all']['bytes'] == pytest.approx(count * once, rel=0.01)
  kinds = {c['kind'] for c in micro['collectives']}
  assert {'all-gather', 'ragged-all-to-all'} <= kinds
