"""Prints the commands of a launch, or runs them with --run.

  python -m launch.print --flagfile=launch/example.flags --target=xpk --step=run

A step stops at the first command that fails. Parts of the launch that the jobs would do
wrong are printed to standard error, and prevent a run.
"""

from __future__ import annotations

import subprocess
import sys

from absl import flags

from launch import config, jobset, options, project, tpu_vm, xm_launch, xpk
from launch.config import Command, LaunchError

TARGETS = {
  'project': project.STEPS,
  'xpk': xpk.STEPS,
  'jobset': jobset.STEPS,
  'tpu_vm': tpu_vm.STEPS,
  'xm': xm_launch.STEPS,
}
TARGET = flags.DEFINE_enum(
  'target',
  None,
  list(TARGETS),
  'The target that runs the job.',
  flag_values=options.FLAGS,
)
STEP = flags.DEFINE_string(
  'step',
  'run',
  'Step of the target; an unknown one lists all.',
  flag_values=options.FLAGS,
)
RUN = flags.DEFINE_bool('run', False, 'Run the commands.', flag_values=options.FLAGS)


def commands(launch: config.Launch, target: str, step: str) -> list[Command]:
  """The commands of a step of a target."""
  if step not in TARGETS[target]:
    raise LaunchError(f'{target} has the steps {", ".join(TARGETS[target])}')
  return TARGETS[target][step](launch)


def execute(found: list[Command]) -> None:
  """Runs the commands in order.

  Raises:
    LaunchError: a command failed or is not installed; later ones do not run.
  """
  for command in found:
    print('+ ' + config.shell(command), file=sys.stderr, flush=True)
    try:
      done = subprocess.run(
        command.argv, input=command.stdin or None, text=True, check=False
      )
    except FileNotFoundError as error:
      raise LaunchError(f'{command.argv[0]} is not installed') from error
    if done.returncode:
      raise LaunchError(f'{command.argv[0]} exited with code {done.returncode}')


def main(argv):
  try:
    if argv[1:]:
      raise LaunchError(f'unexpected argument {argv[1]!r}: flags start with --')
    target = options.VIA.value if TARGET.value == 'xm' else TARGET.value
    launch = options.launch(target)
    found = commands(launch, TARGET.value, STEP.value)
    if RUN.value:
      if STEP.value == 'run':
        config.check(launch, target)
      execute(found)
      return
    print('\n'.join(map(config.shell, found)))
    for reason in config.unmet(launch, target) if STEP.value == 'run' else ():
      print(f'warning: {reason}', file=sys.stderr)
  except LaunchError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
  options.run(main, required='target')
