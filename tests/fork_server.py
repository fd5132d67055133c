"""A process that has imported jax and the packages, and forks for each module to run.

`python -m tests.fork_server FD` serves requests on a Unix socket until it is closed.
The imports of a job take longer than most of the jobs that tests run. No backend is
initialised here and there is one thread, so a fork is like a process that has just
finished its imports. What the environment says to JAX is applied in the fork.

Request: JSON with `module`, `args`, `cwd`, `env`, `new_session`, and four descriptors:
standard input, output and error, and a socket that gets the process id, then the wait
status and the CPU seconds, once the process has ended.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys

PRELOAD = (
  'etils.epath', 'fastapi', 'flax.linen', 'httpx', 'jax.numpy', 'ml_collections',
  'optax', 'orbax.checkpoint', 'sqlalchemy', 'tokenizers', 'uvicorn',
  'm2jax.forge.run', 'm2jax.gateway.server', 'm2jax.rl.learner', 'm2jax.rollout',
  'm2jax.train.pretrain',
)  # fmt: skip


def main(control: socket.socket) -> tuple[str, list[str]]:
  """Serves; returns (module, arguments) in a fork, and exits at the end of requests."""
  running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
  while True:
    for ready in select.select([control, *running], [], [])[0]:
      if ready is control:
        data, fds, *_ = socket.recv_fds(control, 1 << 20, 4)
        if not data:
          for pid, _ in running.values():  # pytest was killed
            os.kill(pid, signal.SIGKILL)
          sys.exit()
        if not (pid := os.fork()):
          control.close()
          return _become(json.loads(data), fds)
        report = socket.socket(fileno=fds.pop())
        report.sendall(array.array('q', [pid]))
        running[os.pidfd_open(pid)] = pid, report
        for fd in fds:
          os.close(fd)
      else:
        pid, report = running.pop(ready)
        os.close(ready)
        _, status, used = os.wait4(pid, 0)
        with report:
          try:
            report.sendall(array.array('d', [status, used.ru_utime + used.ru_stime]))
          except BrokenPipeError:  # nobody waits for it any more
            pass


def _become(request: dict, fds: list[int]) -> tuple[str, list[str]]:
  """Turns this fork into the process that was asked for."""
  if request['new_session']:
    os.setsid()
  for target, fd in enumerate(fds[:3]):
    os.dup2(fd, target)
  for fd in fds:
    os.close(fd)
  os.closerange(3, 1024)
  os.chdir(request['cwd'])
  os.environ.clear()
  os.environ.update(request['env'])
  signal.signal(signal.SIGINT, signal.default_int_handler)
  if request['env'].get('PYTHONUNBUFFERED'):
    sys.stdout.reconfigure(write_through=True)
  jax = sys.modules['jax']
  for name, text in request['env'].items():
    if hasattr(jax.config, key := name.lower()) and key.startswith('jax_'):
      now = getattr(jax.config, key)
      value = text
      if isinstance(now, bool):
        value = text.lower() in ('1', 'true', 'yes', 'on')
      elif text.lstrip('-').isdigit():
        value = int(text)
      if value != now:
        jax.config.update(key, value)
  return request['module'], request['args']


if __name__ == '__main__':
  for name in PRELOAD:
    importlib.import_module(name)
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  # Collections would go through all modules again, a quarter of the time of a tiny job.
  gc.freeze()
  gc.set_threshold(100_000, 50, 50)
  module, sys.argv[1:] = main(socket.socket(fileno=int(sys.argv[1])))
  runpy.run_module(module, run_name='__main__', alter_sys=True)
