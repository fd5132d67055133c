"""Jobs that start from given weights: of a run, or in the released format."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from m2jax.checkpoint import huggingface, policy
from m2jax.observe import metrics as metrics_lib
from tests.experiments import conftest

EIGHT = ['--config.mesh.fsdp=4', '--config.mesh.expert=2']
ONE = ['--config.mesh.expert=1']
LONG = ('engine.context_tokens=1024', 'engine.contexts=(1024,)', 'sft.row_tokens=1024')
LONG += ('sft.tokens_per_step=2048', 'rl.learner.row_tokens=1024')


@pytest.fixture(scope='module')
def released(tmp_path_factory, pretrained):
  """The pre-trained weights as a released model."""
  path = tmp_path_factory.mktemp('released') / 'model'
  convert(pretrained[0], path)
  return path


def convert(checkpoint, path):
  flags = [f'--checkpoint={checkpoint}', f'--huggingface={path}', '--dtype=float32']
  conftest.run_module('experiments.convert', *flags)


def losses(start, workdir, mesh, flags):
  """Of two steps from `start`."""
  flags = [f'--workdir={workdir}', f'--config.init_from={start}', *mesh, *flags]
  settings = ('loop.steps=2', 'loop.log_every=1')
  flags += [f'--config.pretrain.{setting}' for setting in settings]
  conftest.run('pretrain', *flags, variant=':smoke')
  return [r['loss'] for r in metrics_lib.read(workdir, 'pretrain')]


@pytest.mark.long
def test_released_weights_are_trained_on_eight_devices(
  tmp_path, pretrained, released, texts
):
  """The losses are those of the run's own checkpoint on one device, before a step and
  after it, and what was trained is exported again without a change."""
  flags = [*conftest.text_flags(texts), '--config.pretrain.stages=((64,8,0),)']
  mesh = losses(released, tmp_path / 'mesh', EIGHT, flags)
  alone = losses(pretrained[0], tmp_path / 'alone', ONE, flags)
  assert len(mesh) == 2 and mesh == pytest.approx(alone, rel=2e-4)
  convert(tmp_path / 'mesh', tmp_path / 'again')
  model, variables = huggingface.load(tmp_path / 'again')
  trained = policy.load(tmp_path / 'mesh')
  before = policy.load(pretrained[0]).variables
  assert model.num_mtp_modules == trained.model.num_mtp_modules
  changed = 0
  for (path, leaf), other, old in zip(
    jax.tree.leaves_with_path(variables),
    jax.tree.leaves(trained.variables),
    jax.tree.leaves(before),
    strict=True,
  ):
    np.testing.assert_array_equal(leaf, other, err_msg=str(path))
    changed += not np.array_equal(leaf, old)
  assert changed > 10


@pytest.mark.thorough
def test_the_main_job_starts_from_released_weights(tmp_path, released):
  """On eight devices, to its end: SFT at a rate of 0 saves them with their tokenizer,
  and what RL made of them is exported."""
  flags = [f'--workdir={tmp_path / "run"}', f'--config.init_from={released}', *EIGHT]
  flags += [*conftest.ENGINE, '--config.episodes.backend=rlimit_only']
  # The tokenizer is of other text: many tokens a demonstration.
  flags += [f'--config.{field}' for field in LONG]
  flags += [f'--config.model.{field}' for field in conftest.SMALL]
  # SFT that changes nothing
  flags += ['--config.sft.optimizer.adam.learning_rate=0.0', '--config.rl.steps=1']
  flags += ['--config.sft.optimizer.weight_decay=0.0']
  flags += [f'--config.sft.optimizer.by_kind.{k}=adam' for k in ('matrix', 'expert')]
  flags += ['--config.sft.step.bias_update_rate=0.0']
  conftest.run('forge', *flags, variant=':smoke')
  _, start = huggingface.load(released)
  tuned = policy.load(tmp_path / 'run' / 'sft')
  jax.tree.map(np.testing.assert_array_equal, tuned.variables, start)
  assert tuned.tokenizer == (released / 'tokenizer.json').read_bytes()
  convert(tmp_path / 'run', tmp_path / 'exported')
  _, again = huggingface.load(tmp_path / 'exported')
  trained = policy.load(tmp_path / 'run' / 'rl')
  jax.tree.map(np.testing.assert_array_equal, again, trained.variables)
