"""Processes that tests leave: they are adopted, and ended with all that they start.

Standard library only: the file is copied into each task.
"""

import contextlib
import ctypes
import os
import signal
import time

_PR_SET_CHILD_SUBREAPER = 36


def adopt():
  """Makes processes that lose their parent children of this one.

  So `end_children` finds what they leave, and nothing else: it cannot end a process of
  the machine, in a sandbox or outside.

  Raises:
    OSError: the system cannot; then nothing may be graded.
  """
  if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
    raise OSError('prctl(PR_SET_CHILD_SUBREAPER) failed: leftovers cannot be ended')


def end_children(limit_s=5.0):
  """Ends all descendants; `adopt` comes first.

  Only children that were not waited for are signalled, whose ids cannot be reused.

  Raises:
    TimeoutError: they multiply faster than they end.
  """
  deadline = time.monotonic() + limit_s
  while True:
    for child in _children():
      os.kill(child, signal.SIGKILL)
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    except ChildProcessError:
      return
    if time.monotonic() > deadline:
      raise TimeoutError('processes multiply faster than they end')
    time.sleep(0.002)


def _children():
  found = []
  for name in os.listdir('/proc'):
    if name.isdigit():
      with contextlib.suppress(OSError), open(f'/proc/{name}/stat') as file:
        if int(file.read().rpartition(')')[2].split()[1]) == os.getpid():
          found.append(int(name))
  return found
