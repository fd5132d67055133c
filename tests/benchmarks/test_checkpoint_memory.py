"""The benchmark of checkpoint memory runs, and its claim holds at a small size."""

import json
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_no_second_copy(tmp_path):
  """Loading and saving need far less than the model once more."""
  command = [sys.executable, '-m', 'benchmarks.checkpoint_memory', '--json']
  command += ['--gigabytes=0.5', f'--directory={tmp_path}']
  done = subprocess.run(
    command,
    cwd=pathlib.Path(__file__).parents[2],
    stdout=subprocess.PIPE,
    timeout=600,
    check=True,
  )
  load, save = json.loads(done.stdout)
  assert (load['what'], save['what']) == ('load', 'save')
  for row in (load, save):
    assert row['files'] > 3 and row['model'] > 5e8
    assert row['beyond'] < min(row['allowed'], row['model'] / 2)
  assert list(tmp_path.iterdir()) == []
