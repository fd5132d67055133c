"""The flags of a `Launch`, for `launch.print` and `launch.xm_launch`.

They are in a separate set, because the jobs in experiments/ have a --workdir too.
"""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags

from launch import config, topology
from launch.config import Launch, LaunchError, Role

FLAGS = flags.FlagValues()

_string = functools.partial(flags.DEFINE_string, flag_values=FLAGS)
_strings = functools.partial(flags.DEFINE_multi_string, flag_values=FLAGS)

VIA = flags.DEFINE_enum(
  'via',
  None,
  ('kubernetes', 'xpk', 'jobset', 'tpu_vm'),
  'The target that XManager starts.',
  flag_values=FLAGS,
)
NAME = _string('name', 'm2jax', 'Name of the run.')
JOB = _string('job', 'pretrain', 'experiments/JOB.py, if there is one role.')
TOPOLOGY = _string(
  'topology', 'v5p:2x2x1', 'Of that role: v5p:AxBxC, v5p-CORES, or cpu.'
)
ARG = _strings('arg', [], 'Further flags of that job.')
ROLE = _strings(
  'role',
  [],
  "A gang instead of --job: 'NAME TOPOLOGY[*REPLICAS] JOB [ARG…]'; a JobSet ends "
  'with its first role.',
)
WORKDIR = _string(
  'workdir',
  None,
  'Contains a directory per role, one for those of experiments.forge; default: '
  'MOUNT/NAME.',
)
_FIELDS = (
  _string('project', '', 'Id of the Google Cloud project.'),
  _string('zone', '', 'A zone with TPUs, such as us-east5-a.'),
  _string('cluster', '', 'GKE cluster.'),
  _string('image', '', 'REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG'),
  _string('bucket', '', 'gs://NAME'),
  _string('storage', '', 'xpk storage, mounted at --mount; empty: none.'),
  _string('mount', '/workdir', 'Path of the storage.'),
  _string('queue', '', "Kueue's queue of a JobSet; xpk's is multislice-queue."),
  _string('runtime_version', '', 'Software of TPU VMs; see --step=versions.'),
  _string('python', 'python3.11', 'Python of TPU VMs, 3.11 or later.'),
  _string('reservation', '', 'Use TPUs of this reservation.'),
  flags.DEFINE_integer(
    'max_restarts', 0, 'Restarts of the whole gang.', flag_values=FLAGS
  ),
  flags.DEFINE_integer(
    'grace_s', 600, 'Seconds between SIGTERM and SIGKILL.', flag_values=FLAGS
  ),
  flags.DEFINE_bool('spot', False, 'Use spot capacity.', FLAGS),
  flags.DEFINE_bool('queued', True, 'Create TPU VMs as a queued resource.', FLAGS),
)


def launch(target: str) -> Launch:
  """The launch that the flags describe.

  The default workdir is with the code on TPU VMs, else on the storage.

  Raises:
    LaunchError: the flags do not describe a launch; says what to change.
  """
  values = {field.name: field.value for field in _FIELDS}
  place = values['mount'] if values['storage'] else ''
  if target == 'tpu_vm':
    place = 'workdir'
  if not (WORKDIR.value or place):
    raise LaunchError('a job needs a directory to write to: set --storage or --workdir')
  workdir = WORKDIR.value or f'{place}/{NAME.value}'
  only = shlex.join(['trainer', TOPOLOGY.value, JOB.value, *ARG.value])
  roles = tuple(role(text, workdir) for text in ROLE.value or [only])
  return Launch(name=NAME.value, roles=roles, **values)


def role(text: str, workdir: str) -> Role:
  """A role from 'NAME TOPOLOGY[*REPLICAS] JOB [ARG…]'; it writes to workdir/NAME, and
  one of `experiments.forge --role=…` to workdir/forge, with the others."""
  words = shlex.split(text)
  if len(words) < 3:
    raise LaunchError(f"role {text!r}: must be 'NAME TOPOLOGY[*REPLICAS] JOB [ARG…]'")
  name, where, job, *args = words
  shape, _, replicas = where.partition('*')
  try:
    slice = None if shape == 'cpu' else topology.parse(shape)
    hosts = slice.hosts if slice else 1
    count = int(replicas or 1)
  except ValueError as error:
    raise LaunchError(f'role {name}: {error}') from error
  in_roles = job == 'forge' and any(a.startswith('--role=') for a in args)
  own = 'forge' if in_roles else name
  return Role(name, config.job(job, f'{workdir}/{own}', args, hosts), slice, count)


def given() -> list[str]:
  """The flags of the launch that were set, to pass on."""
  found = FLAGS.get_flags_for_module(__name__)
  lines = [f.serialize() for f in found if f.present and f.name != 'via']
  return [line for text in lines for line in text.split('\n')]


def run(main: Callable[[list[str]], Any], required: str) -> None:
  """Runs a program with these flags, one of which is required."""
  flags.FLAGS.append_flag_values(FLAGS)
  FLAGS.mark_as_parsed()  # together with the other set
  for name in FLAGS:  # for --help
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
  flags.mark_flag_as_required(required)
  app.run(main)
