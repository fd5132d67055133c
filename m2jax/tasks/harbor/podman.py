"""Judges a task in containers of podman, made from its own Dockerfile.

For tasks whose environment is more than a directory of packages, and as a check that a
task works where Harbor runs it. The agent's container has no network while it works;
when it is dead its work is read from its file system, and judged in a new container,
which sees tree and tests read-only (`verifier`). Root in a container is an unprivileged
user outside; podman itself must run as root. facts/pipelines.md §1.3.

    python -m m2jax.tasks.harbor.podman workdir/swe/tasks/train/NAME [--attempt=SCRIPT]

runs the task's solution, or the commands of a file, and prints the verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from m2jax import sandbox
from m2jax.observe import console
from m2jax.tasks.harbor import compose, verifier
from m2jax.tasks.harbor.directory import BadTask, Directory, read

INSTALL = 'apt-get install --no-install-recommends podman runc'
_UIDS = '0:300000:65536'  # sandboxes have those below
_OUTPUT_BYTES = 64 << 10
_START_S, _BUILD_S = 60.0, 1800.0
# Some images have no bash.
_SHELL = 'command -v bash >/dev/null && exec bash "$0" || exec sh "$0"'
_CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc={processes}:{processes}"]
log_driver = "none"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


class _Logs:
  """A directory as the `box` of `verifier.verdict`."""

  def __init__(self, root: Path):
    self._root = root

  async def read(self, path: str, limit: int) -> bytes:
    found = self._root / path.partition('/')[2]
    if found.is_symlink() or found.exists() and not found.is_file():
      raise sandbox.SandboxPathError(f'{path} is not a regular file')
    with open(found, 'rb') as file:
      return file.read(limit)


@contextlib.contextmanager
def settings() -> Iterator[dict[str, str]]:
  """The environment of podman: limits that this process may set, and runc.

  crun fails under hybrid control groups, and the default limits need CAP_SYS_RESOURCE.
  """
  with tempfile.TemporaryDirectory() as place:
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    conf = Path(place, 'containers.conf')
    conf.write_text(_CONF.format(processes=4096 if most < 0 else min(most, 4096)))
    yield {**os.environ, 'CONTAINERS_CONF': str(conf)}


def unavailable() -> str:
  """'' if podman is here and answers, or why not and what to run."""
  if not shutil.which('podman') or not shutil.which('runc'):
    return f'no podman: {INSTALL}'
  if os.geteuid():
    return 'podman: not root, so that files of containers cannot be read'
  with settings() as env:
    done = _run(['podman', 'info'], env, _START_S)
  return f'podman info: {done.stderr.strip()[-300:]}' if done.returncode else ''


def _run(command, env, timeout_s, **options) -> sandbox.ExecResult:
  """Runs a command; keeps the first bytes of its output. Its time is bounded."""
  started = time.monotonic()
  kept = {'stdout': b'', 'stderr': b''}
  with subprocess.Popen(
    command,
    env=env,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    **options,
  ) as process:

    def drain(name):
      while block := getattr(process, name).read1(1 << 16):
        kept[name] = (kept[name] + block)[:_OUTPUT_BYTES]

    threads = [threading.Thread(target=drain, args=(name,)) for name in kept]
    for thread in threads:
      thread.start()
    try:
      code, late = process.wait(timeout_s), False
    except subprocess.TimeoutExpired:
      process.kill()
      code, late = 124, True
    for thread in threads:
      thread.join()
  texts = {name: data.decode('utf-8', 'replace') for name, data in kept.items()}
  wall_s = time.monotonic() - started
  return sandbox.ExecResult(code, **texts, wall_s=wall_s, timed_out=late)


def _checked(command, env, timeout_s=_START_S) -> sandbox.ExecResult:
  done = _run(command, env, timeout_s)
  if done.returncode:
    raise sandbox.SandboxError(f'{" ".join(command[:3])}: {done.stderr.strip()[-400:]}')
  return done


def build(directory: Directory, env: dict[str, str], network: str = 'host') -> str:
  """Builds the image of a task's Dockerfile; returns its name.

  Raises:
    SandboxError: it cannot be built.
  """
  image = f'localhost/m2jax/{directory.path.name.lower()}'
  context = str(directory.path / 'environment')
  command = ['podman', 'build', '--network', network, '-t', image, context]
  _checked(command, env, _BUILD_S)
  return image


def _container(image: str, limits: sandbox.Limits) -> list[str]:
  """Options of a container without network or privileges, and its image last."""
  memory = str(limits.memory_bytes)
  options = ['--network', 'none', '--memory', memory, '--memory-swap', memory]
  options += ['--pids-limit', str(limits.processes), '--cap-drop', 'ALL']
  options += ['--security-opt', 'no-new-privileges', '--pull', 'never']
  return [*options, '--uidmap', _UIDS, '--gidmap', _UIDS, '--entrypoint', '', image]


def _workspace(name: str, env) -> Path:
  """A container's /workspace, as a path of this machine."""
  root = Path(_checked(['podman', 'mount', name], env).stdout.strip())
  return root / 'workspace'


def _work(name: str, directory: Directory, env) -> dict[str, bytes]:
  """The agent's work, read from the file system of its dead container.

  Raises:
    compose.Rejected: it is too large.
  """
  policy = directory.metadata.collect, directory.metadata.exclude
  return compose.gather(_workspace(name, env), *policy)


def attempt(
  directory: Directory,
  script: str | None = None,
  *,
  network: str = 'host',
) -> verifier.Verdict:
  """The verdict on a script's work in the task's container; None is the solution.

  Args:
    directory: the task.
    script: commands of a shell in /workspace.
    network: network of the build, which may have to install packages.
  """
  limits = sandbox.Limits(memory_bytes=2 << 30, wall_s=600.0)
  name = f'm2jax-{secrets.token_hex(8)}'
  with settings() as env:
    try:
      image = build(directory, env, network)
      start = ['podman', 'run', '--detach', '--name', name]
      _checked([*start, *_container(image, limits), 'sleep', '86400'], env)
      # podman makes an empty WORKDIR as the user 0 of this machine, not of the image.
      os.chown(_workspace(name, env), *[int(_UIDS.split(':')[1])] * 2)
      shell = ['podman', 'exec', '--workdir', '/workspace', name]
      if script is None:
        _checked(['podman', 'cp', f'{directory.path}/solution', f'{name}:/'], env)
        words = ['M2JAX_SOLUTION=/solution', 'M2JAX_WORKSPACE=/workspace']
        shell += ['env', *words, 'sh', '-c', _SHELL, '/solution/solve.sh']
      else:
        shell += ['sh', '-c', script]
      _run(shell, env, limits.wall_s)
      _checked(['podman', 'kill', name], env)  # before its files are read
      return _judge(directory, _work(name, directory, env), image, env, limits)
    except compose.Rejected as error:
      return verifier.Verdict(verifier.FAILED, reason=str(error))
    except (sandbox.SandboxError, OSError) as error:
      return verifier.Verdict(verifier.INVALID, reason=f'infrastructure: {error}')
    finally:
      _run(['podman', 'rm', '--force', name], env, _START_S)


def _judge(directory, work, image, env, limits) -> verifier.Verdict:
  metadata = directory.metadata
  if metadata.run or metadata.listing:
    raise sandbox.SandboxError('programs and listings are only judged in the sandbox')
  name = f'm2jax-{secrets.token_hex(8)}'
  with tempfile.TemporaryDirectory() as root:
    place, hidden, logs = (Path(root, n) for n in ('judged', 'hidden', 'logs'))
    Path(root).chmod(0o711)
    verifier.lay_out(directory, verifier.judged_tree(directory, work), place, hidden)
    logs.mkdir()
    logs.chmod(0o777)
    command = ['podman', 'run', '--name', name, '--read-only']
    tests = f'/{secrets.token_hex(16)}'
    mounts = {place: '/verifier:ro', hidden: f'{tests}:ro', logs: '/logs/verifier'}
    for source, target in mounts.items():
      command += ['--volume', f'{source}:{target}']
    places = {'TREE': '/verifier/tree', 'TESTS': f'{tests}/tests', 'SITE': ''}
    for key, value in {**places, 'LOGS': '/logs/verifier'}.items():
      command += ['--env', f'M2JAX_{key}={value}']
    command += [*_container(image, limits), 'sh', '-c', _SHELL]
    try:
      result = _run([*command, f'{tests}/tests/test.sh'], env, directory.verifier_s)
    finally:
      _run(['podman', 'rm', '--force', name], env, _START_S)
    if result.returncode == 125:  # podman's own failure
      raise sandbox.SandboxError(result.stderr.strip()[-400:])
    return asyncio.run(verifier.verdict(_Logs(logs), result))


def main(argv=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('task', type=Path, help='task directory')
  parser.add_argument('--attempt', type=Path, help='commands instead of the solution')
  options = parser.parse_args(argv)
  console.install()
  if reason := unavailable():
    print(reason, file=sys.stderr)
    return 2
  try:
    script = options.attempt.read_text() if options.attempt else None
    verdict = attempt(read(options.task), script)
  except (BadTask, FileNotFoundError) as error:
    print(error, file=sys.stderr)
    return 2
  print(f'{verdict.outcome} {verdict.reward:g} {verdict.reason}'.strip())
  return 0 if verdict.outcome == verifier.PASSED else 1


if __name__ == '__main__':
  sys.exit(main())
