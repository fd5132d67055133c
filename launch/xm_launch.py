"""Launches a gang by XManager; rejects what its Kubernetes executor would drop.

  python -m launch.xm_launch --via=xpk --flagfile=launch/example.flags

From the source of xmanager 0.8.5.post1, the extra `launch`:

  xmanager/cloud/kubernetes.py  `requirements_from_executor` ignores TPU types;
    `node_selector_from_executor` supports GPUs only; `Client.launch` creates a plain
    batch/v1 Job per xm.Job, without parallelism, completions, volumes, custom labels
    or retries (`backoff_limit=0`), in the namespace `default` of kubectl's
    current context. Of `xm.JobRequirements` it reads `task_requirements` and, for an
    obsolete annotation, `accelerator`; it ignores topology, replicas, location,
    service tier, slices and architecture. `tpu_capability` has an effect only with
    TPUs.
  xmanager/xm_local/executors.py  `Local` ignores every requirement but `local_gpu`.
  xmanager/cloud/vertex.py  supports TPU v2 and v3.

Roles with TPUs therefore run the command of another target on this machine, as an
`xm.Binary` under `xm_local.Local`; `--via=kubernetes` is for roles without TPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch import config, options
from launch.config import Command, Launch, LaunchError


def unsupported(launch: Launch) -> list[str]:
  """Parts of a launch that XManager's Kubernetes executor does not support."""
  reasons = []
  for role in launch.roles:
    if role.slice:
      reasons.append(
        f'role {role.name}: it requests no TPUs, so that {role.slice} with '
        f'{role.hosts} host{"s" * (role.hosts > 1)} would be dropped'
      )
    if role.replicas > 1:
      reasons.append(f'role {role.name}: it starts 1 replica, not {role.replicas}')
  fields = {
    'cluster': "uses the cluster of kubectl's current context",
    'storage': 'mounts nothing',
    'queue': 'sets no label for Kueue',
    'max_restarts': 'never restarts',
    'spot': 'selects no nodes',
    'reservation': 'selects no nodes',
  }
  return reasons + [
    f'{name}={value!r}: it {why}'
    for name, why in fields.items()
    if (value := getattr(launch, name))
  ]


def dropped(executor) -> list[str]:
  """Requirements of an `xm_local.Kubernetes` that its launcher ignores."""
  needs, reasons = executor.requirements, []
  for resource in needs.task_requirements:
    if str(resource).startswith('TPU_'):
      reasons.append(f'{resource}={needs.topology.name}: no limit and no node selector')
    elif str(resource) in ('LOCAL_GPU', 'EPHEMERAL_STORAGE'):
      reasons.append(f'{resource}: becomes a limit that Kubernetes does not support')
  # The default tier is PROD. An accelerator determines the architecture.
  tier = str(needs.service_tier).removeprefix('ServiceTier.')
  ignored = {
    'replicas': needs.replicas if needs.replicas != 1 else None,
    'num_slices': needs.num_slices if needs.num_slices != 1 else None,
    'location': needs.location,
    'service_tier': tier if tier != 'PROD' else None,
    'architecture': None if needs.accelerator else needs.architecture,
    'tpu_capability': executor.tpu_capability,
  }
  return reasons + [
    f'{name}={value}: ignored' for name, value in ignored.items() if value is not None
  ]


def check(launch: Launch, executors: Mapping[str, Any] | None = None) -> None:
  """Raises LaunchError that lists the parts the Kubernetes executor would drop."""
  reasons = unsupported(launch) + [
    f'role {name}: {reason}'
    for name, executor in (executors or {}).items()
    for reason in dropped(executor)
  ]
  if reasons:
    raise LaunchError(
      "XManager's Kubernetes executor (xmanager/cloud/kubernetes.py) would drop "
      'silently:\n  ' + '\n  '.join(reasons) + '\nuse --via=xpk or --via=jobset'
    )


def add(experiment, launch: Launch) -> None:
  """Adds the gang to an experiment as jobs of XManager's Kubernetes executor.

  Raises:
    LaunchError: the executor would drop a part of it.
  """
  from xmanager import xm, xm_local

  launch.need('XManager', 'image')
  executors = {role.name: xm_local.Kubernetes() for role in launch.roles}
  check(launch, executors)
  spec = xm.Container(image_path=launch.image)
  [image] = experiment.package([xm.Packageable(spec, xm_local.Kubernetes.Spec())])
  jobs = {
    role.name: xm.Job(image, executors[role.name], args=list(role.argv))
    for role in launch.roles
  }
  experiment.add(xm.JobGroup(**jobs))


def add_command(experiment, via: str, args: Sequence[str]) -> None:
  """Adds `launch.print --run` of another target as a program on this machine."""
  from xmanager import xm, xm_local

  spec = xm.Binary(path=sys.executable)
  [program] = experiment.package([xm.Packageable(spec, xm_local.Local.Spec())])
  argv = ['-m', 'launch.print', f'--target={via}', '--step=run', '--run', *args]
  experiment.add(xm.Job(program, xm_local.Local(), args=argv))


def run(launch: Launch) -> list[Command]:
  """The command that starts this script."""
  del launch  # its flags are passed on
  via = options.VIA.value
  if via is None:
    raise LaunchError('--target=xm needs --via, the target that XManager starts')
  return [
    Command(('python', '-m', 'launch.xm_launch', f'--via={via}', *options.given()))
  ]


def main(argv):
  del argv
  via = options.VIA.value
  try:
    launch = options.launch(via)
    if via == 'kubernetes':
      check(launch)
    config.check(launch, via)
    from xmanager import xm_local

    with xm_local.create_experiment(experiment_title=launch.name) as experiment:
      if via == 'kubernetes':
        add(experiment, launch)
      else:
        add_command(experiment, via, options.given())
  except LaunchError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)


STEPS = {'run': run}

if __name__ == '__main__':
  options.run(main, required='via')
