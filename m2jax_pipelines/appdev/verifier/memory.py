"""How much memory Chromium takes while an app is judged, by /proc of the sandbox.

The kernel kills a browser's process if the sandbox is out of memory, but also if the
machine is. The app is to blame only if it took much memory itself just before.
"""

import contextlib
import os
import threading

_PAGE_BYTES = os.sysconf('SC_PAGE_SIZE')
EVERY_S = 0.05


class Watch:
  """The most that was used since `reset`, beyond what was used then.

  Counts the memory of all processes here but this one, without what they map from
  files, and files of /tmp, which are in memory.
  """

  def __init__(self):
    self._start_bytes = self._peak_bytes = 0
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._sample, daemon=True)

  def __enter__(self):
    self.reset()
    self._thread.start()
    return self

  def __exit__(self, *unused):
    self._stop.set()
    self._thread.join()

  def reset(self):
    """Begins anew, with what is used now."""
    self._start_bytes = self._peak_bytes = used_bytes()

  @property
  def grown_bytes(self):
    """Peak beyond the start."""
    return self._peak_bytes - self._start_bytes

  def _sample(self):
    while not self._stop.wait(EVERY_S):
      self._peak_bytes = max(self._peak_bytes, used_bytes())


def used_bytes():
  """Anonymous memory of all other processes, and the size of what is in /tmp."""
  found = 0
  for name in os.listdir('/proc'):
    if name.isdigit() and int(name) != os.getpid():
      with contextlib.suppress(OSError), open(f'/proc/{name}/statm') as file:
        _, resident, shared, *_ = map(int, file.read().split())
        found += (resident - shared) * _PAGE_BYTES
  with contextlib.suppress(OSError):
    disk = os.statvfs('/tmp')
    found += (disk.f_blocks - disk.f_bfree) * disk.f_frsize
  return found
