"""Creates sandboxes; starts and tests their supervisor once.

Fails closed: before the first sandbox is returned, a command in one tries actions that
must fail.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from m2jax.sandbox import api, client, containers, unavailable
from m2jax.sandbox import sandbox as sandbox_lib

_PATH = '/usr/local/bin:/usr/bin:/bin'
_SELF_TEST = r"""
fail() { echo "$1"; exit 1; }
[ ! -w /proc/sys/kernel/core_pattern ] || fail 'the host /proc/sys is writable'
for place in / /usr /etc; do
  (: > $place/self-test) 2>/dev/null && fail "$place is writable"
done
[ $$ -lt 16 ] || fail 'processes of the host are visible'
while read -r name _; do
  case $name in *:) [ "$name" = lo: ] || fail "network interface $name";; esac
done < /proc/net/dev
while read -r name value; do
  [ "$name" != Seccomp: ] || [ "$value" -ge "$FILTER" ] || fail 'no system call filter'
done < /proc/self/status
[ $$ = 1 ] || [ ! -e /proc/1/mem ] || fail 'process 1 is accessible'
(exit 0) || fail 'cannot fork'
echo ready > self-test && [ "$(ulimit -Hu)" = "$PROCESSES" ] || fail 'no process limit'
"""

# (id of the loop, backend, host) -> (loop, supervisor being started or running)
_supervisors: dict[tuple, tuple[asyncio.AbstractEventLoop, asyncio.Task]] = {}


async def create(
  workspace: Path | str | None = None,
  *,
  contents: Mapping[str, bytes] | None = None,
  backend: str = 'namespaces',
  limits: api.Limits | None = None,
  env: Mapping[str, str] | None = None,
  host: api.Host | None = None,
  image: str | containers.Container | None = None,
) -> sandbox_lib.Sandbox | containers.ContainerSandbox:
  """Creates a sandbox; takes about a millisecond after the first one.

  Args:
    workspace: directory to copy into the workspace. Symbolic links are copied as links,
      never followed.
    contents: relative path -> content of further initial files.
    backend: 'namespaces', the experimental 'gvisor', or the weaker 'rlimit_only'; with
      an image 'podman' or 'docker', which take about a second, or 'harbor:NAME'.
    limits: the sandbox's limits.
    env: environment variables in addition to PATH, HOME, LANG, TERM and USER.
    host: use of this machine.
    image: of a container: an image's name, or that with its network, user and so on.

  Raises:
    ValueError: the backend is unknown, needs an image, or takes none.
    SandboxUnavailable: this machine does not support it; says how to fix that.
    SandboxPathError: a name in `contents` leaves the workspace, or a file of the
      directory cannot be read.
    WorkspaceFull: the files do not fit into `limits.workspace_bytes`.
  """
  known = api.BACKENDS + api.CONTAINERS
  if backend not in known and not backend.startswith('harbor:'):
    raise ValueError(f'backend={backend!r}: must be one of {known}, or harbor:NAME')
  if (image is None) != (backend in api.BACKENDS):
    needs = 'needs image=NAME' if image is None else f'takes no image: {image!r}'
    raise ValueError(f'backend={backend!r} {needs}')
  if image is not None:
    container = containers.Container(image) if isinstance(image, str) else image
    options = dict(limits=limits, env=env, host=host)
    sandbox = await containers.create(container, engine=backend, **options)
    return await _filled(sandbox, workspace, contents)
  limits = limits or api.Limits()
  host = host or api.Host(read_only=api.default_python())
  supervisor = await _supervisor(backend, host)
  sandbox = await _open(supervisor, backend, limits, env or {}, host)
  return await _filled(sandbox, workspace, contents)


async def _filled(sandbox, workspace, contents):
  """Writes a sandbox's initial files, or destroys it."""
  try:
    if workspace is not None:
      await sandbox.fill(Path(workspace))
    for name, data in (contents or {}).items():
      await sandbox.write(name, data)
  except BaseException:
    await sandbox.destroy()
    raise
  return sandbox


async def _open(supervisor, backend, limits, env, host) -> sandbox_lib.Sandbox:
  inside = {
    'PATH': ':'.join([*(f'{place}/bin' for _, place in host.read_only), _PATH]),
    'HOME': '/workspace',
    'LANG': 'C.UTF-8',
    'TERM': 'dumb',
    'USER': 'agent',
    **env,
  }
  if backend == 'rlimit_only':
    inside['PATH'] = f'{_PATH}:{sys.base_prefix}/bin'
    inside['HOME'] = env.get('HOME', '/tmp')
  values = {name: getattr(limits, name) for name in limits.__dataclass_fields__}
  opening = asyncio.ensure_future(supervisor.call('open', values, inside))
  try:
    number, path, uid = await asyncio.shield(opening)
  except asyncio.CancelledError:
    opening.add_done_callback(lambda done: _close_unwanted(supervisor, done))
    raise
  if backend != 'rlimit_only':
    path = supervisor.root / path.lstrip('/')
  return sandbox_lib.Sandbox(supervisor, backend, limits, number, Path(path), uid)


def _close_unwanted(supervisor: client.Supervisor, opening: asyncio.Future) -> None:
  """Closes a sandbox whose caller has stopped waiting for it."""
  if not opening.cancelled() and opening.exception() is None:
    supervisor.notify('close', opening.result()[0])


async def _supervisor(backend: str, host: api.Host) -> client.Supervisor:
  """Returns this loop's supervisor; starts and tests it the first time."""
  loop = asyncio.get_running_loop()
  for key, (other, task) in list(_supervisors.items()):
    if other.is_closed():
      del _supervisors[key]
      if task.done() and not task.cancelled() and not task.exception():
        task.result().abandon()
  key = (id(loop), backend, host)
  _, task = _supervisors.get(key, (None, None))
  if task is None or task.done() and (task.exception() or not task.result().alive):
    task = loop.create_task(_start_supervisor(backend, host))
    _supervisors[key] = (loop, task)
  return await asyncio.shield(task)


async def _start_supervisor(backend: str, host: api.Host) -> client.Supervisor:
  unavailable.check_machine(backend)
  supervisor = client.Supervisor()
  try:
    await supervisor.start(backend, host)
    if backend != 'rlimit_only':
      await _self_test(supervisor, backend, host)
  except api.SandboxUnavailable:
    await supervisor.close()
    raise
  except (api.SandboxError, OSError) as error:
    await supervisor.close()
    raise unavailable.explained(str(error)) from error
  except BaseException:
    await supervisor.close()
    raise
  return supervisor


async def _self_test(
  supervisor: client.Supervisor, backend: str, host: api.Host
) -> None:
  """Runs a command that tries actions which must fail."""
  limits = api.Limits(processes=16, wall_s=10.0)
  env = {
    'PROCESSES': str(limits.processes),
    'FILTER': '2' if supervisor.found['filter'] else '0',  # SECCOMP_MODE_FILTER
  }
  sandbox = await _open(supervisor, backend, limits, env, host)
  try:
    result = await sandbox.exec(_SELF_TEST)
    if result.returncode != 0:
      raise api.SandboxError(result.stdout + result.stderr or 'a command timed out')
    # This process must see the file that the command wrote.
    await sandbox.read('self-test')
  finally:
    await sandbox.destroy()


async def shutdown() -> None:
  """Ends this event loop's supervisors and all their sandboxes."""
  loop = asyncio.get_running_loop()
  for key, (other, task) in list(_supervisors.items()):
    if other is loop:
      del _supervisors[key]
      await asyncio.wait([task])  # one that failed or was cancelled has already exited
      if not task.cancelled() and not task.exception():
        await task.result().close()
