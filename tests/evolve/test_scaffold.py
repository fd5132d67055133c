"""The edit surface: bounds, files, the normalised hash, operators."""

import json
import os
import random

import pytest

from m2jax.agents.whitebox import WhiteboxConfig
from m2jax.evolve import operators, rules_check, scaffold

BASE = WhiteboxConfig(max_tokens=96)
START = scaffold.of_agent(BASE)
RULES = 'def act(episode):\n  return None\n'


def test_a_folder_is_read_as_it_was_written(tmp_path):
  changed = START.changed({'system': 'é', 'rules': RULES, 'loops.identical': 3})
  changed.write(tmp_path)
  assert scaffold.read(tmp_path) == changed
  agent = changed.agent(BASE)
  assert (agent.system, agent.loops.identical, agent.rules) == ('é', 3, RULES)
  START.write(tmp_path)  # without rules
  assert scaffold.read(tmp_path) == START
  assert START.agent(BASE).sampling['temperature'] == 1


BAITS = {
  'sampling.seed': 7,
  'seed': 7,
  'max_turns': 99,
  'max_tokens': 10**6,
  'retry.most': 1000,
  'loops.identical': 1,
  'sampling.temperature': float('nan'),
  'sampling.top_k': True,
  'instruction': 'no place for the task',
  'system': 'x' * 5000,
  'rules': 'import os\ndef act(e): return None',
  'context.actions': ['format_disk'],
  'rename': {'a': 3},
  '../evaluator.py': 'x',
}


@pytest.mark.parametrize('field', BAITS)
def test_what_is_outside_the_bounds_is_named(field):
  found = scaffold.problems(START.changed({field: BAITS[field]}).values)
  assert len(found) == 1 and field.rpartition('.')[2].strip('/') in found[0], found


def test_a_job_narrows_bounds_and_never_widens_them():
  bounds = scaffold.narrowed([('max_tokens', 16, 128)])
  assert scaffold.problems(START.changed({'max_tokens': 512}).values, bounds)
  for wrong in (('max_tokens', 1, 10**6), ('system', 0, 1), ('seed', 0, 9)):
    with pytest.raises(ValueError, match=r'bounds\.'):
      scaffold.narrowed([wrong])


def test_a_folder_with_anything_else_is_refused(tmp_path):
  def refused(name, match):
    with pytest.raises(scaffold.InvalidScaffold, match=match):
      scaffold.read(tmp_path)
    (tmp_path / name).unlink()

  refused_files = {'evaluator.py': 'no file of', 'scaffold.toml': 'no file of'}
  for name, match in refused_files.items():
    START.write(tmp_path)
    (tmp_path / name).write_text('x')
    refused(name, match)
  os.symlink('/etc/passwd', tmp_path / 'rules.py')
  refused('rules.py', 'no file of')
  path = tmp_path / 'scaffold.json'
  for text in ('[' * 99999, '{"schema": 2}', '{', '{"schema": 1}', '"x"'):
    path.write_text(text)
    with pytest.raises(scaffold.InvalidScaffold):
      scaffold.read(tmp_path)
  found = json.loads(START.files()['scaffold.json'])
  path.write_text(json.dumps(found | {'sampling': found['sampling'] | {'seed': 1}}))
  refused('scaffold.json', r'sampling\.seed.*no field')


def test_the_hash_is_of_the_meaning():
  first = START.changed({'rules': RULES})
  same = START.changed(
    {'rules': '# a comment\ndef act(episode):\n    return  None', 'loops.most': 4.0}
  )
  assert first.digest == same.digest != START.digest
  other = START.changed({'rules': RULES.replace('None', '{"end": True}')})
  assert other.digest != first.digest


@pytest.mark.parametrize(
  'source',
  [
    'def act(e): return ().__class__',
    'def act(e): return open("/etc/passwd")',
    'import re\ndef act(e): return re._compiler',
    'from os import path\ndef act(e): pass',
    'while True: pass\ndef act(e): pass',
    'class A: pass\ndef act(e): pass',
    'def other(e): pass',
    'def act(a, b): pass',
    'x' * 100 + '(',
    '(' * 9000,
  ],
)
def test_code_that_is_no_rule(source):
  assert rules_check.problems(source)


def test_operators_stay_within_the_bounds():
  bounds = scaffold.narrowed([('max_tokens', 32, 64)])
  assert len({o.field for o in operators.OPERATORS}) == len(operators.OPERATORS)
  for operator in operators.OPERATORS:
    if isinstance(operator, operators.Options):
      assert operators.allowed(operator, scaffold.FIELDS) == operator.values
    for seed in range(20):
      current = START.values[operator.field]
      value = operators.draw(operator, current, random.Random(seed), bounds)
      changed = START.changed({'max_tokens': 64, operator.field: value})
      assert not scaffold.problems(changed.values, bounds), (operator, value)
