"""metrics.jsonl: lineage over crashes, torn lines, kills, threads, full disks."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from absl import logging
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.observe import metrics, names


def _plain(records):
  values = (r['n' if r['phase'] == 'eval' else 'loss'] for r in records)
  return [(r['phase'], r['step'], v) for r, v in zip(records, values, strict=True)]


# What a run does: a step of one of two phases, a checkpoint, or a crash that a restart
# from the last checkpoint follows. A crash may leave a torn line behind.
_RUN = st.lists(
  st.sampled_from(['sft', 'rl', 'sft', 'rl', 'checkpoint', 'crash', 'torn crash']),
  max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(_RUN)
def test_only_the_surviving_lineage_is_read(tmp_path_factory, run):
  """Law 5: metrics of steps after the checkpoint are superseded by a restart.

  The reference keeps the true history as a list and copies it at each checkpoint; it
  knows nothing of markers.
  """
  workdir = tmp_path_factory.mktemp('run')
  history, saved = [], []
  steps, saved_steps = {'sft': -1, 'rl': -1}, {'sft': -1, 'rl': -1}
  writer = metrics.MetricsWriter(workdir, use_tensorboard=False)
  for unique, action in enumerate(run):
    if action in steps:
      steps[action] += 1
      writer.write(action, steps[action], loss=unique)
      history.append((action, steps[action], unique))
    elif action == 'checkpoint':
      saved, saved_steps = list(history), dict(steps)
    else:
      writer.close()
      if action == 'torn crash':
        with open(workdir / metrics.FILE_NAME, 'ab') as file:
          file.write(b'{"schema":1,"lineage":0,"phase":"rl","st')
      writer = metrics.MetricsWriter(workdir, use_tensorboard=False)
      for phase, step in saved_steps.items():
        writer.supersede(phase, step)
      history, steps = list(saved), dict(saved_steps)
    assert _plain(metrics.read(workdir)) == history
  writer.close()
  assert _plain(metrics.read(workdir, 'rl')) == [r for r in history if r[0] == 'rl']


def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path):
  """SIGKILL or a full disk may end the file at any byte; no record before is lost."""
  with metrics.MetricsWriter(tmp_path, use_tensorboard=False) as writer:
    for step in range(4):
      writer.write('eval', step, n=step, stage='é')
    writer.supersede('eval', 2)
  whole = (tmp_path / metrics.FILE_NAME).read_bytes()
  for cut in range(len(whole) + 1):
    work = tmp_path / str(cut)
    work.mkdir()
    (work / metrics.FILE_NAME).write_bytes(whole[:cut])
    lines = whole[:cut].count(b'\n')
    expected = [('eval', s, s) for s in range(min(lines, 3 if lines == 5 else 4))]
    assert _plain(metrics.read(work)) == expected
    with metrics.MetricsWriter(work, use_tensorboard=False) as writer:
      assert writer.lineage == (1 if lines else 0)
      writer.write('eval', 9, n=9)
    assert _plain(metrics.read(work)) == [*expected, ('eval', 9, 9)]
    for line in (work / metrics.FILE_NAME).read_text('utf-8').splitlines():
      json.loads(line)


def test_sigkill_loses_no_record_that_write_returned_for(tmp_path):
  """Fault injection for real: the child is killed amid writing, then reopened."""
  child = subprocess.Popen(
    [
      sys.executable,
      '-c',
      'import sys\n'
      'from m2jax.observe import metrics\n'
      'writer = metrics.MetricsWriter(sys.argv[1])\n'
      'for step in range(10**9):\n'
      "  writer.write('eval', step, n=step, stage='x' * 300)\n"
      '  print(step, flush=True)\n',
      str(tmp_path),
    ],
    stdout=subprocess.PIPE,
  )
  for _ in range(200):
    last = int(child.stdout.readline())
  os.kill(child.pid, signal.SIGKILL)
  for line in child.communicate()[0].split(b'\n')[:-1]:
    last = int(line)
  steps = [r['step'] for r in metrics.read(tmp_path)]
  # The record after the last printed one may be there or not.
  assert steps[: last + 1] == list(range(last + 1))
  assert len(steps) <= last + 2
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write('eval', 0, n=0)
  assert metrics.read(tmp_path)[-1]['lineage'] == 1


def test_a_full_disk_raises_and_leaves_no_torn_line(tmp_path):
  """A write that fails half-way is undone: the next one must not be glued to it."""
  code = (
    'import resource, sys\n'
    'from m2jax.observe import metrics\n'
    'writer = metrics.MetricsWriter(sys.argv[1], use_tensorboard=False)\n'
    "writer.write('eval', 0, n=0)\n"
    'resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))\n'
    'try:\n'
    "  writer.write('eval', 1, n=1, stage='x' * 500)\n"
    'except OSError:\n'
    '  resource.setrlimit(\n'
    '    resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)\n'
    '  )\n'
    "  writer.write('eval', 2, n=2)\n"
  )
  subprocess.run([sys.executable, '-c', code, str(tmp_path)], check=True)
  assert _plain(metrics.read(tmp_path)) == [('eval', 0, 0), ('eval', 2, 2)]


def test_threads_share_a_writer_and_listeners_see_file_order(tmp_path):
  """Agents, engine and learner write at once: every line whole, one order for all."""
  heard, phases = [], [phase for phase in names.PHASES if phase != 'eval']
  with metrics.MetricsWriter(tmp_path, use_tensorboard=False) as writer:
    writer.add_listener(lambda record: heard.append((record['phase'], record['step'])))
    threads = [
      threading.Thread(
        target=lambda name=phase: [
          writer.write(name, step, loss=step, entropy=1 / 3) for step in range(100)
        ]
      )
      for phase in phases
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    writer.flush()
    in_file = [(r['phase'], r['step']) for r in metrics.read(tmp_path)]
    assert heard == in_file
  for own_phase in phases:
    own = [step for phase, step in in_file if phase == own_phase]
    assert own == list(range(100))


def test_a_listener_that_raises_is_dropped_and_the_others_go_on(tmp_path, caplog):
  """A view never stops a job."""
  heard, calls = [], []

  def broken(record):
    calls.append(record)
    raise RuntimeError('the view broke')

  absl_logger = logging.get_absl_logger()
  absl_logger.addHandler(caplog.handler)
  try:
    with metrics.MetricsWriter(tmp_path) as writer:
      writer.add_listener(broken)
      writer.add_listener(heard.append)
      for step in range(3):
        writer.write('rl', step)
  finally:
    absl_logger.removeHandler(caplog.handler)
  assert len(calls) == 1
  assert [r['step'] for r in heard] == [0, 1, 2]
  assert 'dropped' in caplog.text


def test_values_round_trip_and_the_file_is_strict_json(tmp_path):
  """NaN losses must be seen, and other tools must be able to parse the file."""
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(
      'eval',
      3,
      {'n': np.float32(1.5), 'calls': np.int64(7), 'temperature': np.array(2.0)},
      successes=math.nan,
      split=math.inf,
      family=True,
      stage='after SFT',
    )
    writer.write('rl', 4, loss=None)

  def refuse(name):
    raise AssertionError(f'{name} is not JSON')

  text = (tmp_path / metrics.FILE_NAME).read_text('utf-8')
  for line in text.splitlines():
    json.loads(line, parse_constant=refuse)
  record, empty = metrics.read(tmp_path)
  assert 'loss' not in empty
  assert record['n'] == 1.5
  assert record['calls'] == 7
  assert record['temperature'] == 2.0
  assert record['family'] is True
  assert record['stage'] == 'after SFT'
  assert math.isnan(record['successes'])
  assert math.isnan(record['split'])
  assert record['schema'] == metrics.SCHEMA
  assert abs(record['time_s'] - time.time()) < 60


@pytest.mark.parametrize(
  ('call', 'error', 'words'),
  [
    (lambda w: w.write('rl', 0, {'lineage': 3}), ValueError, 'lineage'),
    (lambda w: w.write('rl', 0, loss=[1.0, 2.0]), TypeError, 'loss'),
    (lambda w: w.write('rl', 0, reward=np.zeros(3)), TypeError, 'reward'),
    (lambda w: w.write('', 0), ValueError, 'phase'),
    (lambda w: w.write('rl', -1), ValueError, 'step -1'),
    (lambda w: w.write('rl', 1.5), TypeError, 'float'),
    (lambda w: w.supersede('rl', -2), ValueError, 'step -2'),
  ],
)
def test_bad_records_are_refused_by_name_and_cost_nothing(tmp_path, call, error, words):
  """Law 9: the message names the field, and the file is as before."""
  with metrics.MetricsWriter(tmp_path) as writer, pytest.raises(error, match=words):
    call(writer)
  assert metrics.read(tmp_path) == []
  with pytest.raises(ValueError, match='closed'):
    writer.write('rl', 0)


@pytest.mark.parametrize(
  'damage',
  [b'not json', b'[]', b'3', b'{"schema":1}', b'{"schema":99,"lineage":0,', b''],
)
def test_damage_before_the_last_line_is_named(tmp_path, damage):
  """Records in the middle are never silently skipped; the line number is said."""
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write('rl', 0)
  path = tmp_path / metrics.FILE_NAME
  line = path.read_bytes()
  path.write_bytes(line + damage + b'\n' + line)
  with pytest.raises(metrics.MetricsError, match='line 2'):
    metrics.read(tmp_path)
  with pytest.raises(metrics.MetricsError, match='line 2'):
    metrics.MetricsWriter(tmp_path)


def test_a_newer_schema_says_which_version_is_needed(tmp_path):
  """An old reader must not misread a new file."""
  (tmp_path / metrics.FILE_NAME).write_text(
    '{"schema":99,"lineage":0,"phase":"rl","step":0}\n'
  )
  with pytest.raises(metrics.MetricsError, match='schema 99'):
    metrics.read(tmp_path)


def test_a_record_costs_the_caller_little(tmp_path):
  """It runs inside the training loop: 40 us for 25 scalars here, 200 with slack."""
  scalars = {f'success/family_{i}': i * 0.1234567 for i in range(25)}
  costs_s = []
  with metrics.MetricsWriter(tmp_path) as writer:
    for step in range(300):
      start_s = time.thread_time()
      writer.write('rl', step, scalars)
      costs_s.append(time.thread_time() - start_s)
      time.sleep(0.001)
  assert min(costs_s) < 200e-6


def test_rss_is_that_of_this_process():
  """The memory figure of view and report: between 10 MB and what the kernel says."""
  peak_bytes = metrics.rss_bytes()
  assert 10e6 < peak_bytes < os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
