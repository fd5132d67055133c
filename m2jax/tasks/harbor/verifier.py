"""Runs a task's test.sh on what an agent left, where the agent cannot reach it.

The agent and its processes are gone. Its work is gathered from its workspace
(`compose`), and the tree to judge is written into a directory of the host that the
verifier's sandbox sees read-only. So no file of tests, configuration or verifier is the
agent's, and code under test can change none of them while it runs. The tests are in
another directory with a random name, to which nothing in the tree refers. test.sh is
run with

    M2JAX_TREE     the tree to judge, read-only
    M2JAX_TESTS    the task's tests/, read-only
    M2JAX_LOGS     directory for reward.txt (a number in [0, 1]) and details.json, which
                   may say why: `reason`, or `invalid` instead of a reward. Harbor has a
                   trial without a reward as an error, and reads none of the details.
                   Instead of reward.txt, Harbor's reward.json: `{"reward": 0.5}`, or
                   an object with one other number; not after the line below
    M2JAX_SITE     directory of Python packages, or empty
    M2JAX_LISTING  with `Metadata.listing`: JSON of `compose.listing`
    M2JAX_RUNS     with `Metadata.run`: JSON of `runs.run`
    M2JAX_PRIVATE  1 if nothing but test.sh writes /tmp, /dev/shm and M2JAX_LOGS

Outcome: `invalid` if the sandbox failed, or test.sh ended without a reward before it
printed a line `m2jax: ready`; after that line, which each pipeline's verifier prints
before it reads any work of the agent, an end without a reward is the agent's fault:
`failed`. If one of its processes was killed for memory and test.sh continued to its
end, its reward counts only after that line.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import functools
import json
import math
import os
import re
import secrets
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2jax import sandbox
from m2jax.sandbox import temporary
from m2jax.tasks.harbor import compose, runs
from m2jax.tasks.harbor.directory import BadTask, Directory

PASSED, FAILED, INVALID = 'passed', 'failed', 'invalid'
READY = 'm2jax: ready'
_MOUNT, _SITES = '/verifier', '/sites'
_LOGS, _LISTING, _RUNS = 'logs', 'listing.json', 'runs.json'
_MAX_REWARD_BYTES = 1 << 20
_MAX_ARCHIVE_BYTES = 1 << 30
_ARCHIVES = '.whl', '.egg', '.zip', '.pyz'
# Of files that a verifier, or code that it runs, wrote.
_UNREADABLE = (sandbox.SandboxPathError, ValueError, OverflowError, RecursionError)


class InvalidVerdict(sandbox.SandboxError):
  """The verifier could not decide; the attempt is not judged (law 5)."""


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What a verifier found.

  Attributes:
    outcome: 'passed' if the reward is 1, 'failed' below, or 'invalid'.
    reward: in [0, 1]; 0 if invalid.
    reason: why not passed; '' if passed.
    wall_s: elapsed time of test.sh.
    details: content of details.json.
  """

  outcome: str
  reward: float = 0.0
  reason: str = ''
  wall_s: float = 0.0
  details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@functools.cache
def _judged() -> Path:
  """This process's directory of trees to judge.

  Its name in the sandbox is known, those in it are random and cannot be listed.
  """
  path, _ = temporary.directory('m2jax-verifier-')  # held until this process ends
  path = Path(path)
  path.chmod(0o711)
  atexit.register(shutil.rmtree, path, ignore_errors=True)
  return path


def python() -> tuple[str, str]:
  """(prefix on the host, prefix in the sandbox) of this process's interpreter.

  The dataset's sites are installed for its version.
  """
  return sys.base_prefix, sys.base_prefix


def host(
  dataset: Path, *, judges: bool = False, hide: tuple[str, ...] = ()
) -> sandbox.Host:
  """The host of sandboxes for a dataset's tasks; `hide` is that of `Metadata`.

  Raises:
    BadTask: the dataset's `sites` is a link: sandboxes would see what it leads to.
  """
  sites = dataset / 'sites'
  if sites.is_symlink():
    raise BadTask(f'{sites}: a link, which may lead out of the dataset')
  sites.mkdir(exist_ok=True)
  seen = python(), (str(sites.resolve()), _SITES)
  found = without(sandbox.Host(read_only=seen), hide)
  if judges:
    found = dataclasses.replace(found, read_only=(*seen, (str(_judged()), _MOUNT)))
  return found


def without(host: sandbox.Host, modules: tuple[str, ...]) -> sandbox.Host:
  """The host without what this machine has of Python modules, wherever it is."""
  hidden = {
    f'{target}/{path}'
    for source, target in (('/usr', '/usr'), *host.read_only)
    for path in _copies(source, modules, os.stat(source).st_mtime_ns)
    if os.path.exists(f'{source}/{path}')  # still
  }
  return dataclasses.replace(host, hidden=tuple(sorted(hidden)))


@functools.lru_cache(maxsize=256)
def _copies(source: str, modules: tuple[str, ...], changed_ns: int) -> tuple[str, ...]:
  """Paths in `source` of the copies of modules, as in `Host.hidden`.

  Packages, modules, also compiled, and archives with one of them. `changed_ns` is when
  an entry of `source` changed.
  """
  wanted = {
    f'/{name.replace(".", "/")}'
    for name in modules
    if name not in sys.stdlib_module_names
  }
  if not wanted:
    return ()
  last, ends = {os.path.basename(path) for path in wanted}, tuple(wanted)
  found = []
  for directory, names, files in os.walk(source):
    inside = f'{directory}/'.removeprefix(f'{source}/')
    for one in last.intersection(names):
      path = Path(directory, one)
      if not f'/{inside}{one}'.endswith(ends) or path.is_symlink():
        continue
      if next(path.rglob('*.py*'), None):
        found.append(f'{inside}{one}/')
        names.remove(one)
    for one in files:
      stem, _, kind = one.partition('.')
      is_module = stem in last and kind.rpartition('.')[2] in ('py', 'pyc', 'pyo', 'so')
      is_module = is_module and f'/{inside}{stem}'.endswith(ends)
      if not is_module and not one.endswith(_ARCHIVES):
        continue
      path = os.path.join(directory, one)
      if not os.path.isfile(path) or os.path.islink(path):
        continue  # opening a pipe would block forever
      if is_module or _contains(path, wanted):
        found.append(f'{inside}{one}')
  return tuple(found)


def _contains(path: str, wanted: set[str]) -> bool:
  """Whether an archive has a module whose path ends with one of `wanted`."""
  modules = re.compile(f'({"|".join(map(re.escape, wanted))})(/|[.]pyc?$|$)')
  try:
    if os.path.getsize(path) > _MAX_ARCHIVE_BYTES:
      return True  # it is not opened, and may
    with zipfile.ZipFile(path) as archive:
      return any(modules.search(f'/{entry}') for entry in archive.namelist())
  except (zipfile.BadZipFile, OSError):
    return False


def site(directory: Directory, backend: str, *, judges: bool = False) -> str:
  """Path of the task's Python packages in a sandbox; '' for none."""
  metadata = directory.metadata
  name = judges and metadata.verifier_site or metadata.site
  if not name:
    return ''
  sites = _SITES if backend != 'rlimit_only' else directory.dataset.resolve() / 'sites'
  return f'{sites}/{name}'


async def verify(
  directory: Directory,
  workspace: Path,
  answer: str = '',
  *,
  backend: str = 'namespaces',
  limits: sandbox.Limits | None = None,
) -> Verdict:
  """The verdict on a workspace in which no process runs any more.

  Args:
    directory: the task.
    workspace: directory that the agent left.
    answer: its final message.
    backend, limits: settings of the verifier's sandbox. The elapsed time is the task's.
  """
  metadata = directory.metadata
  policy = metadata.collect, metadata.exclude
  try:
    listing = metadata.listing and await asyncio.to_thread(compose.listing, workspace)
    work = await asyncio.to_thread(compose.gather, workspace, *policy)
  except (compose.Rejected, PermissionError) as error:  # the agent owns it
    return Verdict(FAILED, reason=str(error))
  except OSError as error:
    return Verdict(INVALID, reason=f'the workspace cannot be read: {error}')
  if metadata.answer:
    work[metadata.answer] = answer.encode(errors='replace')
  names = secrets.token_hex(16), secrets.token_hex(16)
  place, hidden = (_judged() / name for name in names)
  try:
    tree = judged_tree(directory, work)
    seen = dict(backend=backend, limits=limits or sandbox.Limits())
    ran = metadata.run and await runs.run(
      metadata.run,
      tree,
      directory.tests(),
      host=host(directory.dataset, hide=metadata.hide),
      **seen,
    )
    await asyncio.to_thread(lay_out, directory, tree, place, hidden)
    for file, value in ((_LISTING, listing), (_RUNS, ran)):
      if value:
        (hidden / file).write_text(json.dumps(value))
    return await _run(directory, *names, **seen)
  except compose.Rejected as error:
    return Verdict(FAILED, reason=str(error))
  except (sandbox.SandboxError, OSError) as error:
    return Verdict(INVALID, reason=f'infrastructure: {error}')
  finally:
    for made in (place, hidden):
      await asyncio.to_thread(shutil.rmtree, made, True)


def judged_tree(directory: Directory, work: Mapping[str, bytes]) -> dict[str, bytes]:
  """The files to judge: the original ones, with an agent's work over them.

  Raises:
    compose.Rejected: the work cannot be laid over them.
  """
  metadata, tests = directory.metadata, directory.tests()
  ours = {
    path.removeprefix('workspace/'): data
    for path, data in tests.items()
    if path.startswith('workspace/')
  }
  original = {**directory.archive()}
  if not original:
    original = directory.workspace()
  return compose.compose(original, work, ours, metadata.collect, metadata.exclude)


def lay_out(
  directory: Directory, tree: Mapping[str, bytes], place: Path, hidden: Path
) -> None:
  """Writes the tree to judge below the new directory `place`, the tests in `hidden`."""
  for made in (place / 'tree', hidden / 'tests'):
    made.parent.mkdir(mode=0o755)
    made.mkdir()
  compose.write(tree, place / 'tree')
  tests = {p: d for p, d in directory.tests().items() if not p.endswith('.tar.gz')}
  compose.write(tests, hidden / 'tests')


def _limits(directory: Directory, limits: sandbox.Limits) -> sandbox.Limits:
  """Limits of the verifier's sandbox: the agent's, or what the task needs if more."""
  needs = directory.metadata.verifier_needs
  more = {name: max(value, getattr(limits, name)) for name, value in needs.items()}
  return dataclasses.replace(limits, **more, wall_s=directory.verifier_s)


async def _run(directory, name, hidden_name, backend, limits) -> Verdict:
  mount = _MOUNT if backend != 'rlimit_only' else str(_judged())
  inside, hidden = f'{mount}/{name}', f'{mount}/{hidden_name}'
  limits = _limits(directory, limits)
  where = host(directory.dataset, judges=True, hide=directory.metadata.hide)
  async with await sandbox.create(backend=backend, limits=limits, host=where) as box:
    logs = '/workspace' if backend != 'rlimit_only' else str(box.workspace)
    env = {
      'M2JAX_TREE': f'{inside}/tree',
      'M2JAX_TESTS': f'{hidden}/tests',
      'M2JAX_LOGS': f'{logs}/{_LOGS}',
      'M2JAX_SITE': site(directory, backend, judges=True),
      'M2JAX_LISTING': f'{hidden}/{_LISTING}',
      'M2JAX_RUNS': f'{hidden}/{_RUNS}',
      'M2JAX_PRIVATE': '1' if backend != 'rlimit_only' else '',
    }
    words = ' '.join(f"{key}='{value}'" for key, value in env.items())
    if backend == 'rlimit_only':  # this machine may have no python3 of that version
      words += f" PATH='{python()[0]}/bin':$PATH"
    command = f'mkdir -p {_LOGS}; exec env {words} bash "{hidden}/tests/test.sh"'
    result = await box.exec(command)
    return await verdict(box, result)


async def verdict(box: sandbox.Sandbox, result: sandbox.ExecResult) -> Verdict:
  """The verdict of a test.sh that has ended; `box` has its logs."""
  ready = READY in result.stdout.splitlines()[:1]
  missing = FAILED if ready else INVALID
  said = dict(wall_s=result.wall_s)
  ended = not (result.timed_out or result.returncode)
  if ended and result.oom and (invalid := await _invalid(box)):
    return Verdict(INVALID, reason=invalid, **said)
  if not ended or (result.oom and not ready):
    why = 'time' if result.timed_out else 'memory' if result.oom else ''
    why = f'out of {why}' if why else f'test.sh exited with {result.returncode}'
    tail = result.stderr.strip()[-400:]
    return Verdict(missing, reason=f'{why}: {tail}' if tail else why, **said)
  try:
    details = await _details(box)
    if details.get('invalid'):
      return Verdict(INVALID, reason=str(details['invalid']), details=details, **said)
    reward = await _reward(box, foreign=not ready)
  except (FileNotFoundError, *_UNREADABLE) as error:
    return Verdict(missing, reason=f'no reward: {error}', **said)
  if not (math.isfinite(reward) and 0 <= reward <= 1):
    return Verdict(missing, reason=f'the reward is {reward}', **said)
  outcome = PASSED if reward == 1 else FAILED
  reason = '' if outcome == PASSED else str(details.get('reason', 'reward below 1'))
  return Verdict(outcome, reward, reason, details=details, **said)


async def _reward(box: sandbox.Sandbox, *, foreign: bool) -> float:
  """What test.sh wrote; reward.json only if no pipeline of ours made it (`foreign`):
  theirs have always written reward.txt, and code under test may write the other."""
  try:
    return float(await box.read(f'{_LOGS}/reward.txt', 64))
  except FileNotFoundError:
    if not foreign:
      raise
  found = json.loads(await box.read(f'{_LOGS}/reward.json', _MAX_REWARD_BYTES))
  if not isinstance(found, dict):
    raise ValueError('reward.json is not an object')
  value = found.get('reward', *(found.values() if len(found) == 1 else ()))
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError("reward.json has no number 'reward', nor one number alone")
  return float(value)


async def _invalid(box: sandbox.Sandbox) -> str:
  """Why test.sh, which ended, could not decide: a process of it had no memory."""
  try:
    return str((await _details(box)).get('invalid', ''))
  except _UNREADABLE:
    return ''


async def _details(box: sandbox.Sandbox) -> Mapping[str, Any]:
  try:
    data = await box.read(f'{_LOGS}/details.json', _MAX_REWARD_BYTES)
  except FileNotFoundError:
    return {}
  found = json.loads(data)
  if not isinstance(found, dict):
    raise ValueError('details.json is not an object')
  return found
