"""xpk: a GKE cluster with Kueue and JobSet, a shared disk, and a workload per replica.

Flags: xpk 1.16.0, parser/{cluster,storage,workload}.py. A device type is named by its
shape (`v5p-4x4x4`), because a number of TensorCores can mean several shapes.

A workload has one command, so a gang is one workload per replica, and they are not
scheduled together; use `jobset` for that. Roles without TPUs raise an error.
"""

from __future__ import annotations

import shlex

from launch.config import Command, Launch, LaunchError, Role
from launch.topology import GENERATION, Slice

_STORAGE_GB = 1024


def cluster(launch: Launch) -> list[Command]:
  """Creates a cluster with the slices of all roles."""
  slices = [role.slice for role in launch.roles if role.slice]
  if len(set(slices)) != 1:
    raise LaunchError(
      f'xpk creates a cluster with one kind of slice, the roles have '
      f'{len(set(slices))}: create it for one of them, and add node pools for others'
    )
  capacity = '--spot' if launch.spot else '--on-demand'
  if launch.reservation:
    capacity = f'--reservation={launch.reservation}'
  number = sum(role.replicas for role in launch.roles if role.slice)
  args = (_device(slices[0]), f'--num-slices={number}', capacity)
  filestore = ('--enable-gcpfilestore-csi-driver',) if launch.storage else ()
  return [_xpk(launch, 'cluster create', *args, *filestore)]


def storage(launch: Launch) -> list[Command]:
  """Creates a Filestore share that every pod of the cluster can mount."""
  launch.need('xpk storage', 'storage')
  args = (
    '--type=gcpfilestore',
    f'--size={_STORAGE_GB}',
    '--tier=BASIC_HDD',
    '--access-mode=ReadWriteMany',
    '--vol=default',
    f'--mount-point={launch.mount}',
    '--readonly=false',
    '--auto-mount=false',
  )
  return [_xpk(launch, f'storage create {launch.storage}', *args)]


def teardown(launch: Launch) -> list[Command]:
  """Deletes the share with all workdirs, and the cluster."""
  share = [_xpk(launch, f'storage delete {launch.storage}')] if launch.storage else []
  return [*share, _xpk(launch, 'cluster delete')]


def run(launch: Launch) -> list[Command]:
  """Creates one workload per replica of a role."""
  launch.need('xpk', 'image')
  return [_workload(launch, name, role) for name, role in launch.instances()]


def watch(launch: Launch) -> list[Command]:
  """Shows the state of the workloads."""
  return [_xpk(launch, 'workload list', f'--filter-by-job={launch.name}')]


def delete(launch: Launch) -> list[Command]:
  """Deletes the workloads."""
  return [
    _xpk(launch, 'workload delete', f'--workload={launch.name}-{name}')
    for name, _ in launch.instances()
  ]


def _workload(launch: Launch, name: str, role: Role) -> Command:
  if role.slice is None:
    raise LaunchError(
      f'role {role.name} has no TPUs, but an xpk workload needs them: use '
      '--target=jobset'
    )
  args = [
    f'--workload={launch.name}-{name}',
    _device(role.slice),
    '--num-slices=1',  # several would be one program
    f'--docker-image={launch.image}',
    f'--max-restarts={launch.max_restarts}',
    f'--termination-grace-period-seconds={launch.grace_s}',
  ]
  if launch.max_restarts:
    args.append('--restart-on-exit-codes=1')  # 42 and 127 to 255 are xpk's own
  if launch.storage:
    args.append(f'--storage={launch.storage}')
  args.append(f'--command={shlex.join(role.argv)}')
  return _xpk(launch, 'workload create', *args)


def _device(slice: Slice) -> str:
  return f'--tpu-type={GENERATION}-{slice.topology}'


def _xpk(launch: Launch, verb: str, *args: str) -> Command:
  launch.need('xpk', 'cluster')
  where = (
    f'--cluster={launch.cluster}',
    f'--project={launch.project}',
    f'--zone={launch.zone}',
  )
  return Command(('xpk', *verb.split(), *where, *args))


STEPS = {
  'cluster': cluster,
  'storage': storage,
  'run': run,
  'watch': watch,
  'delete': delete,
  'teardown': teardown,
}
