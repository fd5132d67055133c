"""A task in containers of its image: opened, solved and judged as Harbor does.

Source: harbor 0.26, trial/ and verifier/. The agent works in a container of the task's
image. Then test.sh runs, by `[verifier]` and `Containers.verifier`, in one of

    separate   the verifier's own image: tests/Dockerfile, an image that task.toml
               names, or the task's image again; it gets the artifacts alone
    fresh      a new container of the file system that the agent left, in which none of
               its processes runs
    live       the agent's container with its processes, as Harbor does

Whatever test.sh runs in the last two, the agent may have replaced, bash included: a
task that must not be gamed has a separate verifier. /tests and /logs/verifier are new
in each. The reward is /logs/verifier/reward.json, an object with a number `reward` or
with one number alone, or else the number in reward.txt; the status of test.sh does not
count. As in Harbor a trial without a reward, or beyond the time of its verifier, is an
error: the attempt is not judged, neither as 0 nor as 1. So is a reward outside [0, 1].
But an agent must not choose that its attempt is not judged: if the same task has a
reward in containers where no agent has worked, the attempt has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fnmatch
import json
import math
import os
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from m2jax import sandbox
from m2jax.checks import InvalidSetting
from m2jax.sandbox import containers as containers_lib
from m2jax.sandbox.containers import images
from m2jax.tasks import task as task_lib
from m2jax.tasks.harbor import standard, verifier
from m2jax.tasks.harbor.directory import MAX_BYTES, Directory
from m2jax.tasks.harbor.schema import BadTask

_LOGS, _ARTIFACTS = '/logs/verifier', '/logs/artifacts'
_REWARDS = f'{_LOGS}/reward.json', f'{_LOGS}/reward.txt'
_MAX_REWARD_BYTES = 1 << 16
_SHOWN_CHARS = 2000  # of each of test.sh's outputs
_AGENT_S = 3600.0  # of a task that does not limit it
_START_S = 60.0  # of preparations
_MAKE_LOGS = f'mkdir -p /logs/agent {_LOGS} {_ARTIFACTS} && chmod 777 /logs/*'
# Networks of builds, by their names at the engines.
_BUILDS = {
  'podman': {'none': 'none', 'public': 'private', 'host': 'host'},
  'docker': {'none': 'none', 'public': 'default', 'host': 'host'},
}
_USER = (
  'while read -r name id _; do [ $name != Uid: ] || echo $id; done < /proc/self/status'
)
_built_here: set[tuple[str, str]] = set()  # (engine, image)


class SetupFailed(sandbox.SandboxError):
  """A task's environment cannot be set up."""


@dataclasses.dataclass(frozen=True)
class Environment(task_lib.Environment):
  """An agent's container, with the directory and the user of its commands."""

  workdir: str = '/'
  user: str = '0'


@dataclasses.dataclass(frozen=True)
class Run:
  """How a task runs.

  Attributes:
    directory: the task.
    job: settings of the job.
    engine: 'podman', 'docker' or 'harbor:NAME'.
    limits: limits of the job for a container.
  """

  directory: Directory
  job: standard.Containers
  engine: str
  limits: sandbox.Limits

  @property
  def settings(self) -> standard.Settings:
    """task.toml."""
    return self.directory.settings

  @property
  def agent_s(self) -> float:
    """Elapsed time of an episode or a solution."""
    return self.settings.agent_s or _AGENT_S

  def env(self, templates: Mapping[str, str], where: str) -> dict[str, str]:
    """Environment variables of the task. Raises BadTask."""
    try:
      return standard.resolved(templates, self.job.variables, os.environ)
    except ValueError as error:
      raise BadTask(f'{self.directory.path}: {where}.{error}') from None


@contextlib.asynccontextmanager
async def opened(
  run: Run,
  execute: Callable[[Any], task_lib.Execute],
  read_only: tuple[tuple[str, str], ...] = (),
) -> AsyncIterator[Environment]:
  """The container in which the agent works.

  Args:
    run: the task.
    execute: makes what runs the tool calls in a container.
    read_only: (directory of this machine, path in the container).

  Raises:
    BadTask: the task cannot run here.
    SetupFailed: it does not become healthy.
    SandboxError: its image cannot be built, or the machine failed.
  """
  settings, machine = run.settings, run.settings.machine
  here = run.engine in standard.ENGINES
  if not (here or settings.separate or run.job.verifier == 'live'):
    raise InvalidSetting(
      f'{run.engine} cannot judge in a new container of what the agent left: set '
      'tasks.containers.verifier=live'
    )
  service = run.directory.service(_variables(run, machine))
  network = service.network or settings.agent_network or machine.network
  container = containers_lib.Container(
    image=await _image(run, machine, service),
    network=_network(run, network),
    cpus=machine.cpus,
    workdir=machine.workdir or service.workdir or None,
    user=settings.agent_user or service.user or None,
    read_only=read_only,
  )
  env = {**service.env, **run.env(machine.env, 'environment.env')}
  run.env(settings.verifier_env, 'verifier.env')  # fails now rather than at the end
  async with await _created(run, container, machine, env, run.agent_s) as box:
    found = (await box.exec(f'pwd; {_USER}', _START_S)).stdout.split('\n')
    if len(found) < 2:
      raise SetupFailed(f'{container.image}: no shell, directory or user: {found}')
    await _uploaded(run, box)
    await _done(box, _MAKE_LOGS)
    await _started(box, machine, service.command)
    box.limits = dataclasses.replace(box.limits, wall_s=run.limits.wall_s)
    yield Environment(execute(box), None, box, workdir=found[0], user=found[1])


async def _uploaded(run: Run, box) -> None:
  """The files of environment/, if an image is named and neither builds nor a service
  uses them: Harbor copies them into the working directory."""
  files = await asyncio.to_thread(run.directory.files, 'environment/')
  if files and not files.keys() & {'Dockerfile', 'docker-compose.yaml'}:
    await box.copy_in(run.directory.path / 'environment')


@contextlib.contextmanager
def _time(box, wall_s: float) -> Iterator[None]:
  """Commands of ours may take longer than those of the agent."""
  before = box.limits
  box.limits = dataclasses.replace(before, wall_s=max(before.wall_s, wall_s))
  try:
    yield
  finally:
    box.limits = before


def _variables(run: Run, machine: standard.Machine) -> dict[str, str]:
  """What a docker-compose.yaml may use: nothing of this process but what the job
  allows."""
  allowed = {n: os.environ[n] for n in run.job.variables if n in os.environ}
  return {**allowed, **run.env(machine.env, 'environment.env')}


def _network(run: Run, wanted: str) -> str:
  return 'public' if wanted == run.job.network == 'public' else 'none'


async def _image(run: Run, machine, service) -> str:
  """The name of the task's image, which is built if need be."""
  named = machine.image or service.image
  if named:
    return run.job.replaced.get(named, named)
  place = f'environment/{service.context}'.rstrip('/')
  return await _built(run, machine, place, service.dockerfile)


async def _built(run: Run, machine, place: str, dockerfile: str) -> str:
  if run.engine not in standard.ENGINES:
    raise BadTask(
      f'{run.directory.path}: {run.engine} gets images by their names: set '
      'environment.docker_image, or use the backend podman or docker'
    )
  # Looks at every entry once more: no link is given to a builder.
  await asyncio.to_thread(run.directory.files, f'{place}/')
  image = await images.build(
    run.directory.path / place,
    engine=run.engine,
    dockerfile=dockerfile,
    network=_BUILDS[run.engine][run.job.build_network],
    timeout_s=machine.build_s,
    replace=run.job.replaced,
    max_bytes=MAX_BYTES,
  )
  if (run.engine, image) not in _built_here:
    _built_here.add((run.engine, image))
    await images.prune(run.engine, run.job.image_bytes)
  return image


def _limits(run: Run, machine: standard.Machine, wall_s: float) -> sandbox.Limits:
  """What the task declares, or else the job's limits.

  Processor time has no limit of its own: elapsed time and `cpus` bound it.
  """
  limits, storage = run.limits, machine.storage_bytes
  wall_s = max(limits.wall_s, wall_s, _START_S)
  return dataclasses.replace(
    limits,
    memory_bytes=machine.memory_bytes or limits.memory_bytes,
    workspace_bytes=storage or limits.workspace_bytes,
    file_bytes=storage or limits.file_bytes,
    wall_s=wall_s,
    cpu_s=math.ceil(wall_s * (os.cpu_count() or 1)),
  )


async def _created(run: Run, container, machine, env, wall_s: float) -> Any:
  limits = _limits(run, machine, wall_s)
  return await containers_lib.create(
    container, engine=run.engine, limits=limits, env=env
  )


async def _started(box, machine: standard.Machine, command: str) -> None:
  """Starts the service's command and waits for health."""
  if command:
    await box.exec(
      f'{{ {command}\n}} >/logs/agent/service.txt 2>&1 </dev/null &', _START_S
    )
  if machine.healthcheck is not None:
    await _healthy(box, machine.healthcheck)


async def _done(box, command: str, user: str = '0') -> None:
  """Runs a command that must succeed."""
  with _time(box, _START_S):
    done = await box.exec(command, _START_S, user=user, workdir='/')
  if done.returncode:
    raise SetupFailed(f'{command}: {done.stderr.strip()[-400:] or done.returncode}')


async def _healthy(box, check: standard.Healthcheck) -> None:
  begun_s, failures = time.monotonic(), 0
  while True:
    starting = time.monotonic() - begun_s < check.start_period_s
    with _time(box, check.timeout_s):
      done = await box.exec(check.command, check.timeout_s)
    if not done.returncode:
      return
    failures += not starting
    if failures >= check.retries:
      said = (done.stderr or done.stdout).strip()[-400:]
      raise SetupFailed(
        f'environment.healthcheck failed {failures} times, at last with '
        f'{done.returncode}: {said}'
      )
    await asyncio.sleep(check.start_interval_s if starting else check.interval_s)


async def solved(run: Run, box) -> sandbox.ExecResult:
  """Runs the task's solution in the agent's container.

  Raises:
    BadTask: it has none.
  """
  files = await asyncio.to_thread(run.directory.files, 'solution/')
  if 'solve.sh' not in files:
    raise BadTask(f'{run.directory.path}: no solution/solve.sh')
  env = run.env(run.settings.solution_env, 'solution.env')
  await _done(box, 'rm -rf /solution')
  await _laid_out(run, box, 'solution', 'solve.sh')
  with _time(box, run.agent_s):
    return await box.exec(
      '/solution/solve.sh',
      run.agent_s,
      env={'DEBIAN_FRONTEND': 'noninteractive', **env},
    )


async def _laid_out(run: Run, box, folder: str, script: str) -> None:
  """A folder of the task as the directory /FOLDER, with its script executable."""
  place = run.directory.path / folder
  await box.copy_in(place, f'/{folder}')
  await box.write(f'/{folder}/{script}', (place / script).read_bytes(), 0o755)


async def judged(run: Run, environment: Environment) -> verifier.Verdict:
  """The verdict on what the agent left in its container; see the module."""
  found = await _judged(run, environment)
  if found.outcome != verifier.INVALID or not await _is_sound(run):
    return found
  if not found.wall_s:  # test.sh did not run, maybe by the machine
    found = await _judged(run, environment)
  if found.outcome == verifier.INVALID:
    reason = f'{found.reason}; without the agent there is a reward'
    return dataclasses.replace(found, outcome=verifier.FAILED, reason=reason)
  return found


async def _is_sound(run: Run) -> bool:
  """Whether the task has a reward if no agent has worked."""
  try:
    async with opened(run, lambda box: None) as untouched:
      return (await _judged(run, untouched)).outcome != verifier.INVALID
  except (BadTask, sandbox.SandboxError, OSError):
    return False


async def _judged(run: Run, environment: Environment) -> verifier.Verdict:
  try:
    async with _where(run, environment) as (box, bundled):
      return await _tested(run, box, bundled)
  except _Rejected as error:
    return verifier.Verdict(verifier.FAILED, reason=str(error))
  except (sandbox.SandboxError, OSError) as error:
    return verifier.Verdict(verifier.INVALID, reason=f'infrastructure: {error}')


class _Rejected(Exception):
  """What the agent left cannot be judged; the attempt failed."""


@contextlib.asynccontextmanager
async def _where(run: Run, environment) -> AsyncIterator[tuple[Any, bool]]:
  """The container for test.sh, and whether its image has the tests."""
  settings, machine, box = run.settings, run.settings.machine, environment.box
  if settings.separate is not None:
    async with _separate(run, box) as found:
      yield found
    return
  if run.job.verifier == 'live':
    yield box, False
    return
  await _check_alive(box)
  service = run.directory.service(_variables(run, machine))
  network = service.network or settings.verifier_network or machine.network
  container = containers_lib.Container(
    image='fork',
    network=_network(run, network),
    cpus=machine.cpus,
    workdir=environment.workdir,
    user=settings.verifier_user or service.user or environment.user,
  )
  limits = _limits(run, machine, settings.verifier_s)
  async with box.fork(container, limits) as new:
    with contextlib.suppress(SetupFailed):  # by what the agent left: for test.sh
      await _started(new, machine, service.command)
    yield new, False


async def _check_alive(box) -> None:
  """Raises _Rejected if what ran at the start runs in the container no longer."""
  with _time(box, _START_S):
    done = await box.exec(_MAKE_LOGS, _START_S, user='0', workdir='/')
  if done.returncode in (126, 127, 137):
    raise _Rejected('commands no longer run in the container of the agent')


@contextlib.asynccontextmanager
async def _separate(run: Run, box) -> AsyncIterator[tuple[Any, bool]]:
  """A container of the verifier's image, with the agent's artifacts."""
  settings, machine = run.settings, run.settings.separate
  for hook in settings.collect:
    with _time(box, hook.timeout_s):
      await box.exec(hook.command, hook.timeout_s, user=hook.user)
  if run.engine in standard.ENGINES:  # others promise no such thing
    await box.kill_processes()
  found = {}
  for artifact in (standard.Artifact(_ARTIFACTS), *settings.artifacts):
    found[artifact.source] = await _artifact(box, artifact)
  tests = await asyncio.to_thread(run.directory.files, 'tests/')
  service = run.directory.service(_variables(run, settings.machine))
  bundled = True
  if machine is not settings.machine and machine.image:
    image = run.job.replaced.get(machine.image, machine.image)
  elif 'Dockerfile' in tests:
    image = await _built(run, machine, 'tests', 'Dockerfile')
  else:
    image, bundled = await _image(run, settings.machine, service), False
  container = containers_lib.Container(
    image=image,
    network=_network(run, settings.verifier_network or machine.network),
    cpus=machine.cpus,
    workdir=machine.workdir or None,
    user=settings.verifier_user,
  )
  env = run.env(machine.env, 'verifier.environment.env')
  async with await _created(run, container, machine, env, settings.verifier_s) as new:
    await _done(new, _MAKE_LOGS)
    await _started(new, machine, '')
    for source, files in found.items():
      if isinstance(files, bytes):
        await new.write(source, files)
      elif files:
        await _done(new, f'mkdir -p {shlex.quote(source)}')
        await new.copy_in(files, source)
    yield new, bundled


async def _artifact(box, artifact: standard.Artifact) -> dict[str, bytes] | bytes:
  """A file of the agent's container, or files below a directory by their paths in it.

  Raises:
    _Rejected: it is neither, or too large.
  """
  try:
    files = await box.copy_out(artifact.source, MAX_BYTES)
  except FileNotFoundError:
    return {}
  except sandbox.SandboxPathError:
    try:
      return await box.read(artifact.source, MAX_BYTES)
    except (FileNotFoundError, sandbox.SandboxPathError) as error:
      raise _Rejected(f'artifact {artifact.source}: {error}') from None
  return {
    path: data
    for path, data in files.items()
    if not any(fnmatch.fnmatchcase(path, pattern) for pattern in artifact.exclude)
  }


async def _tested(run: Run, box, bundled: bool) -> verifier.Verdict:
  """Runs test.sh and reads its reward."""
  settings = run.settings
  old = _LOGS if bundled else f'{_LOGS} /tests'
  fresh = f'rm -rf {old}; mkdir -p {_LOGS} && chmod 777 {_LOGS}'
  fresh += ' && chmod +x /tests/test.sh' if bundled else ''
  await _done(box, f'[ ! -h /logs ] || rm /logs; {fresh}')
  if not bundled:
    await _laid_out(run, box, 'tests', 'test.sh')
  with _time(box, settings.verifier_s):
    done = await box.exec(
      '/tests/test.sh',
      settings.verifier_s,
      user=settings.verifier_user,
      env=run.env(settings.verifier_env, 'verifier.env'),
    )
  shown = {'stdout': done.stdout, 'stderr': done.stderr}
  details = {name: text.strip()[-_SHOWN_CHARS:] for name, text in shown.items()}
  said = dict(wall_s=done.wall_s, details=details)
  if done.timed_out:
    why = f'test.sh took more than {settings.verifier_s:g} s (verifier.timeout_sec)'
    return verifier.Verdict(verifier.INVALID, reason=why, **said)
  try:
    reward = await _reward(box)
  except (sandbox.SandboxPathError, ValueError, OverflowError, RecursionError) as error:
    how = f'test.sh exited with {done.returncode}' + ', out of memory' * done.oom
    return verifier.Verdict(
      verifier.INVALID, reason=f'no reward: {error}; {how}', **said
    )
  if reward == 1:
    return verifier.Verdict(verifier.PASSED, 1.0, **said)
  return verifier.Verdict(verifier.FAILED, reward, 'reward below 1', **said)


async def _reward(box) -> float:
  """What test.sh wrote. Raises ValueError unless it is a number in [0, 1]."""
  for path in _REWARDS:
    try:
      text = (await box.read(path, _MAX_REWARD_BYTES)).decode()
    except FileNotFoundError:
      continue
    name = path.rpartition('/')[2]
    value = _of_json(text) if name.endswith('.json') else float(text)
    if not (math.isfinite(value) and 0 <= value <= 1):
      raise ValueError(f'{name} has {value}: must be in [0, 1]')
    return value
  raise ValueError('there is neither reward.json nor reward.txt in /logs/verifier')


def _of_json(text: str) -> float:
  found = json.loads(text)
  numbers = found if isinstance(found, dict) else {'reward': found}
  for name, value in numbers.items():
    if not isinstance(value, int | float):
      raise ValueError(f'reward.json has {name!a}: not a number')
  value = numbers.get('reward', *(numbers.values() if len(numbers) == 1 else ()))
  if value is None:
    raise ValueError("reward.json has several numbers, and none is 'reward'")
  return float(value)
