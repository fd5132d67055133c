"""A launch as frozen dataclasses, and the parts of one that the jobs do not support.

Targets read the fields that they need; a flag file may have those of several targets.

A `Launch` is a gang of `Role`s, each with a command and its own TPU slices, or a
machine without TPUs. Jobs that train, serve or evaluate run as one process per host of
a slice (`--distributed`); all others are single processes. Process 0 of
`experiments.forge` and `experiments.serve` has the gateway; of `forge` it also has the
rollout engine, which `serve` has on the whole slice. `unmet` lists the
parts of a launch that the jobs would do wrong; printing warns about them, and running
raises an error.

The roles of one `experiments.forge` (`--role=learner`, `engine`, …; docs/roles.md) have
one workdir; `addresses` gives them each other's.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex
from collections.abc import Callable, Sequence

from launch.topology import Slice

# Jobs that run on several hosts; tests/launch compares it with the code.
MULTI_HOST_JOBS: frozenset[str] = frozenset(
  {'evaluate', 'expand_mtp', 'forge', 'pretrain', 'serve', 'sft'}
)
# Roles of experiments.forge that are programs of their own: the number of each.
FORGE_ROLES = {
  'learner': 'exactly one',
  'engine': 'at least one',
  'prefill': 'at most one',
  'gateway': 'exactly one',
  'agents': 'at least one',
}
_PORTS = {'engine': 8101, 'gateway': 8102, 'prefill': 8104}

_EXPERIMENTS = pathlib.Path(__file__).parent.parent / 'experiments'
_NAME = re.compile(r'[a-z]([-a-z0-9]*[a-z0-9])?')  # xpk 1.16.0, parser/validators.py
_NAME_LENGTH = 40


class LaunchError(ValueError):
  """A launch that is not possible; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class Command:
  """A command line and its standard input."""

  argv: tuple[str, ...]
  stdin: str = ''


@dataclasses.dataclass(frozen=True)
class Role:
  """One part of a gang.

  Attributes:
    name: lower-case letters, digits and hyphens.
    argv: the command, which runs on every host.
    slice: TPUs of one replica; None is a machine without TPUs.
    replicas: independent copies, each a separate JAX program.
  """

  name: str
  argv: tuple[str, ...]
  slice: Slice | None = None
  replicas: int = 1

  def __post_init__(self):
    _check_name('role', self.name)
    if not self.argv or any(re.search(r'[\n\0]', arg) for arg in self.argv):
      raise LaunchError(f'role {self.name}: its command is empty or has a line break')
    if self.replicas < 1:
      raise LaunchError(
        f'role {self.name}: replicas={self.replicas}: must be at least 1'
      )

  @property
  def hosts(self) -> int:
    """Number of hosts of one replica."""
    return self.slice.hosts if self.slice else 1


@dataclasses.dataclass(frozen=True)
class Launch:
  """A run on Google Cloud.

  Attributes:
    name: the run's name.
    roles: a JobSet ends with its first role.
    project, zone: the Google Cloud project and zone; the zone determines the region.
    cluster: GKE cluster.
    image: container image, REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG.
    bucket: gs://NAME, for uploaded code and saved results.
    storage: an xpk storage, mounted at `mount`; '' is none.
    queue: Kueue's local queue; '' is none.
    max_restarts: restarts of the whole gang before a failure is final.
    grace_s: seconds between SIGTERM and SIGKILL: time for a training step or two and a
      checkpoint.
    runtime_version: software of TPU VMs, from `tpu-vm versions list`.
    python: Python version on TPU VMs, 3.11 or later.
    spot: use spot capacity.
    reservation: use TPUs of this reservation.
    queued: create TPU VMs as a queued resource.
  """

  name: str
  roles: tuple[Role, ...]
  project: str
  zone: str
  cluster: str = ''
  image: str = ''
  bucket: str = ''
  storage: str = ''
  mount: str = '/workdir'
  queue: str = ''
  max_restarts: int = 0
  grace_s: int = 600
  runtime_version: str = ''
  python: str = 'python3.11'
  spot: bool = False
  reservation: str = ''
  queued: bool = True

  def __post_init__(self):
    _check_name('name', self.name)
    names = [name for name, _ in self.instances()]
    if not names or len(set(names)) < len(names):
      raise LaunchError(f'roles {names}: need at least one, with distinct names')
    if not re.fullmatch(r'[a-z]+-[a-z]+\d+-[a-z]', self.zone):
      raise LaunchError(f'zone {self.zone!r}: must be a zone such as us-east5-a')
    if not self.project:
      raise LaunchError('project is missing: set the id of the Google Cloud project')
    if self.bucket and not re.fullmatch(r'gs://[^/]+', self.bucket):
      raise LaunchError(f'bucket {self.bucket!r}: must be gs://NAME')
    if self.spot and self.reservation:
      raise LaunchError('spot and reservation: set at most one of them')
    for name in names:
      if len(f'{self.name}-{name}') > _NAME_LENGTH:
        raise LaunchError(
          f'{self.name}-{name} is longer than the {_NAME_LENGTH} characters that xpk '
          'allows: shorten one of the two'
        )

  @property
  def region(self) -> str:
    """The region of the zone."""
    return self.zone.rpartition('-')[0]

  def instances(self) -> list[tuple[str, Role]]:
    """(name, role) of every replica; a single one has the name of its role.

    Each is a separate program. Several slices in one JobSet job, xpk workload or queued
    resource would count as one program.
    """
    return [
      (role.name if role.replicas == 1 else f'{role.name}-{i}', role)
      for role in self.roles
      for i in range(role.replicas)
    ]

  def need(self, target: str, *fields: str) -> None:
    """Raises LaunchError if a field that the target needs is empty."""
    missing = [name for name in fields if not getattr(self, name)]
    if missing:
      raise LaunchError(f'{target} needs {", ".join(missing)}')


def job(
  name: str, workdir: str, args: Sequence[str] = (), hosts: int = 1
) -> tuple[str, ...]:
  """argv of `python -m experiments.NAME`, with its default config unless in `args`.

  On several hosts a job that can run on them gets --distributed.
  """
  argv = ['python', '-m', f'experiments.{name}']
  if not any(arg.startswith('--config=') for arg in args):
    argv.append(f'--config=configs/{name}.py')
  argv.append(f'--workdir={workdir}')
  if hosts > 1 and name in MULTI_HOST_JOBS and '--distributed' not in args:
    argv.append('--distributed')
  return (*argv, *args)


def forge_role(role: Role) -> str:
  """Which role of `experiments.forge` a role of the launch is; '' for any other."""
  given = [a.partition('=')[2] for a in role.argv if a.startswith('--role=')]
  of_forge = 'experiments.forge' in role.argv[:3]
  return given[-1] if of_forge and given and given[-1] != 'all' else ''


def addresses(
  launch: Launch, name: str, role: Role, hostname: Callable[[str], str]
) -> tuple[str, ...]:
  """Flags by which a replica of a forge role reaches the others; () for other jobs.

  Args:
    name: the replica's name.
    role: its role.
    hostname: maps a replica's name to its first host's name.
  """
  mine = forge_role(role)
  if not mine:
    return ()
  found: dict[str, list[str]] = {kind: [] for kind in FORGE_ROLES}
  for other, its in launch.instances():
    if kind := forge_role(its):
      found[kind].append(other)

  def place(other: str, kind: str) -> str:
    return f'{hostname(other)}:{_PORTS[kind]}'

  engines = ''.join(f"'http://{place(n, 'engine')}'," for n in found['engine'])
  flags = [f'--config.roles.engine_urls=({engines})']
  for other in found['gateway']:
    flags.append(f'--config.roles.gateway_url=http://{place(other, "gateway")}')
    flags.append(f"--config.gateway.hosts=('{hostname(other)}',)")
  for other in found['prefill']:
    flags.append(f'--config.roles.prefill_address=tcp:{place(other, "prefill")}')
  if mine == 'engine':
    flags.append(f'--config.roles.engine={found["engine"].index(name)}')
    flags.append('--config.roles.engine_server.host=0.0.0.0')
  if mine == 'gateway':
    flags.append('--config.gateway.host=0.0.0.0')
  return tuple(flags)


def _unmet_forge(launch: Launch, target: str) -> list[str]:
  """Reasons why the roles of one `experiments.forge` would not meet."""
  roles = [role for role in launch.roles if forge_role(role)]
  if not roles:
    return []
  reasons = []
  replicas = dict.fromkeys(FORGE_ROLES, 0)
  for role in roles:
    if (kind := forge_role(role)) not in replicas:
      reasons.append(
        f'role {role.name}: experiments.forge has no --role={kind}, only '
        f'{", ".join(FORGE_ROLES)}'
      )
    else:
      replicas[kind] += role.replicas
  for kind, want in FORGE_ROLES.items():
    n = replicas[kind]
    if n > 1 and want != 'at least one' or n < 1 and want != 'at most one':
      reasons.append(f'experiments.forge in roles needs {want} {kind}, not {n}')
  if forge_role(launch.roles[0]) != 'learner':
    reasons.append('the first role, with which a gang ends, has to be the learner')
  if len({_flag(role, 'workdir') for role in roles}) > 1:
    reasons.append('the roles of experiments.forge need one --workdir: leave it out')
  if any(not _flag(role, 'config.roles.pool_url') for role in roles):
    reasons.append(
      'the roles of experiments.forge are on several machines, and SQLite is for one: '
      'give each --config.roles.pool_url=postgresql://… of one empty database'
    )
  if target != 'jobset':
    reasons.append(
      f'the roles of experiments.forge find each other by the host names of a JobSet; '
      f'{target} gives them none that are known before they run: use --target=jobset'
    )
  return reasons


def _flag(role: Role, name: str) -> str:
  """The last value of a flag of a role's command; '' if it has none."""
  given = [a.partition('=')[2] for a in role.argv if a.startswith(f'--{name}=')]
  return given[-1] if given else ''


def unmet(launch: Launch, target: str) -> list[str]:
  """Reasons why the jobs cannot do what the launch says; [] if there are none.

  Args:
    target: the launch target; all except 'tpu_vm' run containers.
  """
  reasons = _unmet_forge(launch, target)
  for role in launch.roles:
    match = re.search(r' -m experiments\.(\w+)', ' ' + ' '.join(role.argv[:3]))
    if not match:
      continue  # not a job of this project
    name = match[1]
    who = f'role {role.name}: experiments.{name}'
    if name == 'common' or not (_EXPERIMENTS / f'{name}.py').exists():
      reasons.append(f'{who} is not a job')
      continue
    if role.hosts > 1 and name not in MULTI_HOST_JOBS:
      reasons.append(
        f'{who} runs as a single process: {role.slice} has {role.hosts} hosts, which '
        'would run independently'
      )
    elif role.hosts > 1 and '--distributed' not in role.argv:
      reasons.append(
        f'{who} needs --distributed: {role.slice} has {role.hosts} hosts, which would '
        'run independently'
      )
    if not (workdir := _flag(role, 'workdir')):
      continue
    if role.replicas > 1 and not forge_role(role):
      reasons.append(
        f'{who} has a workdir, which only one process may use; there are '
        f'{role.replicas} replicas'
      )
    mounted = launch.storage and workdir.startswith(launch.mount + '/')
    if '://' in workdir:
      reasons.append(
        f'{who} refuses --workdir={workdir}, a URL: use a local path, in containers '
        'one on a --storage'
      )
    elif target == 'tpu_vm' and role.hosts > 1:
      reasons.append(
        f'{who} needs one workdir for all hosts; {workdir} is on the disk of each '
        'host, unless you have mounted it: use xpk or JobSet with a --storage'
      )
    elif target != 'tpu_vm' and not mounted:
      reasons.append(
        f"{who} would write to {workdir} on its container's disk, which is lost with "
        f'it: set a --storage, and a --workdir in {launch.mount}'
      )
  return reasons


def check(launch: Launch, target: str) -> None:
  """Raises LaunchError if `unmet` returns any reasons."""
  if reasons := unmet(launch, target):
    raise LaunchError('\n  '.join(['not run:', *reasons]))


def shell(command: Command) -> str:
  """The command for a POSIX shell, on several lines if it is long."""
  words = [_quote(arg) for arg in command.argv]
  text = ' '.join(words)
  if len(text) > 88:
    first = next((i for i, w in enumerate(words) if w.startswith('--')), len(words))
    text = ' \\\n  '.join([' '.join(words[:first]), *words[first:]])
  return f"{text} <<'EOF'\n{command.stdin}\nEOF" if command.stdin else text


def _quote(arg: str) -> str:
  """Quotes an argument, but not the name of a flag."""
  flag, equals, value = arg.partition('=')
  if equals and re.fullmatch(r'--[\w.-]+', flag):
    return f'{flag}={shlex.quote(value) if value else ""}'
  return shlex.quote(arg)


def _check_name(what: str, name: str) -> None:
  if not _NAME.fullmatch(name):
    raise LaunchError(
      f'{what} {name!r}: must be lower-case letters, digits and hyphens, starting with '
      'a letter'
    )
