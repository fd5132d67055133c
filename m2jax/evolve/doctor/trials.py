"""Trials of a patch: the user's tests, and the rerun, each in a sandbox of its own.

Backend 'namespaces': no network, and of this machine the interpreter, its packages and
m2jax, read only. The worktree is copied into the sandbox; what comes back of a rerun
are its records and its log, as untrusted as those of any run: the patched code wrote
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence

import m2jax
from m2jax import sandbox
from m2jax.evolve.doctor import verify
from m2jax.observe import metrics, printable

WORKSPACE = '/workspace'
_PLACE = '.verify'  # the rerun's workdir in it
_M2JAX = '/opt/m2jax'
_PACKAGES = 'm2jax', 'm2jax_pipelines', 'experiments', 'configs'
_BACK = metrics.FILE_NAME, verify.LOG, verify.POOL, 'config.json', 'tokenizer.json'
_TAIL_CHARS = 2000
_MAX_BACK_BYTES = 512 << 20  # of a file, which is read into memory


@dataclasses.dataclass(frozen=True)
class Tests:
  """Outcome of the user's tests.

  Attributes:
    passed: exit status 0.
    tail: the end of their output.
  """

  passed: bool
  tail: str


def run_tests(worktree: pathlib.Path, command: str, minutes: float) -> Tests:
  """Runs a command of the user in the worktree.

  Raises:
    SandboxUnavailable: this machine has no sandbox.
  """
  try:
    done, _ = _run(worktree, command, minutes * 60)
  except (sandbox.WorkspaceFull, sandbox.SandboxPathError) as error:
    return Tests(False, f'the worktree cannot be copied into the sandbox: {error}')
  words = 'the time is over\n' if done.timed_out else ''
  text = printable.printable(done.stdout + done.stderr)[-_TAIL_CHARS:]
  return Tests(done.returncode == 0, words + text)


def rerun(
  worktree: pathlib.Path, plan: verify.Plan, module: str, minutes: float
) -> int:
  """Runs the job from the patched worktree; its exit status, as of `until`.

  Records and log are in `plan.workdir` afterwards.

  Raises:
    SandboxUnavailable: this machine has no sandbox.
  """
  place = f'{WORKSPACE}/{_PLACE}'
  inside = verify.command(
    plan,
    module,
    minutes * 60,
    workdir=place,
    python=_python(),
    script=f'{_M2JAX}/m2jax/evolve/doctor/until.py',
  )
  text = f'{shlex.join(inside)} > {place}/{verify.LOG} 2>&1'
  back = [f'{_PLACE}/{name}' for name in _BACK]
  done, files = _run(worktree, text, minutes * 60 + 60, plan.workdir, back)
  for name, data in files.items():
    (plan.workdir / pathlib.PurePath(name).name).write_bytes(data)
  return verify.until.OVER if done.timed_out else done.returncode


def _run(
  worktree: pathlib.Path,
  command: str,
  seconds: float,
  workdir: pathlib.Path | None = None,
  back: Sequence[str] = (),
) -> tuple[sandbox.ExecResult, dict[str, bytes]]:
  """The result of a command, and the files `back` that it left."""
  memory_bytes = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  limits = sandbox.Limits(
    cpu_s=max(1, int(seconds)) * (os.cpu_count() or 1),
    memory_bytes=memory_bytes,
    processes=1024,
    output_bytes=1 << 20,
    file_bytes=1 << 30,
    workspace_bytes=min(4 << 30, memory_bytes // 4),
    wall_s=seconds,
  )
  env = {
    'PYTHONPATH': f'{WORKSPACE}:{_M2JAX}',
    'PYTHONDONTWRITEBYTECODE': '1',
    'JAX_PLATFORMS': 'cpu',
  }

  async def run(staged: pathlib.Path):
    box = await sandbox.create(
      staged, limits=limits, env=env, host=sandbox.Host(read_only=_trees())
    )
    try:
      done = await box.exec(command)
      files = {}
      for name in back:
        with contextlib.suppress(FileNotFoundError, sandbox.SandboxPathError):
          files[name] = await box.read(name, _MAX_BACK_BYTES)
      return done, files
    finally:
      await box.destroy()
      await sandbox.shutdown()

  with tempfile.TemporaryDirectory(prefix='m2jax-trial-') as parent:
    staged = pathlib.Path(parent) / 'files'
    shutil.copytree(
      worktree, staged, symlinks=True, ignore=shutil.ignore_patterns('.git')
    )
    if workdir is not None:
      shutil.copytree(workdir, staged / _PLACE, symlinks=True)
    return asyncio.run(run(staged))


def _python() -> str:
  return f'{sys.prefix}/bin/python3'


def _trees() -> tuple[tuple[str, str], ...]:
  """The interpreter, its packages and m2jax, where the sandbox does not have them."""
  prefixes = dict.fromkeys((sys.prefix, sys.base_prefix))
  trees = [(p, p) for p in prefixes if not pathlib.Path(p).is_relative_to('/usr')]
  root = pathlib.Path(m2jax.__file__).parents[1]
  packages = [name for name in _PACKAGES if (root / name).is_dir()]
  return (*trees, *((str(root / name), f'{_M2JAX}/{name}') for name in packages))
