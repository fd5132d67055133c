"""The flags that make a `Launch`, for `launch.print` and `launch.xm_launch`.

They live in a set of their own: experiments' jobs have a --workdir too.
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
  'What XManager starts.',
  flag_values=FLAGS,
)
NAME = _string('name', 'm2jax', 'Of the run.')
JOB = _string('job', 'pretrain', 'experiments/JOB.py, of the only role.')
TOPOLOGY = _string('topology', 'v5p:2x2x1', 'Of it: v5p:AxBxC, v5p-CORES, or cpu.')
ARG = _strings('arg', [], "Further flags of the only role's job.")
ROLE = _strings(
  'role',
  [],
  "A gang in place of --job: 'NAME TOPOLOGY[*REPLICAS] JOB [ARG…]'; a JobSet ends "
  'with the first one.',
)
WORKDIR = _string('workdir', None, 'With one in it for each role; default: MOUNT/NAME.')
_FIELDS = (
  _string('project', '', 'Id of the Google Cloud project.'),
  _string('zone', '', 'With TPUs, such as us-east5-a.'),
  _string('cluster', '', 'GKE cluster.'),
  _string('image', '', 'REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG'),
  _string('bucket', '', 'gs://NAME'),
  _string('storage', '', 'xpk storage, mounted at --mount; empty: none.'),
  _string('mount', '/workdir', 'Path of the storage.'),
  _string('queue', '', "Kueue's queue of a JobSet; xpk's is multislice-queue."),
  _string('runtime_version', '', 'Of TPU VMs; see --step=versions.'),
  _string('python', 'python3.11', 'Of TPU VMs, 3.11 or later.'),
  _string('reservation', '', 'Takes the TPUs from it.'),
  flags.DEFINE_integer('max_restarts', 0, 'Of the whole gang.', flag_values=FLAGS),
  flags.DEFINE_bool('spot', False, 'Capacity that may be taken away.', FLAGS),
  flags.DEFINE_bool('queued', True, 'TPU VMs by a queued resource.', FLAGS),
)


def launch(target: str) -> Launch:
  """What the flags say.

  The default workdir is where the target keeps files: under the code on TPU VMs, else
  on the storage, and without one in the bucket.

  Raises:
    LaunchError: they say nothing that can be launched; tells what to change.
  """
  values = {field.name: field.value for field in _FIELDS}
  place = values['mount'] if values['storage'] else values['bucket']
  if target == 'tpu_vm':
    place = 'workdir'
  if not (WORKDIR.value or place):
    raise LaunchError('a job needs a place to write to: give --storage or --workdir')
  workdir = WORKDIR.value or f'{place}/{NAME.value}'
  only = shlex.join(['trainer', TOPOLOGY.value, JOB.value, *ARG.value])
  roles = tuple(role(text, workdir) for text in ROLE.value or [only])
  return Launch(name=NAME.value, roles=roles, **values)


def role(text: str, workdir: str) -> Role:
  """A role from 'NAME TOPOLOGY[*REPLICAS] JOB [ARG…]'; it writes to workdir/NAME."""
  words = shlex.split(text)
  if len(words) < 3:
    raise LaunchError(f"role {text!r}: want 'NAME TOPOLOGY[*REPLICAS] JOB [ARG…]'")
  name, where, job, *args = words
  shape, _, replicas = where.partition('*')
  try:
    slice = None if shape == 'cpu' else topology.parse(shape)
    count = int(replicas or 1)
  except ValueError as error:
    raise LaunchError(f'role {name}: {error}') from error
  return Role(name, config.job(job, f'{workdir}/{name}', args), slice, count)


def given() -> list[str]:
  """The flags of a launch that were set, to be passed on."""
  found = FLAGS.get_flags_for_module(__name__)
  lines = [f.serialize() for f in found if f.present and f.name != 'via']
  return [line for text in lines for line in text.split('\n')]


def run(main: Callable[[list[str]], Any], required: str) -> None:
  """Runs a program that has these flags, one of them required."""
  flags.FLAGS.append_flag_values(FLAGS)
  FLAGS.mark_as_parsed()  # as part of the other set
  for name in FLAGS:  # what --help shows
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
  flags.mark_flag_as_required(required)
  app.run(main)
