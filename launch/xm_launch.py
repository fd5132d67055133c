"""XManager: launches a gang, and refuses what its Kubernetes executor would drop.

  python -m launch.xm_launch --via=xpk --flagfile=launch/example.flags

Read in xmanager 0.8.5.post1, which is the extra `launch`:

  xmanager/cloud/kubernetes.py  `requirements_from_executor` passes over TPU types;
    `node_selector_from_executor` knows GPUs only; `Client.launch` makes one plain
    batch/v1 Job per xm.Job, without parallelism, completions, volumes, labels of our
    own or retries (`backoff_limit=0`), in the namespace `default` of kubectl's
    current context. Of `xm.JobRequirements` it reads `task_requirements` and, for an
    obsolete annotation, `accelerator`; topology, replicas, location, service tier,
    slices and architecture are not looked at. `tpu_capability` counts only with TPUs.
  xmanager/xm_local/executors.py  `Local` ignores every requirement but `local_gpu`.
  xmanager/cloud/vertex.py  knows TPU v2 and v3.

So TPUs are had by running the command of another target on this machine, as an
`xm.Binary` under `xm_local.Local`; `--via=kubernetes` is for roles without TPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launch import config, options
from launch.config import Command, Launch, LaunchError


def refused(launch: Launch) -> list[str]:
  """Parts of a launch for which XManager's Kubernetes executor has no place."""
  reasons = []
  for role in launch.roles:
    if role.slice:
      reasons.append(
        f'role {role.name}: no TPUs are requested, so {role.slice} would be lost, '
        f'which has {role.hosts} host{"s" * (role.hosts > 1)}'
      )
    if role.replicas > 1:
      reasons.append(f'role {role.name}: starts 1 replica, not {role.replicas}')
  fields = {
    'cluster': "takes the cluster of kubectl's current context",
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
  """What an `xm_local.Kubernetes` asks for and its launcher does not pass on."""
  needs, reasons = executor.requirements, []
  for resource in needs.task_requirements:
    if str(resource).startswith('TPU_'):
      reasons.append(f'{resource}={needs.topology.name}: no limit and no node selector')
    elif str(resource) in ('LOCAL_GPU', 'EPHEMERAL_STORAGE'):
      reasons.append(f'{resource}: becomes a limit that Kubernetes does not have')
  # The default tier is PROD. The architecture follows from an accelerator.
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
    f'{name}={value}: not read' for name, value in ignored.items() if value is not None
  ]


def check(launch: Launch, executors: Mapping[str, Any] | None = None) -> None:
  """Raises LaunchError if the Kubernetes executor would drop part; names all parts."""
  reasons = refused(launch) + [
    f'role {name}: {reason}'
    for name, executor in (executors or {}).items()
    for reason in dropped(executor)
  ]
  if reasons:
    raise LaunchError(
      "XManager's Kubernetes executor (xmanager/cloud/kubernetes.py) would drop, "
      'without a word:\n  ' + '\n  '.join(reasons) + '\ntake --via=xpk or --via=jobset'
    )


def add(experiment, launch: Launch) -> None:
  """Adds the gang to an experiment as jobs of XManager's Kubernetes executor.

  Raises:
    LaunchError: the executor would drop part of it.
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
  """Adds `launch.print --run` of another target, as a program on this machine."""
  from xmanager import xm, xm_local

  spec = xm.Binary(path=sys.executable)
  [program] = experiment.package([xm.Packageable(spec, xm_local.Local.Spec())])
  argv = ['-m', 'launch.print', f'--target={via}', '--step=run', '--run', *args]
  experiment.add(xm.Job(program, xm_local.Local(), args=argv))


def run(launch: Launch) -> list[Command]:
  """What starts this script."""
  del launch  # the flags that made it are passed on
  via = options.VIA.value
  if via is None:
    raise LaunchError('--target=xm needs --via: what XManager is to start')
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
