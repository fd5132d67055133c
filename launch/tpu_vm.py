"""TPU VMs over ssh: create, install, start, watch, save, delete.

Flags: gcloud 528.0.0, `gcloud compute tpus {tpu-vm,queued-resources} … --help`. Its
chip-based `--type` supports v2 to v4 only, so that a slice is named by its number of
TensorCores; other shapes raise an error.

Each replica of a role is a TPU VM; roles without TPUs raise an error. Commands run on
all hosts of a replica at once.
"""

from __future__ import annotations

import shlex

from launch.config import Command, Launch, LaunchError

_ARCHIVE = '/tmp/m2jax.tar.gz'
_DIRECTORY = 'm2jax'  # in the home directory of each host
_LOG = 'm2jax.log'


def versions(launch: Launch) -> list[Command]:
  """Lists the possible values of `runtime_version`."""
  where = (f'--zone={launch.zone}', f'--project={launch.project}')
  return [Command(('gcloud', 'compute', 'tpus', 'tpu-vm', 'versions', 'list', *where))]


def create(launch: Launch) -> list[Command]:
  """Requests the TPU VMs, by default as a queued resource."""
  launch.need('tpu_vm', 'runtime_version')
  reserved = ('--reserved',) if launch.reservation else ()
  flags = ('--spot',) if launch.spot else reserved
  commands = []
  for node, role in _nodes(launch):
    shape = f'--accelerator-type={role.slice.accelerator_type}'
    if launch.queued:
      version = f'--runtime-version={launch.runtime_version}'
      verb, args = 'queued-resources create', (f'--node-id={node}', shape, version)
    else:
      verb, args = 'tpu-vm create', (shape, f'--version={launch.runtime_version}')
    commands.append(_tpus(launch, verb, node, *args, *flags))
  return commands


def status(launch: Launch) -> list[Command]:
  """Shows the state: ACTIVE is ready for a queued resource, READY for a TPU VM."""
  verb = 'queued-resources describe' if launch.queued else 'tpu-vm describe'
  return [_tpus(launch, verb, node) for node, _ in _nodes(launch)]


def install(launch: Launch) -> list[Command]:
  """Uploads the last commit to the bucket and installs it on every host."""
  launch.need('tpu_vm', 'bucket')
  uploaded = f'{launch.bucket}/code/{launch.name}.tar.gz'
  script = (
    f'mkdir -p {_DIRECTORY} && cd {_DIRECTORY} && '
    f'gcloud storage cp {uploaded} {_ARCHIVE} && tar -xzf {_ARCHIVE} && '
    f'{launch.python} -m venv .venv && '
    ".venv/bin/pip install --quiet -e '.[tpu]' -c constraints.txt && "
    '.venv/bin/pip install --quiet --no-deps -e ./m2jax_pipelines'
  )
  return [
    Command(('git', 'archive', '--format=tar.gz', f'--output={_ARCHIVE}', 'HEAD')),
    Command(('gcloud', 'storage', 'cp', _ARCHIVE, uploaded)),
    *(_ssh(launch, node, script) for node, _ in _nodes(launch)),
  ]


def run(launch: Launch) -> list[Command]:
  """Starts the roles; they continue after ssh ends, and write to a log."""
  return [
    _ssh(
      launch,
      node,
      f'cd {_DIRECTORY} && . .venv/bin/activate && '
      f'(setsid nohup {shlex.join(role.argv)} >> {_LOG} 2>&1 < /dev/null &)',
    )
    for node, role in _nodes(launch)
  ]


def watch(launch: Launch) -> list[Command]:
  """Follows the log of the first role's first host."""
  node, _ = _nodes(launch)[0]
  return [_ssh(launch, node, f'tail -F {_DIRECTORY}/{_LOG}', worker='0')]


def save(launch: Launch) -> list[Command]:
  """Copies the output of the first host of each replica to the bucket."""
  launch.need('tpu_vm', 'bucket')
  return [
    _ssh(
      launch,
      node,
      f'cd {_DIRECTORY} && gcloud storage rsync --recursive workdir '
      f'{launch.bucket}/{node}',
      worker='0',
    )
    for node, _ in _nodes(launch)
  ]


def delete(launch: Launch) -> list[Command]:
  """Deletes the TPU VMs with their disks."""
  verb, flags = 'tpu-vm delete', ('--quiet',)
  if launch.queued:
    verb, flags = 'queued-resources delete', ('--force', '--quiet')
  return [_tpus(launch, verb, node, *flags) for node, _ in _nodes(launch)]


def _nodes(launch: Launch):
  """(name of the TPU VM, role) of each replica."""
  for role in launch.roles:
    if role.slice is None:
      raise LaunchError(
        f'role {role.name} has no TPUs: run it on any machine, or use --target=jobset'
      )
  if launch.max_restarts:
    raise LaunchError(
      f'max_restarts={launch.max_restarts}: TPU VMs do not restart commands; start '
      'it again by hand, and it resumes'
    )
  return [(f'{launch.name}-{name}', role) for name, role in launch.instances()]


def _ssh(launch: Launch, node: str, script: str, worker: str = 'all') -> Command:
  return _tpus(launch, 'tpu-vm ssh', node, f'--worker={worker}', f'--command={script}')


def _tpus(launch: Launch, verb: str, node: str, *args: str) -> Command:
  where = (f'--zone={launch.zone}', f'--project={launch.project}')
  return Command(('gcloud', 'compute', 'tpus', *verb.split(), node, *where, *args))


STEPS = {
  'versions': versions,
  'create': create,
  'status': status,
  'install': install,
  'run': run,
  'watch': watch,
  'save': save,
  'delete': delete,
}
