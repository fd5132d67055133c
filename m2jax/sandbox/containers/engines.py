"""Calls a container engine by its command line: podman, or docker.

Both have the same commands. podman's settings are m2jax's own: runc, control groups
without systemd, no log of a container's output. facts/pipelines.md §1.3: crun fails
under hybrid control groups, and podman's own ulimits need CAP_SYS_RESOURCE.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from m2jax.sandbox import api, temporary

ENGINES = ('podman', 'docker')
INSTALL = 'apt-get install --no-install-recommends podman runc'
START_S = 60.0  # of any command but a build
_OUTPUT_BYTES = 64 << 10
_CONF = """\
[containers]
log_driver = "none"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


@dataclasses.dataclass(frozen=True)
class Done:
  """A finished command of an engine; `late`: it was killed for its time."""

  returncode: int
  stdout: str
  stderr: str
  late: bool = False


@functools.cache
def environment() -> dict[str, str]:
  """Environment variables of an engine; has podman's settings for this process."""
  if 'CONTAINERS_CONF' in os.environ or not shutil.which('runc'):
    return dict(os.environ)
  place, held = temporary.directory('m2jax-podman-')
  conf = Path(place, 'containers.conf')
  conf.write_text(_CONF)
  # Registered before what removes the containers, and so run after it.
  atexit.register(shutil.rmtree, place, ignore_errors=True)
  del held  # locked until this process ends
  return {**os.environ, 'CONTAINERS_CONF': str(conf)}


def unavailable(engine: str) -> str:
  """'' if the engine can run sandboxes here, or why not and what to do."""
  if engine not in ENGINES:
    raise ValueError(f'engine={engine!r}: must be one of {ENGINES}')
  if not shutil.which(engine):
    install = INSTALL if engine == 'podman' else 'apt-get install docker.io'
    return f'no {engine}: {install}'
  if os.geteuid():
    # Without root podman enforces limits only where control groups v2 are delegated to
    # the user, and files of containers belong to uids that this process cannot act as.
    return f'{engine}: needs root: run as root, in a virtual machine if need be'
  try:
    done = subprocess.run(
      [engine, 'info'],
      env=environment(),
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=START_S,
    )
  except subprocess.TimeoutExpired:
    return f'{engine} info: no answer in {START_S:g} s: restart the service of {engine}'
  if not done.returncode:
    return ''
  words = ' '.join(done.stderr.split())[-300:]
  fix = INSTALL if engine == 'podman' else 'systemctl start docker'
  return f'{engine} info: {words}: {fix}'


class Process:
  """A program that runs, in a session of its own; its output goes to pipes.

  asyncio's own may never return if it is cancelled while the program starts.
  """

  def __init__(self, command: Sequence[str], env: Mapping[str, str], keep=()):
    # podman's monitor leaves a file `oom` where it runs.
    place = os.path.dirname(env.get('CONTAINERS_CONF', '')) or None
    self._popen = subprocess.Popen(
      command,
      env=env,
      cwd=place,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      pass_fds=keep,
      start_new_session=True,  # an interrupt of the job is for the job
    )

  async def communicate(self, *sinks: Callable[[bytes], object]) -> int:
    """Passes stdout and stderr to two functions; returns the status at their end.

    Kills the program if it is cancelled.
    """
    pipes = self._popen.stdout, self._popen.stderr
    try:
      streams = [await _reader(pipe) for pipe in pipes]
      await asyncio.gather(*map(_pass_on, streams, sinks))
      return await asyncio.to_thread(self._popen.wait)  # it has closed its output
    except BaseException:
      self.kill()
      raise
    finally:
      for pipe in pipes:
        pipe.close()

  def kill(self) -> None:
    """Kills the program and what it has started in its session."""
    if self._popen.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._popen.pid, signal.SIGKILL)


async def _reader(pipe) -> asyncio.StreamReader:
  stream = asyncio.StreamReader()
  loop = asyncio.get_running_loop()
  protocol = asyncio.StreamReaderProtocol(stream)
  await loop.connect_read_pipe(lambda: protocol, pipe)
  return stream


async def _pass_on(stream: asyncio.StreamReader, sink) -> None:
  while block := await stream.read(1 << 16):
    sink(block)


def start(engine: str, *arguments: str) -> Process:
  """Starts a command of the engine."""
  return Process((engine, *arguments), environment())


async def run(
  engine: str, *arguments: str, timeout_s: float = START_S, offline: bool = False
) -> Done:
  """Runs a command of the engine to its end; keeps the last bytes of its output.

  Args:
    engine, arguments: the command.
    timeout_s: time for it.
    offline: in a network namespace with nothing in it.
  """
  command = *(('unshare', '--net') if offline else ()), engine, *arguments
  kept = _Tail(), _Tail()
  late, code = False, -1
  try:
    async with asyncio.timeout(timeout_s):
      code = await start(*command).communicate(*(k.add for k in kept))
  except TimeoutError:
    late = True
  return Done(code, *(k.text() for k in kept), late)


class _Tail:
  """The last bytes of a stream."""

  def __init__(self):
    self._kept = b''

  def add(self, block: bytes) -> None:
    self._kept = (self._kept + block)[-_OUTPUT_BYTES:]

  def text(self) -> str:
    return self._kept.decode(errors='replace')


async def checked(engine: str, *arguments: str, timeout_s: float = START_S) -> str:
  """The output of a command of the engine that has to succeed.

  Raises:
    SandboxError: it failed; the message has the end of its words.
  """
  done = await run(engine, *arguments, timeout_s=timeout_s)
  if done.returncode or done.late:
    why = f'no end in {timeout_s:g} s' if done.late else done.stderr.strip()[-400:]
    raise api.SandboxError(f'{engine} {arguments[0]}: {why}')
  return done.stdout.strip()


async def images(engine: str, repository: str) -> list[str]:
  """Local images of exactly one repository, with their tags.

  Raises:
    SandboxError: the engine does not list them.
  """
  command = 'images', '--format', '{{.Repository}}:{{.Tag}}', repository
  names = (await checked(engine, *command)).split()
  # Other names of the same images are listed too.
  return [name for name in names if name.startswith(f'{repository}:')]
