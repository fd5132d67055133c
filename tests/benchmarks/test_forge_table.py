"""The table of runs says what the runs' metrics say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import forge_table
from m2jax.observe.metrics import MetricsWriter


@pytest.fixture
def workdir(tmp_path):
  with MetricsWriter(tmp_path / 'run', use_tensorboard=False) as metrics:
    for stage, good in (('after SFT', 10), ('after RL', 30)):
      for family, share in (('all', 1.0), ('rename', 0.5), ('append', 0.5)):
        for temperature, extra in ((1.0, 0), (0.0, 4)):
          metrics.write(
            'eval',
            3,
            stage=stage,
            temperature=temperature,
            family=family,
            successes=share * (good + extra),
            n=int(40 * share),
          )
  return tmp_path / 'run'


def test_rows_are_the_recorded_counts(workdir):
  """Rates, interval and families come from the records, sampled and greedy apart."""
  sft, rl = forge_table.rows(workdir)
  assert (sft['stage'], rl['stage']) == ('after SFT', 'after RL')
  assert (rl['success'], rl['greedy'], rl['tasks']) == (30 / 40, 34 / 40, 40)
  assert rl['low'] < 0.75 < rl['high']
  assert rl['families'] == {'rename': 0.75, 'append': 0.75}


def test_command_line(workdir):
  """It prints one row a stage, JSON on request, and names a directory without a run."""

  def call(*args):
    command = [sys.executable, '-m', 'benchmarks.forge_table', *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)

  table = call(str(workdir)).stdout.splitlines()
  assert len(table) == 4 and '0.750 [' in table[3]
  assert json.loads(call('--json', str(workdir)).stdout)[1]['success'] == 0.75
  assert '| append | 0.25 | 0.75 |' in call('--families', str(workdir)).stdout
  only = call('--families', '--stage=after RL', str(workdir)).stdout
  assert '| append | 0.75 |' in only
  wrong = call('--stage=aftr RL', str(workdir))
  assert wrong.returncode == 2 and 'after RL' in wrong.stderr
  wrong = call(str(workdir.parent / 'nosuch'))
  assert wrong.returncode == 2 and 'nosuch' in wrong.stderr
