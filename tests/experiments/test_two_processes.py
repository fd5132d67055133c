"""The jobs that train, as two processes: what one process learns, and one clean end."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from m2jax.checkpoint import policy
from m2jax.observe import metrics as metrics_lib
from tests import processes as processes_lib
from tests.experiments import conftest


def finish(children):
  """(exit code, standard output, standard error) of each."""
  ended = processes_lib.finish(children, 600)
  return [(child.returncode, *out) for child, out in zip(children, ended, strict=True)]


def same(workdir, reference):
  """Compares the last weights of two runs, in float32."""
  found, want = policy.load(workdir), policy.load(reference)
  assert found.step == want.step and found.model == want.model
  for a, b in zip(
    *map(jax.tree.leaves, (found.variables, want.variables)), strict=True
  ):
    assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)


@pytest.mark.long
def test_sft(tmp_path, chats):
  """The weights of one process; a limit of seconds ends it at one step, though the
  processes have clocks of their own."""
  one = '--config.mesh.data=1'
  tune = [f'--config.demonstrations={chats}', *conftest.SFT]
  tune += [f'--config.model.{field}' for field in conftest.SMALL]
  limit = ['--config.sft.loop.seconds=0.001', '--config.sft.loop.log_every=3']
  both = conftest.two(
    'sft', f'--workdir={tmp_path}/sft', *tune, *limit, one, variant=':smoke'
  )
  for code, out, err in finish(both):
    assert code == 0 and 'after 3 steps' in out, err[-3000:]
  steps = '--config.sft.loop.steps=3'
  alone = f'--workdir={tmp_path}/sft_alone'
  conftest.run('sft', alone, *tune, steps, one, variant=':smoke')
  same(tmp_path / 'sft', tmp_path / 'sft_alone')
  (last,), (want,) = (
    metrics_lib.read(tmp_path / run, 'sft')[-1:] for run in ('sft', 'sft_alone')
  )
  assert last['loss'] == pytest.approx(want['loss'], rel=1e-4)
  assert last['max_violation'] == pytest.approx(want['max_violation'], rel=1e-4)


@pytest.mark.thorough
def test_expansion(tmp_path, pretrained, texts):
  """The weights of one process."""
  expand = [f'--config.init_from={pretrained[0]}', *conftest.text_flags(texts)]
  expand.append('--config.expand.joint.loop.seconds=0')
  expand += ['--config.expand.frozen.loop.seconds=0', '--config.mesh.data=1']
  both = conftest.two(
    'expand_mtp', f'--workdir={tmp_path}/expand', *expand, variant=':smoke'
  )
  for code, out, err in finish(both):
    assert code == 0 and '3 MTP modules' in out, err[-3000:]
  alone = f'--workdir={tmp_path}/expand_alone'
  conftest.run('expand_mtp', alone, *expand, variant=':smoke')
  same(tmp_path / 'expand', tmp_path / 'expand_alone')


@pytest.mark.long
def test_forge(tmp_path):
  """The main job to its end, over fsdp and tensor: process 0 alone has the pool and the
  evaluations. Bad input of one process ends both with a line each."""
  flags = [f'--workdir={tmp_path}/run', *conftest.ENGINE]
  flags += [f'--config.model.{field}' for field in conftest.SMALL]
  flags += ['--config.episodes.backend=rlimit_only', '--config.eval_tasks=4']
  flags += ['--config.mesh.data=1', '--config.mesh.fsdp=2', '--config.mesh.tensor=2']
  flags += ['--config.model.num_kv_heads=2', '--config.rl.refill_factor=1']
  first, second = finish(conftest.two('forge', *flags, variant=':smoke', devices=2))
  assert first[0] == 0 and 'after RL' in first[1], first[2][-3000:]
  assert second[0] == 0 and 'after RL' not in second[1], second[2][-3000:]
  assert [r['step'] for r in metrics_lib.read(tmp_path / 'run', 'rl')] == [1, 2, 3]
  assert policy.load(tmp_path / 'run').directory.endswith('rl')
  first, second = finish(
    conftest.two('forge', *flags, '--config.seed=1', variant=':smoke', devices=2)
  )
  assert first[0] == 2 and 'other settings (seed' in first[2]
  assert second[0] == 2 and 'error: process 0 stopped' in second[2]
