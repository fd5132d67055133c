"""The doctor on workdirs: damaged and hostile files, logs, pools, the command."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import signal

import numpy as np
import pytest

from experiments import common
from m2jax import records as records_lib
from m2jax.evolve import doctor
from m2jax.evolve.doctor import history, rules, settings
from m2jax.observe import findings
from m2jax.pool.data_pool import DataPool
from tests import processes
from tests.evolve import runs
from tests.waiting import wait_until

N = 60


def kinds(workdir, **options):
  records = history.read(workdir)
  last_s = records.last.time_s[-1] if records.last else 1.7e9
  found = doctor.examine(workdir, now_s=last_s + 5, **options)
  return {x.kind: x for x in found}


def test_voided_records_are_not_judged(tmp_path):
  """A restart repeats the steps after its checkpoint: what it voids is forgotten, NaN
  included; without its marker the repetition itself is a finding."""
  records = runs.rl('white', 0, N)
  bad = [json.loads(json.dumps(r)) for r in records[40:50]]
  for row in bad:
    row['loss'], row['grad_norm'] = None, 1e4
  runs.write(tmp_path, [*records[:40], *bad, runs.void('rl', 40, 1), *records[40:]])
  assert not kinds(tmp_path)
  found = history.read(tmp_path).phases['rl']
  assert found.step.tolist() == list(range(1, N + 1))
  runs.write(tmp_path, [*records[:40], *bad, *records[40:]])
  assert set(kinds(tmp_path)) == {'repeated_steps'}
  assert kinds(tmp_path)['repeated_steps'].first_step == 41
  runs.write(tmp_path, [*records[:40], *bad])
  assert 'not_finite' in kinds(tmp_path)


def test_missing_values(tmp_path):
  """Names come and go, as `when` in the table of names says; a phase may be new."""
  records = runs.rl('white', 0, N)
  for i, row in enumerate(records):
    for name in list(row)[5 + i % 3 :: 3]:
      del row[name]
  runs.write(tmp_path, records)
  assert not kinds(tmp_path)


HOSTILE = {
  'not json': b'{"schema": 1,,}\n',
  'a list': b'[1]\n',
  'deep': b'[' * 100_000 + b'\n',
  'not utf-8': b'\xff\xfe{}\n',
  'a phase of a list': b'{"schema":1,"lineage":0,"time_s":1,"phase":[],"step":1}\n',
  'a step of 400 digits': b'{"schema":1,"lineage":0,"time_s":1,"phase":"rl","step":'
  + b'9' * 400
  + b'}\n',
  'a step of 5000 digits': b'{"schema":1,"step":' + b'9' * 5000 + b'}\n',
  'an object': b'{"schema":1,"lineage":0,"time_s":1,"phase":"rl","step":1,"x":{}}\n',
  'a marker of nothing': b'{"schema":1,"lineage":0,"time_s":1,"supersedes":[]}\n',
  'a newer schema': b'{"schema":2,"lineage":0,"time_s":1,"phase":"rl","step":61}\n',
  'a line without end': b'{"a":"' + b'x' * (3 << 20) + b'"}\n',
  'controls': b'{"schema":1,"\x1b[2J\n',
}


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_lines_are_findings(name, tmp_path):
  """Each is one finding with its line; the records around it are read."""
  runs.write(tmp_path, runs.rl('white', 0, N))
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(HOSTILE[name] + path.read_bytes() + b'{"schema": 1, "incomp')
  found = kinds(tmp_path)
  assert set(found) == {'damaged_metrics'}
  assert 'line 1' in found['damaged_metrics'].summary
  assert '\x1b' not in found['damaged_metrics'].summary
  assert len(history.read(tmp_path).phases['rl'].step) == N


def test_hostile_values(tmp_path):
  """Values that no float32 has, texts in place of numbers, and more names than any
  run: findings of values that are not finite, or nothing."""
  records = runs.rl('white', 0, N)
  records[20]['loss'] = 10**400
  records[21]['entropy'] = 'much'
  records[22]['success'] = True
  runs.write(tmp_path, records)
  assert not kinds(tmp_path)
  text = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  text[30] = text[30].replace('"loss":', '"loss":1e999,"x":')
  text[31] = text[31].replace('"loss":', '"loss":NaN,"x":')
  names = ','.join(f'"{i}":null' for i in range(5000))
  text[32] = text[32].replace('"loss":', names + ',"loss":')
  (tmp_path / 'metrics.jsonl').write_text('\n'.join(text) + '\n')
  found = kinds(tmp_path)
  assert set(found) == {'not_finite'}
  assert (found['not_finite'].first_step, found['not_finite'].last_step) == (31, 32)
  assert len(history.read(tmp_path).not_finite) <= history.MAX_NAMES


def test_a_pipe_is_not_opened(tmp_path):
  os.mkfifo(tmp_path / 'metrics.jsonl')
  assert set(kinds(tmp_path)) == {'damaged_metrics'}


def test_memory_is_bounded(tmp_path, monkeypatch):
  """The newest records remain, whatever the length."""
  monkeypatch.setattr(history, 'KEEP_RECORDS', 20)
  monkeypatch.setattr(history, 'MAX_BYTES', 50_000)
  runs.write(tmp_path, runs.rl('white', 0, 300))
  found = history.read(tmp_path)
  steps = found.phases['rl'].step
  assert 20 <= len(steps) < 40 and steps.tolist() == list(range(steps[0], 301))
  assert not found.damaged and found.records < 300


def test_lines_of_the_log_in_the_window(tmp_path):
  """Those of the kind and of the time; their text is untrusted."""
  records = runs.rl('white', 0, N)
  for row in records[40:]:
    row['trajectories_masked'] = 50
  runs.write(tmp_path, records)
  at = datetime.datetime.fromtimestamp(records[45]['time_s'])
  stamp = at.strftime('%m%d %H:%M:%S.000001 1 a.py:3] ')
  early = (at - datetime.timedelta(hours=1)).strftime('%m%d %H:%M:%S.000001 1 a.py:3] ')
  path = tmp_path / 'agents.log'
  path.write_text(
    f'W{early}no sandbox: early\nW{stamp}no sandbox \x1b[2J: \u202e now\n'
    f'I{stamp}sandbox is fine\nE{stamp[:-9]}slow_operation_alarm.cc:73] compiling\n'
    f'E{stamp}item 3 broke\nE{stamp}item 4 broke\n'
  )
  os.utime(path, (records[45]['time_s'] + 60,) * 2)
  found = kinds(tmp_path)
  assert set(found) == {'infrastructure', 'logged_errors'}
  (line,) = found['infrastructure'].log
  assert 'now' in line and '\x1b' not in line and '\u202e' not in line
  assert '2 errors' in found['logged_errors'].summary


def completion(id_, session, prompt, response, parent=None, fork=None, version=0):
  tokens = len(response)
  return records_lib.Completion(
    *(id_, session, 0 if parent is None else 1, parent, fork),
    *(np.array(prompt), np.array(response), np.full(tokens, -0.5)),
    *(np.full(tokens, version), 'stop', 'ok'),
  )


def pool(
  workdir,
  *,
  task='terminal/train/a/{}',
  sign=1.0,
  error='',
  fork=None,
  token=2,
  result='4 files',
):
  """Twenty groups of four, half of which succeed; every tenth is evaluated."""
  with DataPool(f'sqlite:///{workdir}/pool.db') as found:
    for item in range(20):
      found.submit(records_lib.WorkItem(item, task.format(item), 4))
      rewards, advantages = {}, {}
      for rank in range(4):
        session, success = f's{item}-{rank}', float(rank % 2)
        first = completion(f'{session}a', session, [1, 5], [token])
        found.add_completion(first)
        found.add_completion(
          completion(
            *(f'{session}b', session, [1, 5, token, 7], [3]),
            *((None, fork) if fork else (first.id, None)),
          )
        )
        failed = error and rank == 3
        found.add_trajectory(
          records_lib.Trajectory(
            *(session, item, rank, task.format(item), 'a'),
            *('infrastructure' if failed else 'answer', 0.0 if failed else success),
            *(0.5, 0),
            error=error if failed else '',
            messages=({'role': 'tool', 'content': result if rank else '5'},),
          )
        )
        total = sign * success
        rewards[session] = records_lib.TrajectoryReward(0, 0, success, total)
        advantages |= {f'{session}{x}': total - sign / 2 for x in 'ab'}
      found.set_rewards(rewards, advantages)
    for i in range(4):
      found.add_trajectory(
        records_lib.Trajectory(
          *(f'e{i}', -1, 0, f'terminal/held_out/a/{i}', 'a', 'answer', 0.0, 0.5, 0)
        )
      )
    found.flush()


@pytest.mark.parametrize(
  'options, expected',
  [
    ({}, set()),
    ({'sign': -1.0}, {'reward_sign'}),
    ({'error': 'no sandbox: \x1b[2J user namespaces'}, {'infrastructure'}),
    ({'fork': 'retokenised'}, {'retokenised'}),
    ({'fork': 'context_edited'}, set()),
    ({'task': 'terminal/held_out/a/{}'}, {'held_out_in_training'}),
    ({'task': 'mixed/train/terminal/dev/a/{}'}, {'held_out_in_training'}),
    ({'task': 'mixed/dev/terminal/train/a/{}'}, set()),
    ({'token': 900}, {'tokenizer'}),
    ({'result': 'error: 503 service \x1b[2J unavailable'}, {'tool_failures'}),
    ({'result': 'error: no such file'}, set()),
    ({'result': 'a log of a server that timed out' + 300 * '.'}, set()),
  ],
  ids=str,
)
def test_pools(options, expected, tmp_path):
  pool(tmp_path, **options)
  vocabulary = {'model': {'vocab': {str(i): i for i in range(768)}}}
  (tmp_path / 'tokenizer.json').write_text(json.dumps(vocabulary))
  found = kinds(tmp_path)
  assert set(found) == expected
  assert all('\x1b' not in x.summary for x in found.values())


def test_a_prompt_that_changes_what_it_extends(tmp_path):
  """The gateway refuses to record one; a faulty gateway would not."""
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as found:
    found.add_completion(completion('a', 's', [1, 5], [2]))
    found.add_completion(completion('b', 's', [1, 5, 9, 7], [3], parent='a'))
    found.flush()
  assert set(kinds(tmp_path)) == {'prefix_changed'}


def test_a_damaged_pool(tmp_path):
  (tmp_path / 'pool.db').write_bytes(b'not a database' * 100)
  assert set(kinds(tmp_path)) == {'damaged_pool'}
  with pytest.raises(ValueError, match='data pool'):
    doctor.examine(tmp_path, pool_url=str(tmp_path / 'pool.db'))


def test_the_tokenizer_of_another_run(tmp_path):
  """Against those of the checkpoints and of the run that the weights are from."""
  host = tmp_path / 'sft' / '12' / 'host'
  host.mkdir(parents=True)
  for path, tokens in ((tmp_path, ['a', 'b']), (host, ['a', 'b'])):
    vocabulary = {'model': {'vocab': {t: i for i, t in enumerate(tokens)}}}
    (path / 'tokenizer.json').write_text(json.dumps(vocabulary))
  assert not kinds(tmp_path)
  vocabulary = {'model': {'vocab': {'b': 0, 'a': 1}}}
  (host / 'tokenizer.json').write_text(json.dumps(vocabulary))
  assert set(kinds(tmp_path)) == {'tokenizer'}


@pytest.fixture(scope='module')
def config():
  """The smoke test's, as config.json has it."""
  import dataclasses

  from configs import forge
  from m2jax.forge.config import ForgeConfig

  built = common.build(ForgeConfig, forge.get_config('smoke'))
  return json.loads(json.dumps(dataclasses.asdict(built)))


def test_proposals_are_valid(config):
  """Every rule gives a config that builds, or none; errors are answered first."""
  from experiments import own_kinds as job

  proposed = {}
  for kind in rules.RULES:
    found = doctor.causes.explained(doctor.Finding(kind, '', 'rl'), config)
    proposal = rules.propose([found], config, job.build)
    if proposal is not None:
      proposed[kind] = (proposal.field, proposal.new)
      assert settings.get(config, proposal.field) == proposal.old != proposal.new
      job.build(rules.changed(config, proposal.field, proposal.new))
  rate = config['rl']['optimizer']['muon']['learning_rate']
  field, new = proposed['loss_divergence']
  assert field == 'rl.optimizer.muon.learning_rate' and new == pytest.approx(
    rate / 3, rel=0.01
  )
  # A queue of 2 holds the 2 groups of a step; of one it would not.
  assert proposed['staleness'] == ('rl.capacity', 2)
  smaller = rules.changed(config, 'rl.capacity', 2)
  stale = doctor.causes.explained(doctor.Finding('staleness', '', 'rl'), smaller)
  assert rules.propose([stale], smaller, job.build) is None
  frozen = rules.changed(config, 'rl.learner.step.bias_update_rate', 0.0)
  found = doctor.Finding('router_bias_frozen', '', 'rl', severity='warning')
  answer = rules.propose([found], frozen, job.build)
  assert (answer.field, answer.new) == ('rl.learner.step.bias_update_rate', 1e-3)
  broken = doctor.Finding('loss_divergence', '', 'sft', severity='error')
  answer = rules.propose([found, broken], frozen, job.build)
  assert answer.field == 'sft.optimizer.muon.learning_rate'


@pytest.mark.parametrize(
  'field, value',
  [
    ('tasks.kind', 'hostile.'),
    ('episodes.agent.kind', 'hostile.'),
    ('episodes.agent', dict(kind='perturbed', agent=dict(kind='hostile.'))),
    ('rl.learner.estimator.kind', 'hostile.'),
    ('rl.window', 'hostile.'),
    ('rl.window', dict(kind='hostile.')),
  ],
)
def test_a_config_of_others_imports_nothing(
  config, tmp_path, monkeypatch, field, value
):
  """`kind` is an import path: a run's config does not choose what is imported."""
  from experiments import own_kinds as job

  (tmp_path / 'hostile.py').write_text(f'open({str(tmp_path / "ran")!r}, "w")')
  monkeypatch.syspath_prepend(tmp_path)
  hostile = rules.changed(config, field, value)
  found = doctor.Finding('loss_divergence', '', 'rl', severity='error')
  assert rules.propose([found], hostile, job.build) is None
  assert not (tmp_path / 'ran').exists()


def test_the_command(tmp_path, config):
  """Exit status, sentences, JSON; on a workdir that is not written to."""
  records = runs.rl('white', 0, N)
  for row in records:
    row['progress'] = 1.0
  runs.write(tmp_path, records)
  (tmp_path / 'config.json').write_text(json.dumps(config))
  healthy = processes.run('experiments.doctor', f'--workdir={tmp_path}')
  assert (healthy.returncode, healthy.stdout) == (0, 'no findings\n'), healthy.stderr
  for row in records[40:]:
    row['grad_norm'] *= 40
  runs.write(tmp_path, records)
  before = sorted(path.name for path in tmp_path.iterdir())
  faulty = processes.run('experiments.doctor', f'--workdir={tmp_path}')
  assert faulty.returncode == 1, faulty.stderr
  assert 'warning: gradient_jump: rl, steps 41 to 60' in faulty.stdout
  assert 'rl.optimizer.muon.learning_rate' in faulty.stdout
  assert sorted(path.name for path in tmp_path.iterdir()) == before
  shown = processes.run('experiments.doctor', f'--workdir={tmp_path}', '--json')
  found = json.loads(shown.stdout)
  assert shown.returncode == 1 and found['proposal']['kind'] == 'gradient_jump'
  assert found['findings'][0]['evidence'][0]['name'] == 'grad_norm'
  missing = processes.run('experiments.doctor', f'--workdir={tmp_path}/none')
  assert missing.returncode == 2 and 'no such directory' in missing.stderr


def test_the_command_with_recorded_answers(tmp_path, config):
  """They are labelled; the second answer is asked for with the error of the first."""
  records = runs.rl('white', 0, N)
  for row in records[40:]:
    row['grad_norm'] *= 40
  runs.write(tmp_path, records)
  (tmp_path / 'config.json').write_text(json.dumps(config))
  change = {'change': 'config', 'finding': 'gradient_jump', 'reason': 'too high'}
  change |= {'field': 'rl.optimizer.muon.learning_rate', 'value': 0.001}
  answers = tmp_path / 'answers.json'
  answers.write_text(json.dumps(['rm -rf /', json.dumps(change)]))
  flags = [f'--workdir={tmp_path}', f'--recorded={answers}', '--write']
  done = processes.run('experiments.doctor', *flags)
  assert done.returncode == 1, done.stderr
  label = 'by recorded answers, a test of the plumbing: '
  assert f'no valid answer {label}not one JSON object' in done.stdout
  assert f'{label}--config.rl.optimizer.muon.learning_rate=0.001' in done.stdout
  (found,) = (x for x in findings.read(tmp_path) if x.kind == 'gradient_jump')
  assert found.window == (41, 60)
  done = processes.run(
    'experiments.doctor',
    *(f'--workdir={tmp_path}', '--model=m', '--model_url=http://127.0.0.1:1/v1'),
  )
  assert done.returncode == 1 and 'no valid answer by m: m at http' in done.stdout
  for wrong in (['--model=m'], ['--own_code'], [f'--recorded={tmp_path}/none']):
    done = processes.run('experiments.doctor', f'--workdir={tmp_path}', *wrong)
    assert done.returncode == 2 and wrong[0].partition('=')[0] in done.stderr


@pytest.fixture
def faulty(tmp_path, config):
  """A run whose rerun reads `recorded` first; its proposal is the rules'."""
  records = runs.rl('white', 0, N)
  for row in records[40:]:
    row['grad_norm'] *= 40
  runs.write(tmp_path, records)
  config = rules.changed(config, 'sft.recorded', f'{tmp_path}/recorded')
  (tmp_path / 'config.json').write_text(json.dumps(config))
  return tmp_path


@pytest.mark.long
def test_a_rerun_that_dies_is_a_result(faulty):
  """With the last lines of its log; the run's own files are as they were."""
  done = processes.run('experiments.doctor', f'--workdir={faulty}', '--verify')
  assert done.returncode == 1, done.stderr
  assert 'rerun: undecided: the rerun ended with status 2' in done.stdout
  assert f'{faulty}/recorded' in done.stdout
  names = sorted(path.name for path in faulty.iterdir())
  assert names == ['config.json', 'metrics.jsonl', 'verify-1']


@pytest.mark.long
def test_ctrl_c_ends_a_rerun(faulty):
  """No process of it is left, and there is no verdict."""
  os.mkfifo(faulty / 'recorded')  # to read it takes for ever
  doctor = processes.start('experiments.doctor', f'--workdir={faulty}', '--verify')
  lock = faulty / 'verify-1' / '.lock'
  wait_until(lambda: lock.exists() and lock.read_text())
  pid = lock.read_text().split()[1]
  doctor.send_signal(signal.SIGINT)
  ((out, err),) = processes.finish([doctor])
  assert doctor.returncode == 130 and 'rerun:' not in out, err
  place = pathlib.Path('/proc') / pid / 'stat'
  wait_until(lambda: not place.exists() or ') Z' in place.read_text())
