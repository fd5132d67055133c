"""Prints what the sandbox enforces here: `python -m m2jax.sandbox [BACKEND]`.

    python -m m2jax.sandbox podman --image=NAME

If the backend cannot be used, exits with 1 and prints a command that fixes it to
standard error. With --quick only this is tested, not each limit. With --install a
missing libseccomp is first installed by the system's package manager, if the user is
allowed to.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from m2jax import sandbox
from m2jax.sandbox import api, unavailable


async def _report(backend: str, quick: bool, image: str | None) -> str:
  try:
    if quick:
      box = await sandbox.create(backend=backend, image=image)
      await box.destroy()
      return f'sandbox {backend}: ready'
    return _table(await sandbox.capabilities(backend, image=image))
  finally:
    await sandbox.shutdown()


def _table(capabilities: sandbox.Capabilities) -> str:
  lines = [f'sandbox {capabilities.backend}', 'isolation:']
  for name, holds in capabilities.isolation.items():
    lines.append(f'  {name:20} {"yes" if holds else "NO"}')
  lines.append('limits:')
  for name, mechanism in capabilities.limits.items():
    lines.append(f'  {name:20} {mechanism or "NOT ENFORCED"}')
  lines += [f'note: {note}' for note in capabilities.notes]
  return '\n'.join(lines)


def main() -> int:
  """Returns the exit status."""
  parser = argparse.ArgumentParser(prog='python -m m2jax.sandbox', description=__doc__)
  backends = api.BACKENDS + api.CONTAINERS
  parser.add_argument('backend', nargs='?', default='namespaces', choices=backends)
  parser.add_argument('--image', help='of a container')
  parser.add_argument('--quick', action='store_true')
  parser.add_argument('--install', action='store_true')
  arguments = parser.parse_args()
  if (arguments.image is None) == (arguments.backend in api.CONTAINERS):
    parser.error('--image is for a container, which needs one')
  try:
    if arguments.install and arguments.backend == 'namespaces':
      unavailable.install()
    print(asyncio.run(_report(arguments.backend, arguments.quick, arguments.image)))
  except sandbox.SandboxError as error:
    print(error, file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
