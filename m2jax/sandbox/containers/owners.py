"""Containers and images of a process go when it ends, or with the next one's start.

The name of each has its owner: the boot, the process namespace, the process and its
start time. A process that ends removes what is left of its own; one that was killed
cannot, and the next one that makes a container removes what dead owners have left.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import subprocess
from pathlib import Path

from m2jax.sandbox.containers import engines

SNAPSHOTS = 'localhost/m2jax/snapshot'
_PREFIX = 'm2jax-'
_FIELDS = 6  # m2jax, boot, namespace, process, start time, random


def new_name() -> str:
  """A new name of this process, for a container or a snapshot."""
  return f'{_owner(os.getpid())}-{secrets.token_hex(8)}'


@functools.cache
def _boot() -> str:
  return Path('/proc/sys/kernel/random/boot_id').read_text().strip().replace('-', '')


def _owner(process: int) -> str:
  space = os.stat('/proc/self/ns/pid').st_ino
  return f'{_PREFIX}{_boot()}-{space}-{process}-{_started(process)}'


def _started(process: int) -> str:
  """A process's start time in ticks; '' if there is none."""
  try:
    stat = Path(f'/proc/{process}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return ''
  return stat.rpartition(')')[2].split()[19]  # proc(5): field 22; 2 is the name


def is_dead(name: str) -> bool:
  """Whether the owner in a name is known to have ended."""
  fields = name.split('-')
  if len(fields) != _FIELDS or not fields[3].isdigit():
    return False
  _, boot, space, process, started, _ = fields
  if boot != _boot():
    return True
  here = space == str(os.stat('/proc/self/ns/pid').st_ino)
  return here and _started(int(process)) != started


@functools.cache
def _left(process: int, engine: str) -> set[tuple[str, str]]:
  """(command, name) of what this process has to remove; a fork has none."""
  left = set()
  atexit.register(_remove_left, process, engine, left)
  return left


def keep(engine: str, kind: str, name: str) -> None:
  """Has a container ('rm') or an image ('rmi') removed when this process ends."""
  engines.environment()
  _left(os.getpid(), engine).add((kind, name))


def removed(engine: str, kind: str, name: str) -> None:
  """Tells that something of `keep` is no more."""
  _left(os.getpid(), engine).discard((kind, name))


def _remove_left(process: int, engine: str, left: set[tuple[str, str]]) -> None:
  if os.getpid() != process:
    return
  for kind, name in sorted(left):  # containers before their images
    subprocess.run(
      [engine, kind, '--force', name],
      env=engines.environment(),
      stdin=subprocess.DEVNULL,
      capture_output=True,
      timeout=engines.START_S,
    )


async def sweep(engine: str) -> None:
  """Removes containers and snapshots whose owners are dead; never others.

  Raises:
    SandboxError: the engine does not list them.
  """
  names = ['ps', '--all', '--filter', f'name={_PREFIX}', '--format', '{{.Names}}']
  for name in (await engines.checked(engine, *names)).split():
    if is_dead(name):
      await engines.run(engine, 'rm', '--force', '--volumes', name)
  for image in await engines.images(engine, SNAPSHOTS):
    if is_dead(image.rpartition(':')[2]):
      await engines.run(engine, 'rmi', '--force', image)
