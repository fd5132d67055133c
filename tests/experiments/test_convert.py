"""Out to Hugging Face and back, as programs: nothing is lost on the way."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from m2jax import config
from m2jax.checkpoint import CheckpointManager, policy
from m2jax.text import tokenizer
from tests import processes, quick

MODEL = dataclasses.replace(
  config.tiny(), vocab_size=300, num_layers=1, embed_dim=16, num_experts=4
)


def convert(**flags):
  """The finished program."""
  flags = [f'--{name}={value}' for name, value in flags.items()]
  return processes.run('experiments.convert', *flags, timeout_s=300)


def error(done):
  """The one line that a refused program prints."""
  lines = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
  assert done.returncode == 2 and len(lines) == 1, done
  assert 'Traceback' not in done.stderr
  return lines[0]


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
  there = {'checkpoint': run, 'huggingface': tmp_path / 'hf'}
  back = {'from_huggingface': tmp_path / 'hf', 'workdir': tmp_path / 'back'}
  done = convert(**there)
  assert done.returncode == 0 and f'step 7 of {run / "sft"}' in done.stdout, done
  done = convert(**back)
  assert done.returncode == 0, done
  before, after = policy.load(run), policy.load(tmp_path / 'back')
  assert after.model == before.model == MODEL
  assert after.tokenizer == before.tokenizer
  jax.tree.map(np.testing.assert_array_equal, after.variables, before.variables)
  for flags in (there, back):
    assert str(tmp_path) in error(convert(**flags))


def test_bad_input(tmp_path, run):
  """One line that names what is wrong; nothing is left behind."""
  other = tmp_path / 'other'
  other.mkdir()
  (other / 'config.json').write_text(json.dumps({'model_type': 'llama'}))
  (other / 'tokenizer.json').write_bytes((run.parent / 'tokenizer.json').read_bytes())
  new, gone = tmp_path / 'new', tmp_path / 'gone'
  cases = {
    '--from_huggingface to import': {},
    '--huggingface is missing': dict(checkpoint=run),
    '--workdir is missing': dict(from_huggingface=other),
    "model_type='llama'": dict(from_huggingface=other, workdir=new),
    'no tokenizer at': dict(from_huggingface=gone, workdir=new),
    f'{tmp_path}/lost': dict(checkpoint=tmp_path / 'lost', huggingface=tmp_path / 'x'),
    'should be one of': dict(checkpoint=run, dtype='int8'),
  }
  for message, flags in cases.items():
    assert message in error(convert(**flags))
  assert not new.exists() and not (tmp_path / 'x').exists()
