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
  """Two devices of a process, and two processes, train what one device trains, from
  random weights and a tokenizer of the chats. A limit of seconds ends both processes at
  one step, though they have clocks of their own; a second start of what is done, on
  another mesh, trains nothing."""
  tune = [f'--config.demonstrations={chats}', *conftest.SFT]
  tune += [f'--config.model.{field}' for field in conftest.SMALL]
  every = ('checkpoint_every', 'keep_every_steps')
  tune += [f'--config.sft.loop.{name}=2' for name in every]
  tune += [f'--config.sft.optimizer.by_kind.{k}=adam' for k in ('matrix', 'expert')]

  def one(name, devices):
    flags = [f'--workdir={tmp_path / name}', f'--config.mesh.expert={devices}']
    return conftest.run('sft', *flags, *tune, variant=':smoke')

  def losses(name):
    records = metrics_lib.read(tmp_path / name, 'sft')
    return {r['step']: [r['loss'], r['max_violation']] for r in records}

  one('alone', 1)
  first = one('mesh', 2)
  limit = ['--config.sft.loop.seconds=0.001']
  limit += [f'--workdir={tmp_path / "both"}', '--config.mesh.expert=1']
  for code, out, err in finish(conftest.two('sft', *tune, *limit, variant=':smoke')):
    assert code == 0 and 'after 2 steps' in out, err[-3000:]
  same(tmp_path / 'both', tmp_path / 'alone', 2)
  want, mesh = losses('alone'), losses('mesh')
  assert list(want) == list(mesh) == [1, 2, 3, 4, 5, 6]
  for found in (mesh, losses('both')):
    for step, figures in found.items():
      assert figures == pytest.approx(want[step], rel=1e-4)
  tokenizer = policy.load(tmp_path / 'mesh').load_tokenizer()
  assert len(tokenizer.encode('How many lines has')) <= 5
  assert first.splitlines()[0] == one('mesh', 1).splitlines()[0]
  assert losses('mesh') == mesh


@pytest.mark.thorough
def test_expansion(tmp_path, pretrained, texts):
  """The weights of one process."""
  expand = [f'--config.init_from={pretrained[0]}', *conftest.text_flags(texts)]
  expand.append('--config.expand.joint.loop.seconds=0')
  expand += ['--config.expand.frozen.loop.seconds=0', '--config.mesh.expert=1']
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
  flags += ['--config.mesh.fsdp=2', '--config.mesh.tensor=2']
  flags += ['--config.model.num_kv_heads=2', '--config.rl.refill_factor=1']
  first, second = finish(conftest.two('forge', *flags, variant=':smoke', devices=2))
  both = '\n'.join(out[-3000:] for _, *texts in (first, second) for out in texts)
  assert first[0] == 0 and 'after RL' in first[1], both
  assert second[0] == 0 and 'after RL' not in second[1], second[2][-3000:]
  assert [r['step'] for r in metrics_lib.read(tmp_path / 'run', 'rl')] == [1, 2, 3]
  assert policy.load(tmp_path / 'run').directory.endswith('rl')
  first, second = finish(
    conftest.two('forge', *flags, '--config.seed=1', variant=':smoke', devices=2)
  )
  assert first[0] == 2 and 'other settings (seed' in first[2]
  assert second[0] == 2 and 'error: process 0 stopped' in second[2]
