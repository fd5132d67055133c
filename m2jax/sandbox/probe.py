"""Tests what a sandbox enforces on this machine by attacking each property once.

A limit counts as enforced only if a command that tried to exceed it was stopped.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import tempfile
from collections.abc import Mapping

from m2jax.sandbox import api, containers, creation

_MIB = 1 << 20


async def capabilities(
  backend: str = 'namespaces',
  host: api.Host | None = None,
  image: str | containers.Container | None = None,
) -> api.Capabilities:
  """Tries every isolation property and every limit; takes about two seconds.

  Args:
    backend: one of those of `create`; each trial of a container takes a second more.
    host: use of this machine.
    image: image of a container; needs bash and coreutils.

  Raises:
    SandboxUnavailable: the backend cannot be used here at all.
  """
  create = functools.partial(creation.create, backend=backend, host=host, image=image)
  box = await create()
  found = box.supervisor_facts if image is None else None
  await box.destroy()
  isolation, apart, *held = await asyncio.gather(
    _isolation(create, image is not None),
    _neighbours(create),
    *(trial(create) for trial in _TRIALS.values()),
  )
  words = _mechanisms(found) if found else _CONTAINERS
  limits = {
    name: words[name] if ok else None for name, ok in zip(_TRIALS, held, strict=True)
  }
  isolation['neighbours'] = apart
  notes = _notes(backend, found) if found else (_CONTAINER_NOTE,)
  if backend == 'gvisor' and (await _run(create, 'stat .'))[0].returncode:
    notes += ('this runsc is older than the flags of `ls` and `stat`, which fail',)
  return api.Capabilities(backend, isolation, limits, notes)


def _mechanisms(found: Mapping) -> dict[str, str | None]:
  grouped = found['cgroups'] != 'none'
  memory = f'cgroup {found["cgroups"]}, all processes together'
  if grouped and not found['counts_swap']:
    memory += ', swap not counted'
  return {
    'cpu_s': 'rlimit, each process',
    'memory_bytes': memory
    if grouped
    else None,  # one process's rlimit is not the sandbox's
    'processes': 'rlimit and cgroup' if grouped else 'rlimit',
    'output_bytes': 'truncated while it is read',
    'file_bytes': 'rlimit',
    'workspace_bytes': 'size of a private in-memory file system',
    'wall_s': 'killed by the supervisor',
  }


def _notes(backend: str, found: Mapping) -> tuple[str, ...]:
  notes = []
  if backend == 'rlimit_only':
    notes.append('weaker mode: commands see the files and the network of the host')
  elif found['cgroups'] == 'none':
    notes.append(
      f'no control groups ({found["cgroups_reason"]}): memory_bytes limits the address '
      'space of each process, not all of them together'
    )
  if backend == 'namespaces' and not found['filter']:
    notes.append(
      f'no filter of system calls ({found["filter_reason"]}); '
      '`python -m m2jax.sandbox --install` installs libseccomp'
    )
  if not found['root']:
    notes.append('all sandboxes run under your own uid; as root, each has its own')
  return tuple(notes)


async def _isolation(create, container: bool) -> dict[str, bool]:
  with (
    socket.create_server(('127.0.0.1', 0)) as server,
    tempfile.NamedTemporaryFile(dir='/tmp') as secret,
  ):
    os.chmod(secret.name, 0o644)
    # Whether system calls reach the kernel of this machine.
    kernel = f'[ "$(uname -r)" = {os.uname().release} ]'
    questions = {  # succeeds -> the property does not hold
      'network': f'exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}',
      'host files': f'cat {secret.name}',
      'host processes': f'[ -e /proc/{os.getpid()}/comm ]',
      'host settings': 'echo > /proc/sys/vm/drop_caches',
      'system directories': 'touch /usr/m2jax-probe /etc/m2jax-probe',
      'new namespaces': f'{kernel} && unshare -Ur true',
      'process 1': '[ $$ != 1 ] && exec 3<>/proc/1/mem',
      # RLIMIT_CORE 1 alone feeds none.
      'core dump handlers': f'{kernel} && ulimit -c 0',
      'system calls': f'{kernel} && grep -q "^Seccomp:[[:space:]]*0" /proc/self/status',
    }
    if container:
      for own in _OWN:  # its root may change them
        del questions[own]
    box = await create()
    try:
      answers = {}
      for name, attack in questions.items():
        answers[name] = (await box.exec(attack)).returncode != 0
      await box.exec('touch made-by-command')
      # RLIMIT_CORE stops files and pipes; a socket still gets the dump.
      with open('/proc/sys/kernel/core_pattern') as f:
        answers['core dump handlers'] &= not f.read().startswith('@')
      owner = (box.workspace / 'made-by-command').stat().st_uid
      answers['not root'] = owner != 0
      return answers
    finally:
      await box.destroy()


async def _neighbours(create) -> bool:
  """Whether a sandbox cannot see another's lock on a file that both read."""
  boxes = [await create() for _ in range(2)]
  lock = 'exec 9< /usr/bin/env; flock -n 9'
  holding = asyncio.create_task(boxes[0].exec(f'{lock} && touch held && sleep 5'))
  try:
    while not (boxes[0].workspace / 'held').exists():
      if holding.done():
        return False
      await asyncio.sleep(0.01)
    return (await boxes[1].exec(lock)).returncode == 0
  finally:
    holding.cancel()
    for box in boxes:
      await box.destroy()


async def _run(create, command, timeout_s=10.0, **limits):
  box = await create(limits=api.Limits(**limits))
  try:
    result = await box.exec(command, timeout_s)
    sizes = [p.stat().st_size for p in box.workspace.iterdir() if p.is_file()]
    return result, sum(sizes)
  finally:
    await box.destroy()


async def _cpu(create) -> bool:
  result, _ = await _run(create, 'while :; do :; done', cpu_s=1)
  return result.returncode != 0 and not result.timed_out


async def _memory(create) -> bool:
  # tail stores all that it may have to print.
  hog = 'set -o pipefail; head -c 200M /dev/zero | tail -c 190M | wc -c'
  result, _ = await _run(create, hog, memory_bytes=64 * _MIB)
  return result.returncode != 0 and not result.timed_out


async def _processes(create) -> bool:
  # Bash waits longer and longer after a failed fork; the first message is enough.
  many = (
    'exec 2> >(read line; echo "$line"; kill $$); for i in {1..24}; do sleep 5 & done'
  )
  # The root of a user namespace may have more.
  many = f"root='unshare -Ur'; $root true || root=; exec $root bash -c '{many}'"
  result, _ = await _run(create, many, processes=8)
  return 'fork' in result.stdout


async def _output(create) -> bool:
  result, _ = await _run(create, 'printf %09000d 1', output_bytes=1000)
  return len(result.stdout) == 1000 and result.truncated


async def _file(create) -> bool:
  fill = 'head -c 2M /dev/zero > a'
  _, size = await _run(create, fill, file_bytes=_MIB)
  return size <= _MIB


async def _workspace(create) -> bool:
  fill = 'for i in 1 2 3; do head -c 1M /dev/zero > $i; done'
  _, size = await _run(create, fill, workspace_bytes=_MIB)
  return size <= _MIB


async def _wall(create) -> bool:
  result, _ = await _run(create, 'sleep 5', 0.2)
  return result.timed_out and result.wall_s < 4.0


_CONTAINERS = {
  'cpu_s': 'rlimit, each process',
  'memory_bytes': 'cgroup, all processes together',
  'processes': 'cgroup',
  'output_bytes': 'truncated while it is read',
  'file_bytes': 'rlimit',
  'workspace_bytes': None,
  'wall_s': 'all processes killed',
}
_OWN = ('system directories', 'process 1')
_CONTAINER_NOTE = (
  'containers write to the disk of this machine: file_bytes limits each file, nothing '
  'all of them together'
)
_TRIALS = {
  'cpu_s': _cpu,
  'memory_bytes': _memory,
  'processes': _processes,
  'output_bytes': _output,
  'file_bytes': _file,
  'workspace_bytes': _workspace,
  'wall_s': _wall,
}
