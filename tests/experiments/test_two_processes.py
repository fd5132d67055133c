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


def same(workdir, reference, step=None):
  """Compares weights of two runs, in float32."""
  found, want = policy.load(workdir, step), policy.load(reference, step)
  assert found.step == want.step and found.model == want.model
  for a, b in zip(
    *map(jax.tree.leaves, (found.variables, want.variables)), strict=True
  ):
    assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)


@pytest.mark.long
def test_sft(tmp_path, chats):
  """Two processes, then one on two devices, train what one device trains, from random
  weights and a tokenizer of the chats. A limit of seconds ends both processes at one
  step, though they have clocks of their own; a second start of what is done trains
  nothing."""
  tune = [f'--config.demonstrations={chats}', *conftest.SFT]
  tune += [f'--config.model.{field}' for field in conftest.SMALL]
  tune += ['--config.sft.loop.checkpoint_every=3']
  tune += [f'--config.sft.optimizer.by_kind.{k}=adam' for k in ('matrix', 'expert')]
  alone, run = tmp_path / 'alone', tmp_path / 'run'

  def one(workdir, devices):
    mesh = f'--config.mesh.data={devices}'
    return conftest.run('sft', f'--workdir={workdir}', *tune, mesh, variant=':smoke')

  first = one(alone, 1)
  limit = ['--config.sft.loop.seconds=0.001', '--config.sft.loop.log_every=3']
  limit.append('--config.mesh.data=1')  # so all processes are of fsdp
  both = conftest.two('sft', f'--workdir={run}', *tune, *limit, variant=':smoke')
  for code, out, err in finish(both):
    assert code == 0 and 'after 3 steps' in out, err[-3000:]
  same(run, alone, 3)
  assert 'after 6 steps' in one(run, 2)
  same(run, alone)
  found, want = (metrics_lib.read(workdir, 'sft') for workdir in (run, alone))
  assert [r['step'] for r in want] == [1, 2, 3, 4, 5, 6]
  of_step = {r['step']: r for r in want}
  assert {r['step'] for r in found} >= {3, 4, 5, 6}
  for record in found:
    for name in ('loss', 'max_violation'):
      assert record[name] == pytest.approx(of_step[record['step']][name], rel=1e-4)
  assert len(policy.load(alone).load_tokenizer().encode('How many lines has')) <= 5
  assert first.splitlines()[0] == one(alone, 1).splitlines()[0]
  assert len(metrics_lib.read(alone, 'sft')) == 6


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
