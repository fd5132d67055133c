"""A policy loads from a checkpoint alone; anything else is rejected by name."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2jax import config
from m2jax.checkpoint import (
  CheckpointManager,
  CheckpointMismatch,
  MissingCheckpoint,
  initial,
  policy,
)
from m2jax.text import tokenizer
from m2jax.train import step as train_step

MODEL = dataclasses.replace(
  config.tiny(), vocab_size=300, num_layers=1, embed_dim=16, num_mtp_modules=0
)


@pytest.fixture(scope='module')
def trained():
  """A train state, optimizer included."""
  random = np.random.default_rng(1)
  init = functools.partial(train_step.init_variables, MODEL)
  variables = jax.tree.map(
    lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype),
    jax.eval_shape(init, jax.random.key(1)),
  )
  return train_step.init_state(variables, optax.adam(1e-3))


@pytest.fixture(scope='module')
def workdir(tmp_path_factory, trained):
  """A run's workdir with SFT's steps 3 and 4."""
  root = tmp_path_factory.mktemp('run')
  tokenizer.train(['some text'], 300).save(root / 'tokenizer.json')
  save(root / 'sft', trained, 3, 4)
  return root


def save(directory, state, *steps, host=None, tokens=None):
  tokens = tokens or (directory.parent / 'tokenizer.json').read_bytes()
  host = policy.host(MODEL) if host is None else host
  with CheckpointManager(directory, keep=None) as manager:
    for step in steps:
      manager.save(step, state, host, {'tokenizer.json': tokens})


@pytest.mark.parametrize('inside', ['', 'sft'])
def test_load(workdir, trained, inside):
  """Weights come back bit for bit, by workdir and by directory, with what they need."""
  found = policy.load(workdir / inside)
  assert (found.model, found.step) == (MODEL, 4)
  assert found.directory == str(workdir / 'sft')
  assert found.load_tokenizer().decode(found.load_tokenizer().encode('some')) == 'some'
  jax.tree.map(np.testing.assert_array_equal, found.variables, trained.variables)
  assert policy.load(workdir / inside, step=3).step == 3


def test_a_job_computes_in_its_own_precision(workdir):
  """Weights are taken into a job with other matmuls and another recovery path."""
  fp8, int8 = config.Matmuls('block_fp8'), config.Matmuls('activations_int8')
  job = dataclasses.replace(MODEL, matmuls=fp8, recovery=int8)
  found = initial.load(workdir, job)
  assert found.model == job
  initial.check(found.model, job, str(workdir))


def test_latest_phase_counts(workdir, trained, tmp_path):
  """RL's policy is the run's as soon as it has a checkpoint, and not before."""
  run = tmp_path / 'run'
  shutil.copytree(workdir, run)
  (run / 'rl').mkdir()
  assert policy.find(run) == str(run / 'sft')
  save(run / 'rl', trained, 1)
  assert policy.find(run) == str(run / 'rl')
  assert policy.load(run).step == 1


def test_missing(workdir, tmp_path):
  """The error names the path that was looked at."""
  for path in (tmp_path, tmp_path / 'gone'):
    with pytest.raises(MissingCheckpoint, match=str(path)):
      policy.load(path)
  with pytest.raises(MissingCheckpoint, match=r'step 7.*\[3, 4\]'):
    policy.load(workdir, step=7)


def test_no_policy(workdir, trained, tmp_path):
  """A checkpoint without a model, or with an unknown model, is rejected by name."""
  tokens = (workdir / 'tokenizer.json').read_bytes()
  save(tmp_path / 'a', trained, 1, host={'other': 1}, tokens=tokens)
  with pytest.raises(CheckpointMismatch, match=f'{tmp_path}/a/1 contains no policy'):
    policy.load(tmp_path / 'a')
  newer = {'model': {**policy.host(MODEL)['model'], 'depth_scaling': True}}
  save(tmp_path / 'b', trained, 1, host=newer, tokens=tokens)
  with pytest.raises(CheckpointMismatch, match='depth_scaling'):
    policy.load(tmp_path / 'b')
