"""`make forge-tasks`: every pipeline that is found, then a table."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from experiments import make_all_tasks
from m2jax_pipelines import discovery, records
from m2jax_pipelines.candidate import PipelineConfig
from tests import processes
from tests.pipelines import toy
from tests.waiting import wait_until

_TOY = 'tests.pipelines.toy'


def _started(workdir, *arguments):
  ends = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  module = 'experiments.make_all_tasks'
  return processes.popen(module, f'--workdir={workdir}', *arguments, **ends)


def _found(process):
  out, err = process.communicate(timeout=600)
  return process.returncode, out, err


def test_pipelines_are_found_by_what_they_define():
  """One that is added is in the table without a list to change."""
  found = discovery.names()
  assert {'deep_search', 'reasoning', 'slides', 'spreadsheets', 'swe'} <= set(found)
  assert not {'make', 'report', 'records', 'rubric', 'discovery', 'candidate'} & set(
    found
  )


@pytest.mark.parametrize('name', discovery.names())
def test_every_pipeline_has_all_splits(name):
  """A run that evaluates on one that is empty would be told so hours later."""
  config = PipelineConfig.of_kind(name)
  assert config.dev and config.held_out
  assert config().split(config.dev[0]) == 'dev'


def test_one_task_of_each_and_a_table(tmp_path):
  """Also a second run, for one more; a pipeline that fails does not stop the others."""
  given = f'--pipelines=tests.pipelines.no_such,{_TOY}'
  code, out, err = _found(_started(tmp_path, given, '--count=1'))
  assert code == 2 and 'no_such' in err, err
  one, two = json.loads((tmp_path / 'made.json').read_text())
  assert one['note'].startswith('failed') and two['tasks'] == 1
  assert 'seconds a task' in out and 'toy' in out
  assert 'no task in dev, held_out:' in out
  code, _, err = _found(_started(tmp_path, f'--pipelines={_TOY}', '--count=2'))
  assert code == 0, err
  (row,) = json.loads((tmp_path / 'made.json').read_text())
  assert row['tasks'] == 2 and row['seconds'] > 0 and row['note'] == ''


@pytest.mark.long
def test_ctrl_c_stops_and_the_second_run_goes_on(tmp_path):
  given = ('--pipelines=tests.pipelines.slow_toy', '--count=6')
  process = _started(tmp_path, *given)
  log = tmp_path / 'slow_toy' / 'records.jsonl'
  wait_until(lambda: records.read(log), 300)
  process.send_signal(signal.SIGINT)
  code, _, err = _found(process)
  assert code == 130 and 'the same command resumes' in err, err
  before = records.read(log)
  assert 0 < len(before) < 6
  assert _found(_started(tmp_path, *given))[0] == 0
  rows = records.read(log)
  assert rows[: len(before)] == before and len(rows) == 6


def test_what_is_missing_is_a_reason_to_skip(tmp_path, monkeypatch):
  reason = 'no Chromium: apt-get install chromium'
  monkeypatch.setattr(toy, 'unavailable', lambda: reason, raising=False)
  row = make_all_tasks.run(_TOY, tmp_path, 1, 'namespaces')
  assert row.note == f'skipped: {reason}' and row.tasks == 0


def test_a_missing_package_is_named(tmp_path, monkeypatch):
  """Not a traceback: how to install it."""
  (tmp_path / 'lab').mkdir()
  (tmp_path / 'lab' / '__init__.py').write_text('import no_such_package\n')
  monkeypatch.syspath_prepend(tmp_path)
  found = discovery.unavailable('lab.puzzles')
  assert 'no_such_package' in found and 'pip install -e ./m2jax_pipelines' in found
