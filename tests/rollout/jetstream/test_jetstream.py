"""JetStream's own driver hosts the engine, where google-jetstream is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout.engine.test_engine import prompt

ROOT = Path(__file__).parents[3]
# Where the Makefile puts it: its wheel has a package `benchmarks`, too.
DIRECTORY = Path(sys.prefix) / 'jetstream'


def installed() -> bool:
  try:
    found = importlib.util.find_spec('jetstream.engine.engine_api') is not None
  except ModuleNotFoundError:
    found = False
  return found or (DIRECTORY / 'jetstream' / 'engine' / 'engine_api.py').exists()


@pytest.mark.long
@pytest.mark.skipif(not installed(), reason='needs google-jetstream 0.2.2: make setup')
def test_jetstreams_driver_decodes_greedily(variables, reference, tmp_path):
  """The Engine API is a promise to other people's drivers, so one of them must run."""
  prompts = [prompt(i, n) for i, n in enumerate((3, 9, 17, 30, 5, 11))]
  out = tmp_path / 'results.json'
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'tests.rollout.jetstream_driver',
      json.dumps([prompts, 6, str(out)]),
    ],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), str(DIRECTORY)])},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  results = json.loads(out.read_text())
  assert len(results) == len(prompts)
  for tokens, result in zip(prompts, results, strict=True):
    assert len(result) >= 6
    # The driver puts its BOS token first.
    assert result == reference.greedy(variables, [1, *tokens], len(result))
