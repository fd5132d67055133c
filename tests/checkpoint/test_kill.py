"""Law 5: after SIGKILL at any moment a step is there as a whole or not at all."""

import random
import signal
import time

import pytest

from m2jax.checkpoint import CheckpointManager
from tests import processes
from tests.checkpoint import save_loop


def start(directory, saves, *kill_at):
  return processes.start('tests.checkpoint.save_loop', directory, saves, *kill_at)


def steps(output: str, word: str) -> list[int]:
  whole = output.splitlines(keepends=True)  # a kill may tear the last one
  return [
    int(line.split()[1])
    for line in whole
    if line.startswith(word) and line.endswith('\n')
  ]


def check_latest(directory, committed: int):
  """The newest step is whole, and at most the save in flight is missing."""
  with CheckpointManager(directory, read_only=True) as manager:
    step = save_loop.check(manager.restore(like=save_loop.state(0)))
  assert step >= committed


def sweep(directory, points):
  """Kills a child at each point; the next must resume at a step that was started."""
  committed = 0
  for pattern, count in points:
    child = start(directory, 5, pattern, count)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL, f'{pattern} was never reached'
    (resumed,) = steps(output, 'resumed')
    assert resumed >= committed
    # save(n + 1) returns only after step n is committed.
    committed = max([resumed, *(n - 1 for n in steps(output, 'started'))])
  assert committed > 0
  check_latest(directory, committed)


def test_killed_around_the_commit(tmp_path):
  """Right before: the ledger is written, the arrays' metadata is written, the commit by
  rename, and after half of an old step's files were removed."""
  points = [
    (r'open .*/host\.json w', 3),
    (r'open .*/state\.[^/]*/_METADATA w', 2),
    (r'os\.rename .*-tmp \S*/\d+$', 2),
    (r'os\.remove manifest\.ocdbt', 1),
  ]
  sweep(tmp_path, points)


@pytest.mark.parametrize(
  'event',
  [
    pytest.param('open .* w', marks=pytest.mark.long),
    pytest.param('os.rename', marks=pytest.mark.long),
    pytest.param('os.mkdir', marks=pytest.mark.thorough),
    pytest.param('os.remove', marks=pytest.mark.thorough),
  ],
)
def test_killed_at_many_file_operations(tmp_path, event):
  """As above, at arbitrary operations, from two saves in back to the first."""
  sweep(tmp_path, [(event, count) for count in (14, 11, 7, 5, 3, 2, 1)])


def test_killed_at_random_times(tmp_path):
  """Kills from outside, also while tensorstore's own threads write array data."""
  rng = random.Random(0)
  committed = 0
  for _ in range(2):
    child = start(tmp_path, 1000)
    lines = []
    for line in child.stdout:
      lines.append(line)
      if line.startswith('started') and len(lines) > 3:
        break
    time.sleep(rng.uniform(0, 0.2))
    child.kill()
    lines += child.stdout.readlines()
    assert child.wait(timeout=60) == -signal.SIGKILL
    output = ''.join(lines)
    (resumed,) = steps(output, 'resumed')
    assert resumed >= committed
    committed = max(n - 1 for n in steps(output, 'started'))
  assert committed > 0
  check_latest(tmp_path, committed)
