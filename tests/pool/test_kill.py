"""Law 5 by fault injection: a real process, repeatedly killed with SIGKILL."""

import json
import random
import signal
import time

import pytest

from tests import processes
from tests.pool import drain_worker

TOTAL = 130

# Every gap between two durable steps of the protocol, and when to die in it.
POINTS = (
  ('rolled back', 1),
  ('submitted', 9),
  ('completions added', 20),
  ('half a group committed', 3),
  ('completed', 12),
  ('failed', 1),
  ('taken', 4),
  ('trained', 5),
  ('checkpoint written', 2),
  ('checkpoint renamed', 1),
)


def start(directory, url, seed, *die_at):
  return processes.start(
    'tests.pool.drain_worker', directory, url, seed, TOTAL, *die_at
  )


def check_window_order(trained):
  """Every id was within the window of the oldest one not yet taken."""
  todo = [i for i in range(TOTAL) if not drain_worker.fails(i)]
  for index in trained:
    assert index < todo[0] + drain_worker.WINDOW
    todo.remove(index)
  assert not todo


def test_exactly_once_under_kill(tmp_path):
  """Along the surviving lineage every item is trained once, in window order."""
  kill_and_check(tmp_path, f'sqlite:///{tmp_path}/pool.db')


@pytest.mark.long
def test_exactly_once_under_kill_on_postgresql(tmp_path, postgresql):
  kill_and_check(tmp_path, postgresql.new_url())


def kill_and_check(tmp_path, url):
  """Kills the process at each point of the protocol, and at random moments.

  Then it may finish. Its last checkpoint holds what the surviving weights were trained
  on.
  """
  rng = random.Random(0)
  for seed, (point, count) in enumerate(POINTS):
    process = start(tmp_path, url, seed, point, count)
    out, _ = process.communicate(timeout=120)
    # A point may be beyond the end of the queue; then this process drained it.
    assert process.returncode in (-signal.SIGKILL, 0), out
    if seed % 2:
      process = start(tmp_path, url, 100 + seed)
      assert process.stdout.readline() == 'ready\n'
      time.sleep(rng.uniform(0.0, 0.15))
      process.kill()
      process.communicate(timeout=120)
  process = start(tmp_path, url, 1000)
  process.communicate(timeout=120)
  assert process.returncode == 0

  checkpoint = json.loads((tmp_path / 'checkpoint.json').read_text())
  trained = checkpoint['weights']
  assert sorted(trained) == [i for i in range(TOTAL) if not drain_worker.fails(i)]
  check_window_order(trained)
  assert checkpoint['ledger']['head'] == checkpoint['ledger']['next_index'] == TOTAL
  # Otherwise the kills did not undo anything.
  lives = [json.loads(x) for x in (tmp_path / 'lives.jsonl').read_text().splitlines()]
  assert len(lives) >= 8
  assert sum(life['revived'] for life in lives) > 0
  assert sum(life['reissued'] for life in lives) > 0
