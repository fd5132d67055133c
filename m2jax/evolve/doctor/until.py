"""Runs a command until a step of its metrics is there, and then ends it.

  python until.py METRICS PHASE STEP SECONDS -- COMMAND…

A script without imports of the package: it also runs where only this file is. Exit
status: 0 when the step was reached (the command is ended), 124 when the seconds are
over, else that of the command. The command ends with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

OVER = 124
POLL_S = 0.2
GRACE_S = 15.0  # from SIGTERM to SIGKILL
_DEATH = 1  # PR_SET_PDEATHSIG


def main(arguments: list[str]) -> int:
  """Exit status; see above."""
  metrics, phase, step, seconds, _, *command = arguments
  _end_with_parent(signal.SIGTERM)
  for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, lambda number, frame: sys.exit(128 + number))
  ends_s = time.monotonic() + float(seconds)
  child = subprocess.Popen(
    command,
    stdin=subprocess.DEVNULL,
    start_new_session=True,
    preexec_fn=lambda: _end_with_parent(signal.SIGKILL),
  )
  try:
    read = 0
    while child.poll() is None:
      if time.monotonic() > ends_s:
        return OVER
      reached, read = _reached(metrics, phase, int(step), read)
      if reached:
        return 0
      time.sleep(POLL_S)
    status = child.returncode
    return status if status >= 0 else 128 - status
  finally:
    _end(child)


def _end_with_parent(number: int) -> None:
  with contextlib.suppress(OSError, AttributeError):  # Linux has it
    ctypes.CDLL(None).prctl(_DEATH, number)


def _reached(path: str, phase: str, step: int, read: int) -> tuple[bool, int]:
  """Whether new whole lines have the step; how many bytes were read."""
  try:
    with open(path, 'rb') as file:
      file.seek(read)
      data = file.read(1 << 24)
  except OSError:
    return False, read
  end = data.rfind(b'\n') + 1
  found = False
  for line in data[:end].splitlines():
    try:
      record = json.loads(line)
      found |= record.get('phase') == phase and record['step'] >= step
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
      continue
  return found, read + end


def _end(child: subprocess.Popen) -> None:
  """Ends the command with all its processes: SIGTERM, and after a while SIGKILL."""
  for number in signal.SIGTERM, signal.SIGKILL:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(child.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
      child.wait(GRACE_S)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
