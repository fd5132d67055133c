"""Makes an image of a container's files.

`podman commit` (4.3, with layers whose ids the kernel maps) keeps the ids that files of
a container with a map of users have outside, which nobody has in the next container.
With podman the files are therefore exported, get their ids of the container, and are
imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import tarfile

from m2jax.sandbox import api
from m2jax.sandbox.containers import engines
from m2jax.sandbox.containers.enforcement import UIDS

_COMMIT_S = 600.0


async def commit(engine: str, container: str, image: str) -> None:
  """Makes `image` of a container's files and the settings of its image.

  Raises:
    SandboxError: the engine failed.
  """
  if engine != 'podman':
    command = 'commit', '--pause=true', container, image
    await engines.checked(engine, *command, timeout_s=_COMMIT_S)
    return
  words = 'container', 'inspect', '--format={{json .Config}}', container
  changes = _changes(json.loads(await engines.checked(engine, *words)))
  await asyncio.to_thread(_copy, container, image, changes)


def _changes(config: dict) -> list[str]:
  """Options of `import`, for what the container had of its image and its start."""
  lines = [f'ENV {pair}' for pair in config.get('Env') or () if '\n' not in pair]
  return [f'--change={line}' for line in lines]


def _copy(container: str, image: str, changes: list[str]) -> None:
  _, low, count = map(int, UIDS.split(':'))

  def inner(number: int) -> int:
    return number - low if low <= number < low + count else number

  options = dict(env=engines.environment(), start_new_session=True)
  options['stderr'] = subprocess.PIPE
  export = ['podman', 'export', container]
  load = ['podman', 'import', '--quiet', *changes, '-', image]
  with contextlib.ExitStack() as stack:

    def started(command, **pipes):
      process = stack.enter_context(subprocess.Popen(command, **options, **pipes))
      stack.callback(process.kill)
      return process

    source = started(export, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    target = started(load, **pipes)
    codec = dict(encoding='utf-8', errors='surrogateescape')
    failed = ''
    try:
      with (
        tarfile.open(fileobj=source.stdout, mode='r|', **codec) as old,
        tarfile.open(
          fileobj=target.stdin, mode='w|', format=tarfile.PAX_FORMAT, **codec
        ) as new,
      ):
        for entry in old:
          old.members.clear()
          new.members.clear()
          entry.uid, entry.gid = inner(entry.uid), inner(entry.gid)
          for key in ('uid', 'gid'):
            entry.pax_headers.pop(key, None)
          new.addfile(entry, old.extractfile(entry) if entry.isreg() else None)
      target.stdin.close()
    except (OSError, tarfile.TarError) as error:
      failed = str(error)
      source.kill()
      with contextlib.suppress(OSError):
        target.stdin.close()
    source.stdout.close()
    words = source.stderr.read() + target.stderr.read()
    if source.wait() or target.wait() or failed:
      text = words.decode(errors='replace').strip()[-400:]
      raise api.SandboxError(f'podman export or import: {failed} {text}'.strip())
