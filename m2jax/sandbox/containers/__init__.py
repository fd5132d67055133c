"""Sandboxes in containers: `create` starts one from an image of this machine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from m2jax.sandbox import api
from m2jax.sandbox.containers import engines, harbor_provider, owners
from m2jax.sandbox.containers.box import Container as Container
from m2jax.sandbox.containers.box import ContainerSandbox as ContainerSandbox

_swept: set[str] = set()


async def create(
  container: Container,
  *,
  engine: str = 'podman',
  limits: api.Limits | None = None,
  env: Mapping[str, str] | None = None,
  contents: Mapping[str, bytes] | None = None,
  host: api.Host | None = None,
) -> ContainerSandbox | harbor_provider.HarborSandbox:
  """Starts a container; takes about a second.

  Args:
    container: its image, network and user.
    engine: 'podman' or 'docker'; or 'harbor:NAME', a provider of Harbor, which has what
      `harbor_provider` says.
    limits: of `workspace_bytes` only what is read and copied out is limited: nothing
      limits what a container writes to the disk but `file_bytes`, for each file.
    env: environment variables in addition to those of the image.
    contents: path -> content of files to write first.
    host: its `read_only` directories are the container's too.

  Raises:
    SandboxUnavailable: this machine does not support it; says how to fix that.
    SandboxError: the image is missing, has no shell, or the engine failed.
  """
  limits = limits or api.Limits()
  if host is not None and host.read_only:
    shared = (*host.read_only, *container.read_only)
    container = dataclasses.replace(container, read_only=shared)
  if engine.startswith(harbor_provider.PREFIX):
    provider = engine.removeprefix(harbor_provider.PREFIX)
    sandbox = await harbor_provider.create(provider, container, limits, env or {})
  else:
    await _prepare(engine)
    sandbox = ContainerSandbox(engine, container, limits, env or {})
    await sandbox.start()
  try:
    if contents:
      await sandbox.copy_in(contents)
  except BaseException:
    await sandbox.destroy()
    raise
  return sandbox


async def _prepare(engine: str) -> None:
  """Checks the engine and removes what dead processes have left, once."""
  if engine in _swept:
    return
  if reason := await asyncio.to_thread(engines.unavailable, engine):
    words, _, fix = reason.rpartition(': ')
    raise api.SandboxUnavailable(words, fix)
  if engine not in _swept:
    _swept.add(engine)
    await owners.sweep(engine)
