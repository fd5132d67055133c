"""The table of runs says what the runs' metrics say."""

from __future__ import annotations

import json

import pytest

from benchmarks import forge_table
from m2jax.observe.metrics import MetricsWriter
from tests import processes


def write_run(workdir, *, seed=0, algorithm='cispo', good=30):
  """A run whose RL solved `good` of 40 held-out tasks, all of three calls."""
  with MetricsWriter(workdir, use_tensorboard=False) as metrics:
    metrics.write('sft', 5, tokens=700, used_s=2.0)
    metrics.write('sft', 9, tokens=300, used_s=4.0)
    for step in (1, 2):
      metrics.write(
        'rl', step, **{'pool/taken': 9 * step}, forest_tokens=50, used_s=3.0 * step
      )
    for stage, step, n in (('after SFT', 9, 10), ('after RL', 2, good)):
      for split, temperature, extra in (
        ('dev', 1.0, 1),
        ('held_out', 1.0, 0),
        ('held_out', 0.0, 4),
      ):
        fields = dict(stage=stage, split=split, temperature=temperature)
        solved = n + extra
        metrics.write('eval', step, **fields, family='all', successes=solved, n=40)
        for family, calls, successes, tasks in (
          ('trail', 3, solved - 5, 30),
          ('trail', 4, 3, 5),
          ('dead_end', 3, 2, 5),
        ):
          cell = dict(family=family, calls=calls, successes=successes, n=tasks)
          metrics.write('eval', step, **fields, **cell)
  config = {'seed': seed, 'rl': {'learner': {'estimator': {'kind': algorithm}}}}
  config['rl']['learner']['shuffle_rewards'] = False
  config['rl']['group_size'] = 16
  config['sft'] = {'families': {'steps_1': 0.5, 'steps_3': 0.5}}
  (workdir / 'config.json').write_text(json.dumps(config))
  return workdir


@pytest.fixture
def workdir(tmp_path):
  return write_run(tmp_path / 'run')


def test_rows_are_the_recorded_counts(workdir):
  """Splits, temperatures, families and lengths apart; tokens are summed."""
  sft, rl = forge_table.rows(workdir)
  assert (sft.arm, rl.arm) == ('SFT', 'RL')
  assert (rl.held_out, rl.dev, rl.greedy) == ((30, 40), (31, 40), (34, 40))
  assert rl.by_calls == {3: (27, 35), 4: (3, 5)}
  assert rl.families == {'trail': (28, 35), 'dead_end': (2, 5)}
  assert rl.longer == (3, 5)  # than the three calls that were demonstrated
  assert (sft.steps, sft.tokens, sft.seconds) == (9, 1000, 4.0)
  assert (rl.steps, rl.tokens, rl.seconds) == (2, 100, 6.0)
  assert (sft.episodes, rl.episodes) == (0, 18 * 16)


def test_arms_are_named_by_their_settings(tmp_path):
  """A control is identified by its config, not by the name of its directory."""
  run = write_run(tmp_path / 'seed0', algorithm='expert_iteration')
  assert forge_table.rows(run)[-1].arm == 'expert iteration'


def test_command_line(workdir):
  """A row a stage, means over seeds, JSON on request; no run is an error."""

  def call(*args):
    return processes.run('benchmarks.forge_table', *args)

  table = call(workdir).stdout.splitlines()
  rows = [line for line in table if line.startswith('| RL | 0 |')]
  assert len(rows) == 3 and '0.750 [' in rows[0] and '| 288 | 100 | 6 |' in rows[2]
  assert json.loads(call('--json', workdir).stdout)[1]['held_out'] == [30, 40]
  assert '| dead_end | 0.40 | 0.40 |' in call('--families', workdir).stdout
  other = write_run(workdir.parent / 'other', seed=1, good=20)
  means = call('--means', workdir, other).stdout
  assert '| RL | 2 | 0.625 | 0.500 to 0.750 | 0.600 |' in means
  wrong = call(workdir.parent / 'nosuch')
  assert wrong.returncode == 2 and 'nosuch' in wrong.stderr
