"""The main job as a program: stopped, resumed, evaluated, and what it writes."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
import sqlite3

import numpy as np
import pytest

from experiments import common
from m2jax.evolve import doctor, scaffold
from m2jax.observe import metrics, names, plots
from m2jax.pool import data_pool
from m2jax.rl import rewards
from tests.experiments import conftest
from tests.experiments.conftest import unlisted, written

pytestmark = pytest.mark.long


def test_ctrl_c_and_the_same_command_again(forged):
  """A terminal's Ctrl-C reaches every process of the job; the same command ends it."""
  text, workdir = forged.stopped, forged.workdir
  assert forged.code == 130, text
  assert 'the same command resumes' in text and 'Traceback' not in text, text
  assert forged.stopped_policy == str(workdir / 'rl')
  assert 'after RL' in forged.finished and (workdir / 'report.html').exists()
  records = metrics.read(workdir, 'rl')
  assert [r['step'] for r in records] == [1, 2, 3, 4, 5]
  with contextlib.closing(sqlite3.connect(workdir / 'pool.db')) as pool:
    forked = 'SELECT COUNT(*) FROM completions WHERE fork_reason IS NOT NULL'
    assert records[-1]['gateway/forks'] <= pool.execute(forked).fetchone()[0]


def test_the_doctor_finds_nothing_in_it(forged):
  """A short healthy run, stopped and resumed: nothing is wrong with it."""
  assert not doctor.examine(forged.workdir)


def test_its_policy_is_evaluated(forged):
  """Table and JSON agree; every family's tasks add up; the interval holds the rate."""
  workdir = forged.workdir
  flags = [f'--workdir={workdir}', *conftest.ENGINE, '--config.eval_tasks=4']
  flags += ['--config.episodes.backend=rlimit_only', '--config.temperatures=(0.7,)']
  output = conftest.run('evaluate', *flags, '--config.episodes.agent.max_tokens=16')
  assert f'step 5 of {workdir / "rl"}' in output
  found = json.loads((workdir / 'evaluation.json').read_text())
  assert found['checkpoint'] == str(workdir / 'rl') and found['step'] == 5
  total, *families = found['held_out']
  assert total['family'] == 'all' and total['tasks'] == 4
  assert sum(row['tasks'] for row in families) == 4
  for row in found['held_out']:
    assert row['temperature'] == 0.7
    assert row['low'] <= row['success'] <= row['high']
    assert re.search(rf'0\.7 +{row["family"]} +(\d+ +)?{row["success"]:.3f} ', output)


def test_its_scaffold_evolves(forged, tmp_path):
  """Two rounds with the real engine; again, it has nothing left to do; each decision
  follows from the record."""
  flags = [f'--workdir={tmp_path}', *conftest.ENGINE]
  flags += [
    f'--config.checkpoint={forged.workdir}',
    '--config.episodes.agent.max_tokens=16',
  ]
  flags += ['--config.episodes.backend=rlimit_only']
  output = conftest.run('evolve', *flags, variant=':smoke')
  assert '2 rounds, ' in output and 'incumbent − start' in output
  written = (tmp_path / 'record.jsonl').read_bytes()
  assert '2 rounds, ' in conftest.run('evolve', *flags, variant=':smoke')
  assert (tmp_path / 'record.jsonl').read_bytes() == written
  scaffold.read(tmp_path / 'best')
  output = conftest.run_module(
    'experiments.evolve', f'--workdir={tmp_path}', '--replay'
  )
  assert '2 rounds, and every decision is the same' in output


def test_it_writes_what_is_shown_and_lists_what_it_writes(forged):
  """Every name that a plot, the view or the report reads is in the records (those with
  a condition aside), every name in the records is listed, and so every plot appears."""
  found = written(forged.workdir)
  assert set(found) == {'sft', 'rl', 'eval'}
  assert unlisted(found) == []
  listed = [(phase, m) for m in names.METRICS for phase in m.phases if phase in found]
  missing = [
    (phase, m.name)
    for phase, m in listed
    if not m.when and not fnmatch.filter(found[phase], m.name)
  ]
  assert missing == []

  drawn = plots.sections(metrics.read(forged.workdir), 4, 1)
  titles = {plot.title for section in drawn for plot in section.plots}
  tables = plots.LEARNING, plots.OFF_POLICY, plots.WINDOW, plots.THROUGHPUT
  assert {'Success', *(c.title for table in tables for c in table)} <= titles
  families = {k.partition('/')[2] for k in found['rl'] if k.startswith('success/')}
  assert families and families <= titles


def test_advantages_of_the_report_are_those_of_the_update(forged):
  """What the learner recorded by turn is what its groups give by the run's reward."""
  settings = json.loads((forged.workdir / 'config.json').read_text('utf-8'))
  config = common.build(rewards.RewardConfig, settings['rl']['learner']['reward'])
  compared = 0
  with data_pool.DataPool(f'sqlite:///{forged.workdir}/pool.db') as pool:
    for item in pool.items('taken'):
      for credit in rewards.advantages(pool.group(item.index), config).credits:
        if not credit.completions:  # masked or pruned
          continue
        session = credit.trajectory.session
        stored = {t.turn: t.advantage for t in pool.turns(session) if not t.superseded}
        turns = [c.turn for c in credit.completions]
        np.testing.assert_array_equal([stored[t] for t in turns], credit.advantages)
        compared += len(turns)
  assert compared > 0
