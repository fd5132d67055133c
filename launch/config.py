"""What is to run where, as frozen dataclasses, and what today's jobs cannot do yet.

Targets read the fields they need; a flag file may hold those of several.

A `Launch` is a gang of `Role`s: each has a command, and TPU slices of its own or a
machine without one. `experiments.pretrain` runs as one process on each host of a slice
(`--distributed`); all other jobs are one process each: `experiments.forge` holds
trainer, rollout engine and gateway, `experiments.serve` engine and gateway. `unmet`
says which part of a launch they would do wrong; printing shows it, running refuses.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex
from collections.abc import Sequence

from launch.topology import Slice

# Jobs that join the processes of other hosts, and jobs that open --workdir as a URL.
# tests/launch holds both against the code.
MULTI_HOST_JOBS: frozenset[str] = frozenset({'pretrain'})
URL_WORKDIR_JOBS: frozenset[str] = frozenset()

_EXPERIMENTS = pathlib.Path(__file__).parent.parent / 'experiments'
_NAME = re.compile(r'[a-z]([-a-z0-9]*[a-z0-9])?')  # xpk 1.16.0, parser/validators.py
_NAME_LENGTH = 40


class LaunchError(ValueError):
  """A launch that cannot be done as asked; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class Command:
  """One command line, and what it reads on its standard input."""

  argv: tuple[str, ...]
  stdin: str = ''


@dataclasses.dataclass(frozen=True)
class Role:
  """One part of a gang.

  Attributes:
    name: lower-case letters, digits and hyphens.
    argv: the command, started on every host.
    slice: TPUs of one replica; None is a machine without TPUs.
    replicas: independent copies, each a JAX program of its own.
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
      raise LaunchError(f'role {self.name}: replicas={self.replicas}, want 1 or more')

  @property
  def hosts(self) -> int:
    """Of one replica."""
    return self.slice.hosts if self.slice else 1


@dataclasses.dataclass(frozen=True)
class Launch:
  """A run on Google Cloud.

  Attributes:
    name: of the run.
    roles: of a JobSet, the first one's end is the end of all.
    project, zone: of Google Cloud; the region follows from the zone.
    cluster: GKE cluster.
    image: container image, REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG.
    bucket: gs://NAME, for code that is uploaded and results that are saved.
    storage: an xpk storage, mounted at `mount`; '' is none.
    queue: Kueue's local queue; '' is none.
    max_restarts: of the whole gang, after which a failure is final.
    runtime_version: software of TPU VMs, of `tpu-vm versions list`.
    python: of TPU VMs, 3.11 or later.
    spot: capacity that may be taken away.
    reservation: takes the TPUs from it.
    queued: TPU VMs come by a queued resource.
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
  runtime_version: str = ''
  python: str = 'python3.11'
  spot: bool = False
  reservation: str = ''
  queued: bool = True

  def __post_init__(self):
    _check_name('name', self.name)
    names = [name for name, _ in self.instances()]
    if not names or len(set(names)) < len(names):
      raise LaunchError(f'roles {names}: want one or more, each with its own name')
    if not re.fullmatch(r'[a-z]+-[a-z]+\d+-[a-z]', self.zone):
      raise LaunchError(f'zone {self.zone!r}: want one such as us-east5-a')
    if not self.project:
      raise LaunchError('project is missing: give the id of the Google Cloud project')
    if self.bucket and not re.fullmatch(r'gs://[^/]+', self.bucket):
      raise LaunchError(f'bucket {self.bucket!r}: want gs://NAME')
    if self.spot and self.reservation:
      raise LaunchError('spot and reservation: want at most one of them')
    for name in names:
      if len(f'{self.name}-{name}') > _NAME_LENGTH:
        raise LaunchError(
          f'{self.name}-{name} is longer than the {_NAME_LENGTH} characters that xpk '
          'allows: shorten one of the two'
        )

  @property
  def region(self) -> str:
    """The zone's."""
    return self.zone.rpartition('-')[0]

  def instances(self) -> list[tuple[str, Role]]:
    """(name, role) of every replica; a single one has its role's name.

    Each is a program of its own. Several slices of one JobSet job, one xpk workload or
    one queued resource would be taken for one program over all of them.
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


def job(name: str, workdir: str, args: Sequence[str] = ()) -> tuple[str, ...]:
  """argv of `python -m experiments.NAME`, with its config unless `args` name one."""
  argv = ['python', '-m', f'experiments.{name}']
  if not any(arg.startswith('--config=') for arg in args):
    argv.append(f'--config=configs/{name}.py')
  return (*argv, f'--workdir={workdir}', *args)


def unmet(launch: Launch, target: str) -> list[str]:
  """Reasons why today's jobs would not do what the launch says; [] is none.

  Args:
    target: what starts it; all but 'tpu_vm' run it in containers.
  """
  reasons = []
  for role in launch.roles:
    match = re.search(r' -m experiments\.(\w+)', ' ' + ' '.join(role.argv[:3]))
    if not match:
      continue  # not one of ours
    name = match[1]
    who = f'role {role.name}: experiments.{name}'
    if name == 'common' or not (_EXPERIMENTS / f'{name}.py').exists():
      reasons.append(f'{who} is not a job')
      continue
    if role.hosts > 1 and name not in MULTI_HOST_JOBS:
      reasons.append(
        f'{who} is one process and never joins others: {role.slice} has {role.hosts} '
        'hosts, and none would know of the others'
      )
    elif role.hosts > 1 and '--distributed' not in role.argv:
      reasons.append(
        f'{who} needs --distributed: {role.slice} has {role.hosts} hosts, and none '
        'would know of the others'
      )
    workdirs = [a.partition('=')[2] for a in role.argv if a.startswith('--workdir=')]
    if not workdirs:
      continue
    workdir = workdirs[-1]
    if role.replicas > 1:
      reasons.append(
        f'{who} has a workdir, which belongs to one process; there are '
        f'{role.replicas} replicas'
      )
    mounted = launch.storage and workdir.startswith(launch.mount + '/')
    if '://' in workdir:
      if name not in URL_WORKDIR_JOBS:
        reasons.append(
          f"{who} takes --workdir={workdir} for a path on the host's own disk, and "
          'is lost with it: give a local path, in containers one on a --storage'
        )
    elif target == 'tpu_vm' and role.hosts > 1:
      reasons.append(
        f"{who} needs one workdir for all hosts; {workdir} is on each host's own disk, "
        'unless you mounted it yourself: use xpk or JobSet with a --storage'
      )
    elif target != 'tpu_vm' and not mounted:
      reasons.append(
        f"{who} would write to {workdir} on its container's own disk, lost with "
        f'it: give a --storage, and a --workdir in {launch.mount}'
      )
  return reasons


def check(launch: Launch, target: str) -> None:
  """Raises LaunchError if there is anything `unmet`."""
  if reasons := unmet(launch, target):
    raise LaunchError('\n  '.join(['not run:', *reasons]))


def shell(command: Command) -> str:
  """The command as a POSIX shell reads it, over several lines if it is long."""
  words = [_quote(arg) for arg in command.argv]
  text = ' '.join(words)
  if len(text) > 88:
    first = next((i for i, w in enumerate(words) if w.startswith('--')), len(words))
    text = ' \\\n  '.join([' '.join(words[:first]), *words[first:]])
  return f"{text} <<'EOF'\n{command.stdin}\nEOF" if command.stdin else text


def _quote(arg: str) -> str:
  """Leaves the name of a flag outside the quotes."""
  flag, equals, value = arg.partition('=')
  if equals and re.fullmatch(r'--[\w.-]+', flag):
    return f'{flag}={shlex.quote(value) if value else ""}'
  return shlex.quote(arg)


def _check_name(what: str, name: str) -> None:
  if not _NAME.fullmatch(name):
    raise LaunchError(
      f'{what} {name!r}: want lower-case letters, digits and hyphens, a letter first'
    )
