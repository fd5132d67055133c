"""The processes of a run in roles, for tests: started, killed, waited for, read."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

import httpx

from tests import processes as processes_lib
from tests.faults import witness

ROLES = ('learner', 'engine', 'gateway', 'agents')
TIMEOUT_S = 600.0


class Roles:
  """The processes of a run, by name; 'agents' and 'agents2' have the same role."""

  def __init__(
    self,
    directory: pathlib.Path,
    *flags: str,
    workdir: pathlib.Path | None = None,
    engines: int = 1,
    of: Mapping[str, Sequence[str]] | None = None,
    processes: Mapping[str, int] | None = None,
  ):
    """Starts nothing yet.

    Args:
      engines: which are to be started as 'engine', 'engine2', ….
      of: flags by name.
      processes: by name, of those that several processes are together, each with one
        device; the second one of 'engine2' is 'engine2.1'.
      directory: of the logs and of the witness's records.
      flags: for every role.
      workdir: of the run, DIRECTORY/run by default.
    """
    self.workdir, self._logs = workdir or directory / 'run', directory
    ports = [processes_lib.free_port() for _ in range(1 + engines)]
    self._of, self._processes = of or {}, processes or {}
    self._urls = urls = tuple(f'http://127.0.0.1:{port}' for port in ports[1:])
    self._flags = [
      f'--workdir={self.workdir}',
      '--config=tests/forge/roles/roles_config.py',
      f'--config.roles.engine_urls={urls}',
      f'--config.roles.gateway_url=http://127.0.0.1:{ports[0]}',
      *flags,
    ]
    self.children: dict[str, subprocess.Popen] = {}

  def start(self, name: str) -> None:
    count = self._processes.get(name, 1)
    if count == 1:
      self._start(name, name)
      return
    coordinator = f'localhost:{processes_lib.free_port()}'
    for process in range(count):
      self._start(
        name,
        f'{name}.{process}' if process else name,
        '--distributed',
        JAX_COORDINATOR_ADDRESS=coordinator,
        JAX_NUM_PROCESSES=str(count),
        JAX_PROCESS_ID=str(process),
        JAX_NUM_CPU_DEVICES='1',
      )

  def _start(self, name: str, child: str, *flags: str, **environment: str) -> None:
    role = name.rstrip('0123456789')
    number = int(name[len(role) :] or 1)
    which = [f'--config.roles.engine={number - 1}'] if role == 'engine' else []
    which += self._of.get(name, ())
    which += flags
    with open(self._logs / f'{child}.log', 'a', encoding='utf-8') as log:
      self.children[child] = processes_lib.popen(
        'tests.forge.roles.role_worker',
        f'--role={role}',
        *self._flags,
        *which,
        env={**os.environ, 'WITNESS': str(self._logs), **environment},
        stdout=log,
        stderr=log,
      )

  def kill(self, name: str) -> None:
    """SIGKILL of all its processes, and new ones of the role."""
    names = [n for n in self.children if n.partition('.')[0] == name]
    for child in names:
      assert self.children[child].poll() is None, self.log(child)
      self.children[child].kill()
    for child in names:
      self.children[child].wait()
    self.start(name)

  def engine_stats(self, number: int) -> dict:
    """The statistics of an engine; empty while it does not answer."""
    key = (self.workdir / 'keys' / 'engine').read_text().strip()
    headers = {'authorization': f'Bearer {key}'}
    try:
      answer = httpx.get(self._urls[number] + '/health', headers=headers, timeout=5)
    except httpx.HTTPError:
      return {}
    return answer.json().get('stats', {})

  def log(self, name: str) -> str:
    return (self._logs / f'{name}.log').read_text()[-4000:]

  def witness(self, *what: str) -> list[dict]:
    """The records of these kinds, in order."""
    return [r for r in witness.read(self._logs) if r['what'] in what]

  def wait(self, condition) -> None:
    ends_s = time.monotonic() + TIMEOUT_S
    while not condition():
      for name, child in self.children.items():
        assert child.poll() in (None, 0), f'{name}: {self.log(name)}'
      assert time.monotonic() < ends_s, {n: self.log(n) for n in self.children}
      time.sleep(0.1)

  def more_updates(self, n: int, before: int | None = None) -> None:
    """Waits for n updates more than `before`, by default those so far."""
    if before is None:
      before = len(self.witness('update'))

    def made():
      found = len(self.witness('update')) >= before + n
      ended = [c for c in self.children.values() if c.poll() == 0]
      assert found or not ended, 'the queue was drained'
      return found

    self.wait(made)

  def finish(self) -> None:
    """Waits for the learner's end, and stops the others."""
    for name in [n for n in self.children if n.partition('.')[0] == 'learner']:
      learner = self.children[name]
      self.wait(lambda learner=learner: learner.poll() == 0)
      del self.children[name]
    for name in list(self.children):
      assert self.stop(name) == 0, self.log(name)
      assert self.log(name).endswith('stopped\n')

  def stop(self, name: str, timeout_s: float = 60.0) -> int:
    child = self.children.pop(name)
    if '.' not in name:  # the others of several end with the first
      child.send_signal(signal.SIGINT)
    return child.wait(timeout_s)

  def __enter__(self) -> Roles:
    return self

  def __exit__(self, *exc):
    for child in self.children.values():
      child.kill()
      child.wait()
