"""The lists of benchmarks.doctor, and how it judges what the doctor says."""

from __future__ import annotations

import argparse
import importlib.util

import numpy as np
import pytest

from benchmarks import doctor, doctor_worker
from benchmarks.doctor_faults import CATEGORIES, Fault, Healthy, jobs, task
from m2jax import tasks
from m2jax.evolve.doctor import causes
from tests.evolve import runs

LISTS = [
  name
  for name in doctor.LISTS
  if importlib.util.find_spec(f'benchmarks.doctor_faults.{name}')
]


def test_every_kind_of_finding_has_a_category():
  """And every other category has a kind, so that a right diagnosis is possible."""
  assert set(doctor.CATEGORY) == set(causes.KINDS)
  assert set(doctor.CATEGORY.values()) - {''} == set(CATEGORIES)


@pytest.mark.parametrize('name', LISTS)
def test_lists(name, tmp_path):
  """Each entry is a valid job, which it changes; faults begin where they say."""
  for entry in doctor_worker.entries(name).values():
    assert isinstance(entry, Healthy if name == 'healthy' else Fault)
    of = doctor_worker.Task(name, entry.name, 5, str(tmp_path), str(tmp_path))
    _, settings = doctor_worker.config(of)
    usual = jobs.config(entry.job, 5, tmp_path)
    assert bool(entry.config) == (settings.to_json() != usual.to_json())
    doctor.build(settings.to_dict())
    if isinstance(entry, Fault):
      assert entry.config or entry.patch
      first = {entry.first(seed, 100) for seed in range(50)}
      low, high = entry.begins
      assert 100 * low <= min(first) <= max(first) <= 100 * high
      assert len(first) > 1 or low == high


def test_a_fault_that_is_not_one():
  with pytest.raises(ValueError, match='no category'):
    Fault('a', 'bad luck', 'x')
  with pytest.raises(ValueError, match='begins'):
    Fault('a', 'reward', 'x', begins=(0.5, 0.2))


def finding(kind, last_step):
  return {'kind': kind, 'last_step': last_step}


def test_scores():
  """What ended before the fault is a false alarm; the first of the rest is the
  diagnosis; findings without steps, as those of the pool, count."""
  fault = Fault('a', 'reward', 'x')
  score = lambda *found: doctor.score(fault, 20, [finding(*f) for f in found])
  nothing = score()
  assert not nothing['detected'] and not nothing['diagnosed']
  right = score(('gradient_jump', 20), ('reward_sign', 30), ('staleness', 30))
  assert right['detected'] and right['diagnosed'] and right['early'] == 1
  second = score(('gradient_jump', 21), ('success_falls', 30))
  assert not second['diagnosed'] and second['named'] and not second['early']
  assert score(('reward_sign', None))['diagnosed']
  assert not score(('reward_sign', 20))['detected']


def test_updates_to_detection(tmp_path):
  """The first record by which the fault is found; that of its own category if any."""
  records = runs.rl('white', 0, 80)
  for row in records[40:]:
    row['engine/version'] = 40
    row['grad_norm'] *= 50
  runs.write(tmp_path, records)
  published = doctor.delay(tmp_path, Fault('a', 'weights', 'x'), 40)
  gradient = doctor.delay(tmp_path, Fault('a', 'optimizer', 'x'), 40)
  other = doctor.delay(tmp_path, Fault('a', 'tokenizer', 'x'), 40)
  assert 10 <= published <= 14
  assert gradient == other < published
  runs.write(tmp_path, runs.rl('white', 0, 80))
  assert doctor.delay(tmp_path, Fault('a', 'weights', 'x'), 40) is None


def test_table():
  def run(name, detected, verified, updates):
    return {
      **{'list': 'first', 'name': name, 'seed': 0, 'cpu_s': 30.0, 'early': 0},
      **{'detected': detected, 'diagnosed': detected, 'named': detected},
      **{'verified': verified, 'updates': updates, 'findings': []},
    }

  found = [run('low_cap', True, True, 4), run('low_cap', True, False, 8)]
  found += [run('held_out', False, None, None)]
  healthy = {'list': 'healthy', 'name': 'cispo', 'seed': 0, 'cpu_s': 1.0}
  healthy['findings'] = [{'kind': 'clipping'}]
  shown = doctor.table([*found, healthy])
  assert '| clipping | 2 of 2 | 2 of 2 | 2 of 2 | 6 [4, 8] | 1 of 2 |' in shown
  assert '| data split | 0 of 1 | 0 of 1 | 0 of 1 | pool | none |' in shown
  assert '1 of 1 have a finding' in shown and '4 runs, 91 s of CPU' in shown


def test_the_tasks():
  """A key has one number, and the splits differ."""
  config = task.Config()
  specs = {s: tasks.spec(config, s, 3) for s in ('train', 'held_out')}
  assert len(set(specs.values())) == 2
  numbers = {}
  for i in range(40):
    made = tasks.make(tasks.spec(config, 'train', i))
    assert made.split == 'train' and made.total == sum(n for _, n in made.chain) % 5
    for key, number in made.chain:
      assert numbers.setdefault(key, number) == number
  assert len(numbers) == len(task.KEYS)


@pytest.mark.long
def test_one_fault_to_its_end(tmp_path):
  """A real run with a wrong loss mask is detected and diagnosed at once, and is not
  repeated."""
  args = argparse.Namespace(workdir=tmp_path, list=['first'], seeds=[100])
  args.only = ['loss_mask']
  (of,) = doctor.tasks(args)
  found = doctor.measure(of, args)
  assert found['exit'] == 0, (tmp_path / 'first/loss_mask-100/run.log').read_text()
  assert found['detected'] and found['diagnosed'] and found['verified'] is None
  assert found['updates'] <= 2 and not found['early']
  assert np.isfinite(found['cpu_s']) and found['cpu_s'] > 0
