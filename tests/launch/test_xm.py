"""The XManager script: what it adds, and which settings it rejects."""

from __future__ import annotations

import importlib
import sys
from unittest import mock

import pytest

from launch import config, xm_launch
from launch.config import LaunchError, Role
from launch.topology import parse
from tests.launch import recorded_xmanager


@pytest.fixture(params=['recorded', 'real'])
def xmanager(request, monkeypatch):
  """Gives `xm`, `xm_local` and `xm_mock` by name."""
  if request.param == 'real':
    pytest.importorskip('xmanager')
  else:
    for name, module in recorded_xmanager.modules().items():
      monkeypatch.setitem(sys.modules, name, module)
  return lambda name: importlib.import_module(f'xmanager.{name}')


def a_launch(*roles, **changes):
  roles = roles or (Role('gateway', ('python', '-m', 'mine', '--flag=a b')),)
  return config.Launch('first', roles, 'p', 'us-east5-a', image='i', **changes)


def added(xmanager, add):
  """Jobs that are launched, and what was packaged for them."""
  kind = xmanager('xm_mock').MockExperiment
  with kind() as experiment:
    with mock.patch.object(kind, 'package', wraps=experiment.package) as package:
      add(experiment)
  return experiment.launched_jobs, package.call_args.args[0]


def args_of(job) -> list[str]:
  return job.args if isinstance(job.args, list) else job.args.to_list(str)


def test_a_gang_without_tpus_becomes_a_job_group(xmanager):
  """One job per role on the image, with the role's command as its arguments."""
  second = Role('agents', ('python', '-m', 'other'))
  launch = a_launch(*a_launch().roles, second)
  jobs, [packaged] = added(xmanager, lambda e: xm_launch.add(e, launch))
  assert packaged.executable_spec.image_path == 'i'
  assert [args_of(job) for job in jobs] == [list(r.argv) for r in launch.roles]
  kubernetes = xmanager('xm_local').Kubernetes
  assert all(isinstance(job.executor, kubernetes) for job in jobs)


def test_tpus_come_by_another_targets_command(xmanager):
  """--via=xpk runs launch.print on this machine: a Binary under xm_local.Local."""
  add = lambda e: xm_launch.add_command(e, 'xpk', ['--name=first'])
  [job], [packaged] = added(xmanager, add)
  assert packaged.executable_spec.path == sys.executable
  assert args_of(job)[:3] == ['-m', 'launch.print', '--target=xpk']
  assert {'--run', '--name=first'} <= set(args_of(job))
  assert isinstance(job.executor, xmanager('xm_local').Local)


_TPUS = Role('trainer', ('run',), parse('v5p:4x4x4'), replicas=2)


@pytest.mark.parametrize(
  ('launch', 'messages'),
  [
    (a_launch(_TPUS), ('v5p:4x4x4', '16 hosts', '1 replica, not 2')),
    (a_launch(cluster='c', queue='q'), ("cluster='c'", "queue='q'")),
    (a_launch(storage='s', max_restarts=3), ("storage='s'", 'max_restarts=3')),
    (a_launch(spot=True), ('spot=True',)),
    (a_launch(reservation='r'), ("reservation='r'",)),
  ],
)
def test_what_has_no_place_is_refused(xmanager, launch, messages):
  """All of it at once, before anything is launched."""
  with xmanager('xm_mock').MockExperiment() as experiment:
    with pytest.raises(LaunchError) as error:
      xm_launch.add(experiment, launch)
  assert all(message in str(error.value) for message in messages), error.value
  assert not experiment.launched_jobs


def requirements(xm):
  """Requirements by what `dropped` calls them."""
  return {
    'TPU_V5P=4x4x4': xm.JobRequirements(tpu_v5p='4x4x4'),
    'replicas': xm.JobRequirements(cpu=1, replicas=3),
    'location': xm.JobRequirements(cpu=1, location='us-east5'),
    'service_tier': xm.JobRequirements(cpu=1, service_tier=xm.ServiceTier.BATCH),
    'architecture': xm.JobRequirements(cpu=1, architecture=xm.Architecture.ARM),
  }


def test_requirements_that_are_not_read_are_named(xmanager):
  """For those who give a role's executor requirements of their own."""
  xm, kubernetes = xmanager('xm'), xmanager('xm_local').Kubernetes
  for name, needs in requirements(xm).items():
    [reason] = xm_launch.dropped(kubernetes(requirements=needs))
    assert reason.startswith(name)
  assert not xm_launch.dropped(kubernetes(requirements=xm.JobRequirements(cpu=1)))
  assert not xm_launch.dropped(kubernetes())
  capability = kubernetes(tpu_capability='nightly')
  assert xm_launch.dropped(capability) == ['tpu_capability=nightly: ignored']


def test_xmanager_does_drop_them():
  """Fails when XManager learns to pass one on: then allow it."""
  pytest.importorskip('xmanager')
  from xmanager import xm, xm_local
  from xmanager.cloud import kubernetes
  from xmanager.xm_local import executables

  account = mock.Mock(value='default')
  image = executables.GoogleContainerRegistryImage('name', 'image')

  def job(needs):
    """The batch/v1 Job that is created for these requirements."""
    client = kubernetes.Client(mock.MagicMock())
    with (
      mock.patch.object(kubernetes.k8s_client, 'BatchV1Api') as api,
      mock.patch.object(kubernetes.xm_flags, 'K8S_SERVICE_ACCOUNT_NAME', account),
    ):
      executor = xm_local.Kubernetes(requirements=needs)
      client.launch(str, [xm.Job(image, executor, name='job')])
    return api.return_value.create_namespaced_job.call_args.kwargs['body']

  plain = job(xm.JobRequirements(cpu=1))
  asked = requirements(xm)
  tpu = job(asked.pop('TPU_V5P=4x4x4')).spec
  assert tpu.template.spec.containers[0].resources.limits == {}
  assert not tpu.template.spec.node_selector
  assert (tpu.parallelism, tpu.completions) == (None, None)
  for name, needs in asked.items():
    assert job(needs) == plain, name
  assert job(xm.JobRequirements(cpu=2)) != plain
