"""Runs an agent's program on hidden inputs, where neither tests nor results are.

Each input gets a new sandbox with the tree to judge and the files of that input,
`tests/inputs/N/`. What the program printed is data for test.sh, which runs no code of
the agent itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from m2jax import sandbox
from m2jax.tasks.harbor import compose

_INPUTS = 'inputs/'


async def run(
  command: str,
  tree: Mapping[str, bytes],
  tests: Mapping[str, bytes],
  *,
  backend: str,
  limits: sandbox.Limits,
  host: sandbox.Host,
) -> dict[str, dict[str, Any]]:
  """Returns {N: {'stdout': text, 'ok': bool, 'unchanged': bool}}.

  `ok` says whether it ended with 0 in time, `unchanged` whether the tree and the input
  are as they were before.

  Args:
    command: a shell command.
    tree: relative path → content.
    tests: the files of tests/.
    backend, limits, host: settings of the sandboxes.

  Raises:
    compose.Rejected: the agent has a directory where an input is, or the reverse, or
      leaves no space for the input.
    SandboxError: the machine failed.
  """
  cases: dict[str, dict[str, bytes]] = {}
  for path, data in tests.items():
    if path.startswith(_INPUTS):
      number, _, inner = path.removeprefix(_INPUTS).partition('/')
      cases.setdefault(number, {})[inner] = data
  found = {}
  for number, files in sorted(cases.items()):
    contents = {p: d for p, d in tree.items() if p not in files} | files
    for path, above in compose.conflicts(contents):
      raise compose.Rejected(f'{path!a}: there is a file {above!a}, an input or yours')
    options = dict(backend=backend, limits=limits, host=host)
    async with await _filled(contents, options) as box:
      done = await box.exec(command)
      unchanged = await asyncio.to_thread(compose.unchanged, box.workspace, contents)
    good = not (done.returncode or done.timed_out or done.oom or done.truncated)
    found[number] = {'stdout': done.stdout, 'ok': good, 'unchanged': unchanged}
  return found


async def _filled(contents: Mapping[str, bytes], options) -> sandbox.Sandbox:
  try:
    return await sandbox.create(contents=contents, **options)
  except sandbox.WorkspaceFull as error:
    raise compose.Rejected('the files leave no space for an input') from error
