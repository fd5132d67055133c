"""Commands and manifests are what the tools they are for accept, and say what is meant.

The authorities are recorded by tests/launch/record.py: the flags of gcloud, xpk and
kubectl, and the JobSets that xpk makes.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import subprocess
import types
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import config, jobset, options, project, tpu_vm, xpk
from launch.config import Command, LaunchError, Role
from launch.topology import parse
from tests.launch.record import RECORDED

_RECORDED = json.loads(RECORDED.read_text())
_ROOT = Path(config.__file__).parent.parent


def a_launch(*roles: Role, **changes) -> config.Launch:
  return config.Launch(
    **{
      'name': 'first',
      'roles': roles or (a_role(),),
      'project': 'p',
      'zone': 'us-east5-a',
      'cluster': 'c',
      'image': 'us-east5-docker.pkg.dev/p/m2jax/m2jax:1',
      'bucket': 'gs://b',
      'storage': 'disk',
      'runtime_version': 'v',
      **changes,
    }
  )


def a_role(name='trainer', where='v5p:2x2x1', job='pretrain', replicas=1, args=()):
  slice_ = parse(where) if where else None
  hosts = slice_.hosts if slice_ else 1
  argv = config.job(job, f'/workdir/first/{name}', args, hosts)
  return Role(name, argv, slice_, replicas)


GANG = (
  a_role('trainer', 'v5p:4x4x4'),
  a_role('rollout', 'v5p:2x2x1', 'serve', replicas=2),
  a_role('gateway', None, 'serve'),
)


@pytest.mark.parametrize('room', [project, xpk, jobset, tpu_vm])
@pytest.mark.parametrize(
  'changes', [{}, {'spot': True}, {'queued': False}, {'reservation': 'r'}]
)
def test_every_flag_is_one_that_the_tool_has(room, changes):
  """A misspelt flag would be found out only by a person with a project and quota."""
  launch, checked = a_launch(**changes), 0
  for command in [c for step in room.STEPS.values() for c in step(launch)]:
    text = ' '.join(command.argv)
    names = [name for name in _RECORDED['flags'] if text.startswith(name + ' ')]
    if command.argv[0] in ('docker', 'git'):
      continue
    assert len(names) == 1, f'{text} is not recorded'
    used = {a.partition('=')[0] for a in command.argv if a.startswith('--')}
    assert used <= set(_RECORDED['flags'][names[0]]), text
    checked += 1
  assert checked or room is project


@pytest.mark.parametrize('shape', ['2x2x1', '4x4x4'])
def test_jobset_asks_for_tpus_as_xpk_does(shape):
  """Selectors, limits, toleration, pods per slice, exclusive node pool."""
  theirs = _RECORDED['jobsets'][shape]
  ours = jobset.manifest(a_launch(a_role(where=f'v5p:{shape}')))
  assert (ours['apiVersion'], ours['kind']) == (theirs['apiVersion'], theirs['kind'])
  [their_job], [our_job] = (m['spec']['replicatedJobs'] for m in (theirs, ours))
  # xpk's is on the whole set, ours on each job with TPUs: a gang has jobs without.
  annotations = our_job['template']['metadata']['annotations']
  assert annotations == theirs['metadata']['annotations']
  their_job, our_job = their_job['template']['spec'], our_job['template']['spec']
  for field in ('parallelism', 'completions', 'backoffLimit'):
    assert our_job[field] == their_job[field], field
  their_pod, our_pod = (j['template']['spec'] for j in (their_job, our_job))
  for field in ('nodeSelector', 'tolerations', 'restartPolicy'):
    assert our_pod[field] == their_pod[field], field
  limits = [p['containers'][0]['resources'] for p in (our_pod, their_pod)]
  assert limits[0] == limits[1] == {'limits': {'google.com/tpu': 4}}


def test_jobset_of_a_gang_fits_the_api():
  """Every field is one of JobSet's, Job's or Pod's: the API server drops others."""
  models = pytest.importorskip('kubeflow_trainer_api.models')
  manifest = jobset.manifest(a_launch(*GANG, queue='q', max_restarts=3))
  parsed = models.JobsetV1alpha2JobSet.from_dict(manifest)
  assert parsed.to_dict() == manifest


def test_a_gang_is_one_job_per_replica():
  """Replicas are programs of their own; only roles with TPUs ask for TPUs."""
  jobs = {
    job['name']: job['template']
    for job in jobset.manifest(a_launch(*GANG))['spec']['replicatedJobs']
  }
  assert list(jobs) == ['trainer', 'rollout-0', 'rollout-1', 'gateway']
  assert [j['spec']['completions'] for j in jobs.values()] == [16, 1, 1, 1]
  [container] = jobs['gateway']['spec']['template']['spec']['containers']
  assert 'resources' not in container and 'metadata' not in jobs['gateway']
  with pytest.raises(LaunchError, match='gateway has no TPUs'):
    xpk.run(a_launch(*GANG))
  with pytest.raises(LaunchError, match='gateway has no TPUs'):
    tpu_vm.run(a_launch(*GANG))
  nodes = [c.argv[5] for c in tpu_vm.create(a_launch(*GANG[:2]))]
  assert nodes == ['first-trainer', 'first-rollout-0', 'first-rollout-1']
  assert all('--worker=all' in c.argv for c in tpu_vm.run(a_launch(*GANG[:2])))


def test_the_coordinator_is_the_one_jax_would_find():
  """JAX_COORDINATOR_ADDRESS is host 0 of the replica, by JAX's own rule for JobSets."""
  pytest.importorskip('jax')
  from jax._src.clusters import cloud_tpu_cluster, k8s_cluster

  assert str(jobset.COORDINATOR_PORT) == cloud_tpu_cluster.coordinator_port
  launch = a_launch(*GANG)
  for job in jobset.manifest(launch)['spec']['replicatedJobs'][:3]:
    [container] = job['template']['spec']['template']['spec']['containers']
    [variable] = container['env']
    assert variable['name'] == 'JAX_COORDINATOR_ADDRESS'
    labels = {'jobset.sigs.k8s.io/jobset-name': launch.name}
    named = types.SimpleNamespace(name=f'{launch.name}-{job["name"]}-0', labels=labels)
    found = types.SimpleNamespace(kind='Job', metadata=named)
    cluster = k8s_cluster.K8sCluster
    is_found = mock.Mock(return_value=found)
    with mock.patch.multiple(
      cluster, _controller=is_found, _job=is_found, _pod=is_found
    ):
      theirs = cluster.get_coordinator_address(None, str(jobset.COORDINATOR_PORT))
    assert variable['value'] == theirs


_ARGS = st.text(st.characters(exclude_characters='\n\0', codec='utf-8'), max_size=20)


@given(st.lists(_ARGS, min_size=1, max_size=5))
def test_arguments_arrive_as_they_were_given(args):
  """Quotes, dollars and blanks survive the shell, ssh, xpk's bash and Kubernetes."""
  found = subprocess.run(
    ['bash', '-c', config.shell(Command(('printf', '%s\\0', *args)))],
    capture_output=True,
    check=True,
  )
  assert found.stdout.decode().split('\0')[:-1] == args
  launch = a_launch(Role('trainer', ('run', *args), parse('v5p-8')))
  [command] = xpk.run(launch)
  assert shlex.split(command.argv[-1].removeprefix('--command=')) == ['run', *args]
  assert shlex.join(['run', *args]) in tpu_vm.run(launch)[0].argv[-1]
  [job] = jobset.manifest(launch)['spec']['replicatedJobs']
  [container] = job['template']['spec']['template']['spec']['containers']
  # As Kubernetes reads it: $$ is one dollar, $(NAME) a variable.
  read = [
    re.sub(r'\$\$|\$\((\w+)\)', lambda m: '$' if m[0] == '$$' else 'EXPANDED', arg)
    for arg in container['command']
  ]
  assert read == ['run', *args]


@pytest.mark.parametrize(
  ('role', 'target', 'message'),
  [
    (a_role(where='v5p:4x4x4', job='convert'), 'jobset', 'runs as a single process'),
    (
      Role('r', config.job('pretrain', '/workdir/r'), parse('v5p:4x4x4')),
      'jobset',
      'needs --distributed',
    ),
    (a_role(where='v5p:4x4x4'), 'jobset', None),
    (a_role(where='v5p:4x4x4', args=['--distributed']), 'jobset', None),
    (a_role(where='v5p:4x4x4'), 'tpu_vm', 'one workdir'),
    (a_role(job='rollout'), 'jobset', 'is not a job'),
    (a_role(job='serve', replicas=2), 'jobset', 'only one process may use'),
    (Role('r', config.job('sft', 'gs://b/x')), 'jobset', 'refuses --workdir=gs://b/x'),
    (Role('r', config.job('sft', 'gs://b/x')), 'tpu_vm', 'refuses --workdir=gs://b/x'),
    (Role('r', config.job('sft', 'workdir/x')), 'xpk', "container's disk"),
    (Role('r', config.job('sft', 'workdir/x')), 'tpu_vm', None),
    (a_role(), 'xpk', None),
    (Role('mine', ('./mine', '--workdir=gs://b/x')), 'xpk', None),
  ],
)
def test_what_todays_jobs_would_do_wrong_is_told(role, target, message):
  """A launch that cannot work is rejected before it allocates a slice."""
  reasons = config.unmet(a_launch(role), target)
  assert [message in reason for reason in reasons] == [True] * bool(message), reasons
  if message:
    with pytest.raises(LaunchError, match='not run'):
      config.check(a_launch(role), target)


def test_the_jobs_are_still_as_this_room_takes_them():
  """Fails when a job learns of many hosts, or when the roles of forge change: then let
  it be launched so. That jobs refuse URLs is tests/experiments/test_stops.py."""
  sources = [*_ROOT.glob('experiments/*.py'), *_ROOT.glob('m2jax*/**/*.py')]
  assert len(sources) > 50
  several = [p.stem for p in sources if 'common.join_processes()' in p.read_text()]
  assert sorted(several) == sorted(config.MULTI_HOST_JOBS)
  job = (_ROOT / 'experiments' / 'forge.py').read_text()
  assert str(('all', *config.FORGE_ROLES)) in job


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'name': 'Run_1'}, 'lower-case'),
    ({'name': 'a' * 35}, 'longer than the 40'),
    ({'zone': 'us-east5'}, 'us-east5-a'),
    ({'bucket': 'b'}, 'gs://NAME'),
    ({'project': ''}, 'project is missing'),
    ({'roles': (a_role(), a_role())}, 'with distinct names'),
    ({'spot': True, 'reservation': 'r'}, 'at most one'),
  ],
)
def test_bad_settings_name_the_field(changes, message):
  """Found here, not by a cloud's error an hour later."""
  with pytest.raises(LaunchError, match=message):
    a_launch(**changes)


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: jobset.run(a_launch(image='')), 'jobset needs image'),
    (lambda: xpk.run(a_launch(cluster='')), 'xpk needs cluster'),
    (lambda: tpu_vm.create(a_launch(runtime_version='')), 'needs runtime_version'),
    (lambda: tpu_vm.run(a_launch(max_restarts=1)), 'do not restart'),
    (lambda: project.setup(a_launch(image='m2jax')), 'docker.pkg.dev'),
    (lambda: xpk.cluster(a_launch(*GANG)), 'one kind of slice'),
    (lambda: Role('r', ('a\nb',)), 'line break'),
    (lambda: Role('r', ('a',), None, 0), 'replicas=0'),
    (lambda: options.role('trainer v5p:4x4x5 sft', '/w'), 'role trainer: v5p has no'),
    (lambda: options.role('trainer cpu', '/w'), 'must be .NAME TOPOLOGY'),
  ],
)
def test_what_a_target_cannot_do_is_refused(call, message):
  """Nothing that was asked for is left out of a command without a word."""
  with pytest.raises(LaunchError, match=message):
    call()


@pytest.mark.parametrize('job', sorted(config.MULTI_HOST_JOBS))
@pytest.mark.parametrize('room', [xpk, jobset, tpu_vm])
def test_every_host_of_a_slice_joins_the_job(room, job):
  """A slice of many hosts gets --distributed, once, from every builder; one host and
  a job of a single process do not. Without it each host would train alone."""

  def words(text):
    launch = a_launch(options.role(text, '/workdir/first'))
    found = [*room.run(launch)]
    return re.split(r'[\s\'"=]+', ' '.join([*found[-1].argv, found[-1].stdin]))

  assert words(f'trainer v5p:8x8x8 {job}').count('--distributed') == 1
  assert words(f'trainer v5p:8x8x8 {job} --distributed').count('--distributed') == 1
  assert '--distributed' not in words(f'trainer v5p:2x2x1 {job}')
  assert '--distributed' not in words('trainer v5p:8x8x8 convert')


POOL = "--config.roles.pool_url='postgresql://m2jax@db/m2jax'"
FORGE = (
  f'learner v5p:4x4x4 forge --role=learner {POOL}',
  f'engine v5p:2x2x1*2 forge --role=engine {POOL}',
  f'gateway cpu forge --role=gateway {POOL}',
  f'agents cpu*3 forge --role=agents {POOL}',
)


def test_the_roles_of_forge_meet():
  """One workdir, and every role has the addresses of the others: the flags that
  docs/roles.md says, which the config knows."""
  roles = [options.role(text, '/workdir/first') for text in FORGE]
  launch = a_launch(*roles)
  assert config.unmet(launch, 'jobset') == []
  jobs = {
    job['name']: job['template']['spec']['template']['spec']['containers'][0]['command']
    for job in jobset.manifest(launch)['spec']['replicatedJobs']
  }
  assert list(jobs) == [
    'learner', 'engine-0', 'engine-1', 'gateway', 'agents-0', 'agents-1', 'agents-2'
  ]  # fmt: skip
  assert all('--workdir=/workdir/first/forge' in argv for argv in jobs.values())
  engines = [f'http://first-engine-{i}-0-0.first:8101' for i in range(2)]
  forge = pytest.importorskip('configs.forge').get_config()
  common = pytest.importorskip('experiments.common')
  kind = pytest.importorskip('m2jax.forge.config').ForgeConfig
  for name, argv in jobs.items():
    given = [a.removeprefix('--config.') for a in argv if a.startswith('--config.')]
    for flag, value in (text.split('=', 1) for text in given):
      *path, leaf = flag.split('.')
      group = forge
      for part in path:
        group = group[part]
      group[leaf] = type(group[leaf])(_value(value))
    found = common.build(kind, forge)
    assert found.roles.engine_urls == tuple(engines)
    assert found.roles.gateway_url == 'http://first-gateway-0-0.first:8102'
    assert found.roles.pool_url == 'postgresql://m2jax@db/m2jax'
    if name.startswith('engine'):
      assert found.roles.engine == int(name[-1])
      assert found.roles.engine_server.host == '0.0.0.0'
    if name == 'gateway':
      assert found.gateway.host == '0.0.0.0'


def _value(text):
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):
    return text


@pytest.mark.parametrize(
  ('change', 'target', 'message'),
  [
    (lambda roles: roles[1:], 'jobset', 'exactly one learner, not 0'),
    (lambda roles: roles[:-1], 'jobset', 'at least one agents, not 0'),
    (lambda roles: [r.replace('*2', '*0') for r in roles], 'jobset', 'replicas=0'),
    (lambda roles: [r.replace(POOL, '') for r in roles], 'jobset', 'SQLite is for one'),
    (lambda roles: [*roles, 'x cpu forge --role=y'], 'jobset', 'has no --role=y'),
    (lambda roles: [roles[0] + ' --workdir=/x', *roles[1:]], 'jobset', 'one --workdir'),
    (lambda roles: roles[::-1], 'jobset', 'has to be the learner'),
    (lambda roles: roles, 'xpk', 'use --target=jobset'),
    (lambda roles: roles, 'tpu_vm', 'use --target=jobset'),
  ],
)
def test_roles_that_would_not_meet_are_refused(change, target, message):
  """Each would wait a day for the others."""
  with pytest.raises(LaunchError, match=message):
    roles = [options.role(text, '/workdir/first') for text in change(list(FORGE))]
    config.check(a_launch(*roles), target)


def test_time_to_save():
  """SIGTERM makes a job save: its pods get the time, and are then started again."""
  launch = a_launch(grace_s=900, max_restarts=2)
  [job] = jobset.manifest(launch)['spec']['replicatedJobs']
  assert (
    job['template']['spec']['template']['spec']['terminationGracePeriodSeconds'] == 900
  )
  [command] = xpk.run(launch)
  assert '--termination-grace-period-seconds=900' in command.argv
  assert '--restart-on-exit-codes=1' in command.argv


def test_gang_from_flags():
  """--role reads name, slice, replicas, job and its flags."""
  role = options.role("rollout v5p-8*2 serve '--config.x=a b' --config=c.py", '/w')
  assert (role.name, str(role.slice), role.replicas) == ('rollout', 'v5p:2x2x1', 2)
  argv = 'python -m experiments.serve --workdir=/w/rollout'.split()
  assert role.argv == (*argv, '--config.x=a b', '--config=c.py')
  assert dataclasses.replace(role, slice=None).hosts == 1
