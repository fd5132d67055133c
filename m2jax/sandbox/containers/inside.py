"""A program for what must be done in the namespaces of a container.

    inside.py kill PROCESSES    # kills all but the main process; waits for their end
    inside.py listen NETWORK PORT SOCKET  # sends a listening socket over SOCKET

The arguments are open descriptors of namespaces, so that none is another's by now. A
process of its own, since a process with threads cannot change all of its namespaces.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / 'supervisor'))
import linux  # noqa: E402 - the supervisor's module, by its path

_END_S = 10.0


def kill(namespace: int) -> None:
  """Kills all of a process namespace but its process 1.

  kill(2) with -1 reaches every process of the caller's namespace at once, also those
  of a fork bomb, and neither process 1 nor the caller.

  Raises:
    OSError: the namespace has ended.
    TimeoutError: a process did not end.
  """
  number = os.fstat(namespace).st_ino
  if number == os.stat('/proc/self/ns/pid').st_ino:
    raise PermissionError('the process namespace is not of a container')
  linux.enter_processes(namespace)
  began = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf('SC_CLK_TCK'))
  child = os.fork()
  if not child:
    try:
      os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
      pass
    finally:
      os._exit(0)
  os.waitpid(child, 0)
  deadline = time.monotonic() + _END_S
  while _older(number, began):
    if time.monotonic() > deadline:
      raise TimeoutError(f'a process did not end in {_END_S:g} s')
    time.sleep(0.005)


def _older(namespace: int, began: int) -> bool:
  """Whether a process of the namespace, except its first, is from before `began`."""
  for name in filter(str.isdigit, os.listdir('/proc')):
    try:
      if os.stat(f'/proc/{name}/ns/pid').st_ino != namespace:
        continue
      status = Path(f'/proc/{name}/status').read_text()
      started = Path(f'/proc/{name}/stat').read_text().rpartition(')')[2].split()[19]
    except (FileNotFoundError, PermissionError, ProcessLookupError):
      continue  # it has ended, as a zombie too; or is process 1 of this machine
    inner = next(line for line in status.splitlines() if line.startswith('NSpid:'))
    if inner.split()[-1] != '1' and int(started) < began:
      return True
  return False


def main() -> None:
  command, namespace, *rest = sys.argv[1:]
  if command == 'kill':
    kill(int(namespace))
  else:
    port, channel = map(int, rest)
    with socket.socket(fileno=channel) as sender:
      listener = linux.listen_in(int(namespace), port)
      socket.send_fds(sender, [b'+'], [listener.fileno()])


if __name__ == '__main__':
  try:
    main()
  except OSError as error:
    sys.exit(str(error))
