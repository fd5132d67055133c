"""Several processes are one: jax.distributed over gloo, checkpoint, another mesh."""

from __future__ import annotations

import pytest

from m2jax.observe import metrics
from tests import processes as processes_lib


def train(directory, mesh, *, steps, devices, processes=1):
  """Losses of each process's run from where `directory` stands to `steps`."""
  fields = dict(directory=str(directory), mesh=mesh, steps=steps, devices=devices)
  return processes_lib.together('tests.sharding.distributed_worker', processes, fields)


@pytest.mark.thorough
def test_two_processes_train_and_one_goes_on(tmp_path, monkeypatch):
  """Two processes of two devices train, save together, and both see the losses of one
  device; from their checkpoint one process of four devices goes on over another mesh,
  and two processes from its checkpoint over a third."""
  alone = train(tmp_path / 'alone', {}, steps=6, devices=1)[0]
  directory = tmp_path / 'run'
  cache = tmp_path / 'cache'
  with monkeypatch.context() as patch:
    patch.setenv('JAX_COMPILATION_CACHE_DIR', str(cache))
    patch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
    first = train(directory, dict(fsdp=2, tensor=2), steps=2, devices=2, processes=2)
  assert not list(cache.glob('*'))  # programs loaded from it mix up collectives
  assert first[0] == first[1]
  second = train(directory, dict(expert=4), steps=4, devices=4)
  third = train(directory, dict(context=2, expert=2), steps=6, devices=2, processes=2)
  assert first[0] + second[0] + third[0] == pytest.approx(alone, rel=1e-4)


def pretrain(workdir, *flags, environment):
  """A process of the smallest pre-training job, started."""
  config = '--config=configs/pretrain.py:smoke'
  return processes_lib.start(
    'experiments.pretrain', config, f'--workdir={workdir}', *flags, **environment
  )


@pytest.mark.long
def test_the_job_runs_as_two_processes(tmp_path):
  """Started alike on two hosts with one workdir, they train one model, with the losses
  of a single process. Where the mesh of the next stage has other devices they end with
  its name; a process of those devices goes on from their checkpoint. Bad input of one
  of the two ends both, rather than leave one waiting."""

  def both(*flags):
    port = processes_lib.free_port()
    children = [
      pretrain(
        tmp_path / 'run',
        *('--distributed', *flags),  # the mesh is all devices by default
        environment={
          'JAX_NUM_CPU_DEVICES': '1',
          'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
          'JAX_NUM_PROCESSES': '2',
          'JAX_PROCESS_ID': str(process),
        },
      )
      for process in range(2)
    ]
    ended = processes_lib.finish(children)
    return [
      (child.returncode, *out) for child, out in zip(children, ended, strict=True)
    ]

  flags = ('--config.pretrain.loop.seconds=0', '--config.pretrain.streams=1')
  stages = '((64, 2, 384), {"context": 64, "rows": 2, "mesh": {"fsdp": 1}})'
  for code, out, err in both(*flags, f'--config.pretrain.stages={stages}'):
    assert code == 0 and 'after 3 steps' in out, err[-3000:]
    assert 'stages[1].mesh has 1 devices, the job has 2: resume on 1' in err
  first, second = both(*flags, f'--config.pretrain.stages={stages}', '--config.seed=1')
  assert first[0] == 2 and 'other settings (seed' in first[2]
  assert second[0] and 'process 0 stopped' in second[2]
  for name in ('run', 'alone'):
    stages = '((64, 2, 384), (64, 2, 0))'
    child = pretrain(
      tmp_path / name, *flags, f'--config.pretrain.stages={stages}', environment={}
    )
    ((out, err),) = processes_lib.finish([child])
    assert child.returncode == 0 and 'after 6 steps' in out, err[-3000:]
  losses = [
    [r['loss'] for r in metrics.read(tmp_path / name, 'pretrain')]
    for name in ('run', 'run/process1', 'alone')
  ]
  assert len(losses[0]) == 6 and losses[0][:3] == losses[1]
  assert losses[0] == pytest.approx(losses[2], rel=1e-4)


@pytest.mark.thorough
def test_the_job_goes_on_on_another_mesh(tmp_path):
  """The pre-training job takes a mesh from its config; its run, finished on one, is the
  same run on others, which report the same held-out loss."""

  def report(*mesh):
    devices = {'JAX_NUM_CPU_DEVICES': '2'}
    child = pretrain(tmp_path / 'run', *mesh, environment=devices)
    ((out, err),) = processes_lib.finish([child])
    assert child.returncode == 0, err[-3000:]
    return out[out.index('held-out loss') :]  # after the live view

  first = report('--config.mesh.fsdp=2')
  assert 'after 6 steps' in first
  assert report('--config.mesh.expert=2') == report() == first
