"""Out to Hugging Face and back, as programs: nothing is lost on the way."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from m2jax import config
from m2jax.checkpoint import CheckpointManager, policy
from m2jax.text import tokenizer
from tests import quick
from tests.experiments import conftest

MODEL = dataclasses.replace(
  config.tiny(), vocab_size=300, num_layers=1, embed_dim=16, num_experts=4
)


def run_many(tmp_path, commands):
  """Code and output of each program, one after the other (see many.py)."""
  path = tmp_path / 'cases.json'
  path.write_text(json.dumps(commands))
  many = [sys.executable, '-m', 'tests.experiments.many', str(path)]
  done = subprocess.run(many, cwd=conftest.ROOT, capture_output=True, timeout=300)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.fixture
def run(tmp_path):
  """A run's workdir with one SFT checkpoint."""
  tokenizer.train(['some text'], 300).save(tmp_path / 'tokenizer.json')
  tokens = (tmp_path / 'tokenizer.json').read_bytes()
  variables = quick.variables(MODEL, 3)
  with CheckpointManager(tmp_path / 'run' / 'sft') as manager:
    files = {'tokenizer.json': tokens}
    manager.save(7, {'variables': variables}, policy.host(MODEL), files)
  return tmp_path / 'run'


def test_there_and_back(tmp_path, run):
  """Weights bit for bit, the whole model config and the tokenizer; then the imported
  directory is not overwritten, nor is the exported one."""
  there = {'--checkpoint': run, '--huggingface': tmp_path / 'hf'}
  back = {'--from_huggingface': tmp_path / 'hf', '--workdir': tmp_path / 'back'}
  commands = {}
  for name, flags in [('out', there), ('in', back), ('again', there), ('over', back)]:
    flags = [f'{flag}={value}' for flag, value in flags.items()]
    commands[name] = ['experiments.convert', *flags]
  results = run_many(tmp_path, commands)
  assert [results[n]['code'] for n in commands] == [0, 0, 2, 2], results
  assert f'step 7 of {run / "sft"}' in results['out']['out']
  before, after = policy.load(run), policy.load(tmp_path / 'back')
  assert after.model == before.model == MODEL
  assert after.tokenizer == before.tokenizer
  jax.tree.map(np.testing.assert_array_equal, after.variables, before.variables)
  for name in ('again', 'over'):
    errors = [e for e in results[name]['err'].splitlines() if e.startswith('error: ')]
    assert len(errors) == 1 and str(tmp_path) in errors[0]


def test_bad_input(tmp_path, run):
  """One line that names what is wrong; nothing is left behind."""
  other = tmp_path / 'other'
  other.mkdir()
  (other / 'config.json').write_text(json.dumps({'model_type': 'llama'}))
  (other / 'tokenizer.json').write_bytes((run.parent / 'tokenizer.json').read_bytes())
  workdir = f'--workdir={tmp_path / "new"}'
  cases = {
    '--from_huggingface to import': [],
    '--huggingface is missing': [f'--checkpoint={run}'],
    '--workdir is missing': [f'--from_huggingface={other}'],
    "model_type='llama'": [f'--from_huggingface={other}', workdir],
    'no tokenizer at': [f'--from_huggingface={tmp_path}/gone', workdir],
    f'{tmp_path}/lost': [
      f'--checkpoint={tmp_path}/lost',
      f'--huggingface={tmp_path}/x',
    ],
    'should be one of': [f'--checkpoint={run}', '--dtype=int8'],
  }
  results = run_many(
    tmp_path, {name: ['experiments.convert', *flags] for name, flags in cases.items()}
  )
  for message, result in results.items():
    lines = [e for e in result['err'].splitlines() if e.startswith('error: ')]
    assert result['code'] == 2 and len(lines) == 1, result
    assert message in lines[0] and 'Traceback' not in result['err']
  assert not (tmp_path / 'new').exists() and not (tmp_path / 'x').exists()
