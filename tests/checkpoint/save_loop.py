"""Child of test_kill: resumes, checks (state, host, files), saves until it is killed.

  python -m tests.checkpoint.save_loop DIRECTORY SAVES [KILL_AT KILL_COUNT]

Dies by SIGKILL right before the KILL_COUNT-th file operation that matches the regular
expression KILL_AT: 'os.rename FROM TO', 'open PATH MODE', 'os.remove PATH'. Every leaf,
the host dict and the file say the step, so that a torn checkpoint cannot go unseen.
Prints 'resumed STEP', 'started STEP' after each save, and 'done STEP'.
"""

import os
import re
import signal
import sys

import jax.numpy as jnp
import numpy as np

from m2jax.checkpoint import CheckpointManager


def state(step):
  return {
    'w': jnp.full((64, 256), step, jnp.float32),
    'mu': {'w': jnp.full((64, 256), step, jnp.bfloat16)},
    'step': jnp.int32(step),
  }


def host(step):
  return {'ledger': {'taken': list(range(step)), 'head': step}}


def check(restored):
  step = int(restored.state['step'])
  assert step == restored.step == restored.host['ledger']['head']
  assert restored.host == host(step)
  assert restored.files == {'note.txt': str(step).encode() * 1000}
  for name, leaf in state(step).items():
    if name != 'mu':
      np.testing.assert_array_equal(restored.state[name], leaf)
  np.testing.assert_array_equal(restored.state['mu']['w'], state(step)['mu']['w'])
  return step


def kill_at(pattern, count):
  """Arms the trap; Python reports file operations as audit events."""
  left = count

  def hook(event, args):
    nonlocal left
    if event not in ('open', 'os.mkdir', 'os.rename', 'os.remove', 'os.rmdir'):
      return
    text = ' '.join(map(str, (event, *args[:2])))
    if '__pycache__' not in text and re.search(pattern, text):  # not Python's own files
      left -= 1
      if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

  sys.addaudithook(hook)


def main(directory, saves, pattern='', count='0'):
  manager = CheckpointManager(directory, keep=2)
  resumed = 0
  if manager.latest_step() is not None:
    resumed = check(manager.restore(like=state(0)))
  print(f'resumed {resumed}', flush=True)
  if pattern:
    kill_at(pattern, int(count))
  for step in range(resumed + 1, resumed + 1 + int(saves)):
    manager.save(step, state(step), host(step), {'note.txt': str(step).encode() * 1000})
    print(f'started {step}', flush=True)
  manager.close()
  print(f'done {step}', flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
