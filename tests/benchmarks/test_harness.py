"""How benchmarks of several arms add up; their runs take minutes to hours."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks import (
  harness,
  mixed_domains,
  responses,
  scaffolds,
  speed_reward,
  thinking,
)
from experiments import common
from m2jax.forge.config import ForgeConfig
from m2jax.train.workdir import OtherRun


def flags(module, monkeypatch, *given):
  """What a benchmark's `main` would hand to its arms."""
  found = []
  monkeypatch.setattr(harness, 'run', lambda *args: found.append(args))
  monkeypatch.setattr('sys.argv', ['benchmark', *given])
  module.main()
  return found[0]


@pytest.mark.parametrize(
  'module', [mixed_domains, responses, scaffolds, speed_reward, thinking]
)
def test_every_arm_has_a_config(module, monkeypatch, tmp_path):
  """The job accepts the config of each arm, also of one that goes on from others."""
  args, names, *_ = flags(module, monkeypatch, f'--workdir={tmp_path}')
  for place in ('sample-0', *(f'attempts-{name}-0' for name in names)):
    (tmp_path / place).mkdir()
    (tmp_path / place / 'verified.jsonl').write_text('{}\n{}\n')
  configs = {name: module.config(name, 0, args) for name in names}
  built = [common.build(ForgeConfig, config) for config in configs.values()]
  assert len(set(map(repr, built))) == len(names)


def test_a_measurement_is_kept(tmp_path, capsys):
  """The second run measures the seed that is new, and no other; other settings are
  other measurements, even in the same directory."""
  measured = []

  def measure(arm, seed, args):
    measured.append((arm, seed))
    return {'arm': arm, 'seed': seed}

  def run(*seeds, steps=1):
    args = argparse.Namespace(workdir=tmp_path, seeds=[*seeds], json=False, steps=steps)
    harness.run(args, ('a', 'b'), measure, lambda runs: json.dumps(runs))
    return json.loads(capsys.readouterr().out)

  assert len(run(0)) == 2 and len(run(0, 1)) == 4
  assert measured == [('a', 0), ('b', 0), ('a', 1), ('b', 1)]
  assert len(run(0, steps=2)) == 2 and len(measured) == 6


def test_ctrl_c_keeps_what_was_measured(tmp_path, capsys):
  """One line and the exit code of the jobs; the arm that was cut off has no result."""

  def measure(arm, seed, args):
    if arm == 'b':
      raise KeyboardInterrupt
    return {'arm': arm}

  args = argparse.Namespace(workdir=tmp_path, seeds=[0], json=False)
  with pytest.raises(SystemExit) as ended:
    harness.run(args, ('a', 'b'), measure, json.dumps)
  assert ended.value.code == common.INTERRUPTED
  assert 'the same command resumes' in capsys.readouterr().err
  assert [path.name for path in tmp_path.iterdir()] == ['results.jsonl']


def test_table_of_responses():
  base = {'arm': 'base', 'seed': 0, 'steps': 9, 'success': {}}
  base['success'] = {'trained': [5, 20], 'longer': [0, 20]}
  spent = base | {'arm': '30x4', 'solved': 12, 'chats': 31, 'steps': 3}
  again = spent | {'seed': 1, 'success': {'trained': [10, 20], 'longer': [1, 20]}}
  *_, first, second = responses.table([base, spent, again]).splitlines()
  assert first == '| none, before |  |  | 9 | 25.0 | 0.0 |'
  assert second == '| 30 × 4 | 12 | 31 | 3 | 37.5 [25.0, 50.0] | 2.5 [0.0, 5.0] |'


def test_a_run_that_is_in_use_is_one_line(tmp_path, capsys):
  def measure(arm, seed, args):
    raise OtherRun('in use by process 7: wait')

  args = argparse.Namespace(workdir=tmp_path, seeds=[0], json=False)
  with pytest.raises(SystemExit) as ended:
    harness.run(args, ('a',), measure, str)
  assert ended.value.code == 2 and not list(tmp_path.iterdir())
  assert capsys.readouterr().err == 'error: in use by process 7: wait\n'


def test_wide_tables_are_cut():
  """Columns of no group are in every table; a name that is no column is an error."""
  head, rows = ('name', 'x', 'y'), [('a', 1, 2), ('b', 3, 4)]
  assert harness.markdown(head[:2], [row[:2] for row in rows]) == (
    '| name | x |\n| --- | --- |\n| a | 1 |\n| b | 3 |'
  )
  assert harness.markdown(head, rows, {'First': ['x'], 'Second': ['y']}) == (
    'First:\n\n| name | x |\n| --- | --- |\n| a | 1 |\n| b | 3 |\n\n'
    'Second:\n\n| name | y |\n| --- | --- |\n| a | 2 |\n| b | 4 |'
  )
  with pytest.raises(ValueError, match="no columns \\['z'\\]"):
    harness.markdown(head, rows, {'First': ['z']})
