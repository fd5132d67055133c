"""JetStream's own driver hosts the engine, where google-jetstream is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout.test_engine import prompt


def installed() -> bool:
  try:
    return importlib.util.find_spec('jetstream.engine.engine_api') is not None
  except ModuleNotFoundError:
    return False


@pytest.mark.long
@pytest.mark.skipif(not installed(), reason='needs the extra: google-jetstream 0.2.2')
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
    cwd=Path(__file__).parents[2],
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
