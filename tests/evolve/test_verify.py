"""Reruns of a scripted job: verdicts, resumption, bounds, and an end with Ctrl-C."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from m2jax.evolve import doctor
from m2jax.evolve.doctor import until, verify
from tests import processes
from tests.evolve import runs, scripted_job
from tests.waiting import wait_until

CONFIG = {'rl': {'learning_rate': 0.1}, 'gateway': {'port': 8102}, 'mode': ''}
JOB = 'tests.evolve.scripted_job'


@pytest.fixture
def run(tmp_path):
  """A faulty run."""
  runs.write(tmp_path, scripted_job.records(CONFIG))
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG))
  return tmp_path


def contents(run):
  return {
    str(p.relative_to(run)): p.read_bytes()
    for p in run.rglob('*')
    if p.is_file() and not p.relative_to(run).parts[0].startswith('verify-')
  }


def verified(run, *, rate=0.001, mode='', seconds=60.0):
  """(plan, verdict) of a rerun with another learning rate."""
  before, findings = contents(run), doctor.examine(run, now_s=1.7e9)
  (found,) = (x for x in findings if x.kind == 'gradient_jump')
  config = CONFIG | {'rl': {'learning_rate': rate}, 'mode': mode}
  plan = verify.prepare(run, found, config, 'rl.learning_rate')
  command = verify.command(plan, JOB, seconds)
  with open(plan.workdir / verify.LOG, 'wb') as log:
    status = subprocess.run(
      command, stdout=log, stderr=log, cwd=processes.ROOT
    ).returncode
  assert contents(run) == before  # the run itself is left alone
  return plan, verify.judge(plan, found, findings, status)


def test_gone(run):
  plan, verdict = verified(run)
  assert (plan.from_step, plan.last_step) == (-1, 60)
  assert verdict == verify.Verdict('gone', 'not found again up to step 60')
  assert plan.workdir == run / 'verify-1'
  assert json.loads((plan.workdir / '.job/config.json').read_text())['gateway'] == {
    'port': 0
  }


def test_still_there(run):
  _, verdict = verified(run, rate=0.05)
  assert verdict.verdict == 'still there' and 'jumps to' in verdict.why


@pytest.mark.parametrize(
  ('mode', 'seconds', 'why'),
  [
    ('dies', 60.0, 'ended with status 1 at step 0 of 68: no room on the device'),
    ('hangs', 1.5, 'the time is over at step'),
    ('thin', 60.0, 'records of the window, the run 20'),
  ],
)
def test_undecided(run, mode, seconds, why):
  _, verdict = verified(run, mode=mode, seconds=seconds)
  assert verdict.verdict == 'undecided' and why in verdict.why


def test_it_ends_behind_the_window(run):
  """A job that would go on for ever is ended where a detector has what it needs."""
  plan, verdict = verified(run, mode='waits')
  steps = doctor.history.read(plan.workdir).phases['rl'].step
  assert verdict.verdict == 'gone' and 68 <= steps[-1] < 200


def test_it_resumes_from_the_last_checkpoint_before_the_window(run):
  """And from the records up to it, which are the past that it is compared with."""
  for step in 20, 40, 60:
    (run / 'rl' / str(step)).mkdir(parents=True)
    (run / 'rl' / str(step) / 'weights').write_text(str(step))
  (run / 'rl' / '41.orbax-checkpoint-tmp').mkdir()
  (run / 'sft' / '12').mkdir(parents=True)
  (run / 'tokenizer.json').symlink_to('/etc/passwd')
  import sqlite3

  with sqlite3.connect(run / 'pool.db') as pool:
    pool.execute('create table t (x)')
  plan, verdict = verified(run)
  assert (plan.from_step, verdict.verdict) == (40, 'gone')
  found = sorted(p.name for p in plan.workdir.glob('*/*') if p.is_dir())
  assert found == ['12', '40']
  assert not (plan.workdir / 'tokenizer.json').exists()
  assert (plan.workdir / 'pool.db').exists()
  records = doctor.history.read(plan.workdir)
  assert records.phases['rl'].step.tolist() == list(range(1, 61))
  first = (plan.workdir / 'metrics.jsonl').read_text().splitlines()[:41]
  assert [json.loads(line).get('step') for line in first] == [*range(1, 41), None]


def test_without_the_pool_rl_starts_again_from_the_weights_of_sft(run):
  """Where the change is of RL; one of SFT, or of code, starts from nothing."""
  (run / 'rl' / '40').mkdir(parents=True)
  (run / 'sft' / '12').mkdir(parents=True)
  (found,) = doctor.examine(run, now_s=1.7e9)
  plans = [
    verify.prepare(run, found, CONFIG, field)
    for field in ('rl.learning_rate', 'sft.loop.steps', 'model.num_layers')
  ]
  assert [plan.from_step for plan in plans] == [0, -1, -1]
  assert [(plan.workdir / 'sft').exists() for plan in plans] == [True, False, False]
  assert (plans[0].workdir / 'metrics.jsonl').read_text() == ''
  assert [plan.workdir.name for plan in plans] == ['verify-1', 'verify-2', 'verify-3']


@pytest.mark.parametrize('kind', ['ended_early', 'stuck'])
def test_what_a_stopped_rerun_cannot_show(kind, run):
  with pytest.raises(verify.NotVerifiable):
    verify.prepare(run, doctor.Finding(kind, '', 'rl'), CONFIG)
  with pytest.raises(verify.NotVerifiable, match='no records'):
    verify.prepare(run, doctor.Finding('loss_spike', '', 'sft'), CONFIG)
  assert not (run / 'verify-1').exists()


def test_evidence_that_the_rerun_does_not_record_is_not_gone(run):
  plan, _ = verified(run)
  (found,) = doctor.examine(run, now_s=1.7e9)
  records = scripted_job.records(CONFIG | {'rl': {'learning_rate': 0.0}})
  for row in records:
    del row['grad_norm']
  runs.write(plan.workdir, records)
  verdict = verify.judge(plan, found, [found], 0)
  assert (verdict.verdict, verdict.why) == (
    'undecided',
    'the rerun has no grad_norm',
  )


def test_new_errors_are_named(run):
  plan, _ = verified(run)
  (found,) = doctor.examine(run, now_s=1.7e9)
  records = scripted_job.records(CONFIG | {'rl': {'learning_rate': 0.0}})
  for row in records[30:]:
    row['entropy'] *= 40
  runs.write(plan.workdir, records)
  assert verify.judge(plan, found, [found], 0).new == ('entropy_explosion',)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_the_job_ends_with_what_runs_it(number, tmp_path):
  """With its processes: also if nothing could be done at the end."""
  pid = tmp_path / 'pid'
  job = f'import os, time; open({str(pid)!r}, "w").write(str(os.getpid())); '
  command = [sys.executable, until.__file__, str(tmp_path / 'metrics.jsonl'), 'rl']
  command += ['9', '600', '--', sys.executable, '-c', job + 'time.sleep(600)']
  child = subprocess.Popen(command)
  wait_until(lambda: pid.exists() and pid.read_text())
  os.kill(child.pid, number)
  child.wait()
  place = pathlib.Path('/proc') / pid.read_text() / 'stat'
  gone = lambda: not place.exists() or place.read_text().split(') ')[1][0] == 'Z'
  wait_until(gone)
