"""task.toml of a task that another tool made: Harbor's fields, read and checked.

Source: harbor 0.26, models/task/config.py. Fields that Harbor ignores are ignored. One
that asks for what is not supported here, or for more than the ceilings, is an error
that names it: a task never runs with less than it needs. The network is the exception:
a task gets at most that of `Containers.network`, which is none by default, where
Harbor's default is `public`.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from m2jax.checks import check_type, require
from m2jax.tasks.harbor.schema import Ceilings, check_ceiling

NETWORKS = ('none', 'public')
ENGINES = ('podman', 'docker')
# Harbor's names of them; the third needs a filter of packets.
_MODES = {'no-network': 'none', 'public': 'public', 'allowlist': ''}
_DEFAULT_S = 600.0  # of builds and verifiers
_SIZES = {'G': 1 << 30, 'M': 1 << 20, 'K': 1 << 10}
_SIZE = re.compile(r'\s*([0-9]+(?:\.[0-9]+)?)\s*([GMK])\s*', re.IGNORECASE)
_VARIABLE = re.compile('[A-Za-z_][A-Za-z0-9_]*')
_PAIR = re.compile('[^=]+=[^=]+')
_TEMPLATE = re.compile(r'\$\{([^}:]+)(?::-(.*))?\}', re.DOTALL)
_USER = re.compile('[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(:[0-9]{1,9})?')
_FAMILY = re.compile('[A-Za-z0-9][A-Za-z0-9_.-]{0,47}')


@dataclasses.dataclass(frozen=True)
class Containers:
  """How tasks that other tools made run; settings of the job, never of a task.

  Attributes:
    engine: what runs their containers if the episodes' backend is not one: 'podman' or
      'docker'.
    network: the most that a container gets, 'none' or 'public'.
    build_network: what an image is built with: 'none', 'public', or 'host', which also
      reaches what listens on this machine alone.
    replace: 'NAME=OTHER' for an image that a task names, and the image of this machine
      to use instead; or a mapping of them.
    variables: names of environment variables of this process that a task may read by
      `${NAME}`; no other is visible to any task.
    image_bytes: bound on the built images that are cached.
    verifier: 'fresh' runs test.sh in a new container of the agent's file system,
      'live' in the agent's own beside its processes, as Harbor does.
  """

  engine: str = 'podman'
  network: str = 'none'
  build_network: str = 'none'
  replace: tuple[str, ...] = ()
  variables: tuple[str, ...] = ()
  image_bytes: int = 20 << 30
  verifier: str = 'fresh'

  def __post_init__(self):
    pairs = self.replace
    if isinstance(pairs, Mapping):
      pairs = map('='.join, pairs.items())
    object.__setattr__(self, 'replace', tuple(pairs))
    object.__setattr__(self, 'variables', tuple(self.variables))
    require(self, self.engine in ENGINES, 'engine', f'one of {ENGINES}')
    require(self, self.network in NETWORKS, 'network', f'one of {NETWORKS}')
    builds = (*NETWORKS, 'host')
    require(self, self.build_network in builds, 'build_network', f'one of {builds}')
    names = all(isinstance(n, str) and _VARIABLE.fullmatch(n) for n in self.variables)
    require(self, names, 'variables', 'names of environment variables')
    images = all(isinstance(t, str) and _PAIR.fullmatch(t) for t in self.replace)
    require(self, images, 'replace', "texts 'NAME=OTHER' with names of images")
    require(self, self.image_bytes > 0, 'image_bytes', 'positive')
    ways = ('fresh', 'live')
    require(self, self.verifier in ways, 'verifier', f'one of {ways}')

  @property
  def replaced(self) -> dict[str, str]:
    """`replace` as a mapping."""
    return dict(pair.split('=', 1) for pair in self.replace)


DEFAULT = Containers()


@dataclasses.dataclass(frozen=True)
class Healthcheck:
  """`healthcheck`: a command that must succeed before the agent begins."""

  command: str
  interval_s: float = 5.0
  timeout_s: float = 30.0
  start_period_s: float = 0.0
  start_interval_s: float = 5.0
  retries: int = 3


@dataclasses.dataclass(frozen=True)
class Machine:
  """`[environment]`, or `[verifier.environment]`.

  Attributes:
    image: name of an image that is used instead of a Dockerfile; '' for none.
    build_s: time limit of the build.
    cpus, memory_bytes, storage_bytes: None: not limited by the task.
    network: 'none' or 'public', as the task declares it.
    env: variable -> text, or `${NAME}`, `${NAME:-default}` (`resolved`).
    workdir: '' for that of the image.
    healthcheck: None for none.
  """

  image: str = ''
  build_s: float = _DEFAULT_S
  cpus: float | None = None
  memory_bytes: int | None = None
  storage_bytes: int | None = None
  network: str = 'public'
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  workdir: str = ''
  healthcheck: Healthcheck | None = None


@dataclasses.dataclass(frozen=True)
class Artifact:
  """What a separate verifier gets of the agent's container: a path, without `exclude`
  (fnmatch)."""

  source: str
  exclude: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Collect:
  """A command in the agent's container before its artifacts are read."""

  command: str
  timeout_s: float = 60.0
  user: str | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
  """task.toml.

  Attributes:
    family: `metadata.category` if it is a name, else 'harbor'.
    machine: where the agent works.
    agent_s: elapsed time of an episode; None: not limited by the task.
    agent_user, verifier_user: None for the image's.
    agent_network, verifier_network: 'none' or 'public'; '' for the machine's.
    verifier_s: elapsed time of test.sh.
    verifier_env, solution_env: as `Machine.env`.
    separate: where test.sh runs if not in the agent's file system; None: there.
    artifacts, collect: for a separate verifier.
  """

  family: str
  machine: Machine
  agent_s: float | None
  agent_user: str | None
  agent_network: str
  verifier_s: float
  verifier_user: str | None
  verifier_network: str
  verifier_env: Mapping[str, str]
  solution_env: Mapping[str, str]
  separate: Machine | None
  artifacts: tuple[Artifact, ...]
  collect: tuple[Collect, ...]


def parse(table: Mapping[str, Any], ceilings: Ceilings) -> Settings:
  """Reads the table of a task.toml.

  Args:
    table: checked by `strict_json.check`.
    ceilings: the most that the task may ask for.

  Raises:
    ValueError: a field has another type, is out of range or not supported.
  """
  if table.get('steps'):
    raise ValueError('steps: tasks of several steps are not supported: split the task')
  metadata, agent, verifier, environment, solution = (
    _table(table, name)
    for name in ('metadata', 'agent', 'verifier', 'environment', 'solution')
  )
  own = verifier.get('environment')
  mode = _text(verifier, 'environment_mode', 'verifier')
  if mode not in ('', 'shared', 'separate'):
    raise ValueError(
      f'verifier.environment_mode is {reprlib.repr(mode)}: must be shared or separate'
    )
  if own is not None and mode == 'shared':
    raise ValueError(
      'verifier.environment_mode is shared, but there is a [verifier.environment]: '
      'remove one of them'
    )
  machine = _machine(environment, 'environment', ceilings)
  separate = None
  if own is not None:
    where = 'verifier.environment'
    separate = _machine(_table(verifier, 'environment', where), where, ceilings)
  elif mode == 'separate':
    separate = machine
  family = metadata.get('category')
  named = isinstance(family, str) and _FAMILY.fullmatch(family)
  return Settings(
    family=family if named else 'harbor',
    machine=machine,
    agent_s=_seconds(agent, 'timeout_sec', 'agent', None, ceilings, 'agent_s'),
    agent_user=user(agent, 'agent'),
    agent_network=_network(agent, 'agent', ''),
    verifier_s=_seconds(
      verifier, 'timeout_sec', 'verifier', _DEFAULT_S, ceilings, 'wall_s'
    ),
    verifier_user=user(verifier, 'verifier'),
    verifier_network=_network(verifier, 'verifier', ''),
    verifier_env=_env(verifier, 'verifier'),
    solution_env=_env(solution, 'solution'),
    separate=separate,
    artifacts=_artifacts(table),
    collect=_collect(verifier, ceilings),
  )


def resolved(
  env: Mapping[str, str], allowed: tuple[str, ...], ours: Mapping[str, str]
) -> dict[str, str]:
  """Environment variables of a task, their templates replaced.

  Args:
    env: as in `Machine.env`. Like Harbor's, a template is the whole text.
    allowed: names that a template may read.
    ours: environment of this process.

  Raises:
    ValueError: a template has no default and names a variable that is not allowed or
      not set.
  """
  found = {}
  for name, text in env.items():
    if template := _TEMPLATE.fullmatch(text):
      wanted, default = template.groups()
      value = ours.get(wanted) if wanted in allowed else None
      if value is None and default is None:
        how = 'set it' if wanted in allowed else f'add it to {_VARIABLES}'
        raise ValueError(f'{name} needs the environment variable {wanted!a}: {how}')
      text = default if value is None else value
    found[name] = text
  return found


_VARIABLES = 'tasks.containers.variables'


def _table(table, name: str, where: str = '') -> Mapping[str, Any]:
  found = table.get(name, {})
  check_type(found, 'Mapping[str, Any]', where or name)
  return found


def _text(table, name: str, where: str) -> str:
  found = table.get(name)
  check_type(found, 'str | None', f'{where}.{name}')
  return found or ''


def _number(table, name: str, where: str, hint: str, default, least: float = 0):
  """A number above `least`; at least 1 for counts."""
  found, field = table.get(name), f'{where}.{name}'
  if found is None:
    return default
  check_type(found, hint, field)
  if found <= least:
    raise ValueError(f'{field} is {found}: must be above {least}')
  return found


def _seconds(table, name, where, default, ceilings, most: str) -> float | None:
  """A time limit; the default is cut to the ceiling, what a task names never is."""
  found = _number(table, name, where, 'float', None)
  if found is None:
    return None if default is None else float(min(default, getattr(ceilings, most)))
  check_ceiling(found, ceilings, most, f'{where}.{name}')
  return float(found)


def user(table, where: str) -> str | None:
  """The name or number of a user; None if the task does not say."""
  found = table.get('user')
  if found is None:
    return None
  text = str(found) if type(found) is int else found
  if not (isinstance(text, str) and _USER.fullmatch(text)):
    raise ValueError(
      f'{where}.user is {reprlib.repr(found)}: must be a name or number of a user'
    )
  return text


def _env(table, where: str) -> dict[str, str]:
  field = f'{where}.env'
  found = _table(table, 'env', field)
  for name, text in found.items():
    if not _VARIABLE.fullmatch(name):
      raise ValueError(f'{field} has {reprlib.repr(name)}: no name of a variable')
    check_type(text, 'str', f'{field}.{name}')
  return dict(found)


def _network(table, where: str, default: str) -> str:
  """The network's name here; `default` if the task does not say."""
  mode = table.get('network_mode')
  if mode is None:
    old = table.get('allow_internet')
    if old is not None:
      check_type(old, 'bool', f'{where}.allow_internet')
      return 'public' if old else 'none'
    mode = 'allowlist' if table.get('allowed_hosts') else None
  if mode is None:
    return default
  if not isinstance(mode, str) or mode not in _MODES:
    raise ValueError(
      f'{where}.network_mode is {reprlib.repr(mode)}: must be one of {tuple(_MODES)}'
    )
  if not _MODES[mode]:
    raise ValueError(
      f'{where}.network_mode is allowlist, which is not supported: use no-network or '
      'public'
    )
  return _MODES[mode]


def _bytes(table, name: str, where: str, ceilings: Ceilings, most: str) -> int | None:
  """`NAME_mb`, or the older `NAME` with its unit."""
  found = _number(table, f'{name}_mb', where, 'int', None)
  size = None if found is None else found << 20
  if (old := table.get(name)) is not None:
    match = _SIZE.fullmatch(old) if isinstance(old, str) else None
    if match is None:
      raise ValueError(
        f"{where}.{name} is {reprlib.repr(old)}: must be a size like '512M' or '2G'"
      )
    older = int(float(match[1]) * _SIZES[match[2].upper()])
    if size not in (None, older) or not older:
      raise ValueError(f'{where}.{name} is {old!r}: contradicts {name}_mb, or is 0')
    size = older
  if size is not None:
    check_ceiling(size, ceilings, most, f'{where}.{name}_mb in bytes')
  return size


def _machine(table, where: str, ceilings: Ceilings) -> Machine:
  system = _text(table, 'os', where)
  if system.lower() not in ('', 'linux'):
    raise ValueError(f'{where}.os is {reprlib.repr(system)}: only linux is supported')
  if _number(table, 'gpus', where, 'int', 0, -1) or table.get('tpu') is not None:
    raise ValueError(f'{where}.gpus, tpu: containers have no accelerator: remove them')
  if table.get('mcp_servers'):
    raise ValueError(
      f'{where}.mcp_servers: MCP servers are not supported: remove them, or offer '
      'programs in the image'
    )
  cpus = _number(table, 'cpus', where, 'float', None)
  if cpus is not None:
    check_ceiling(cpus, ceilings, 'cpus', f'{where}.cpus')
  build_s = _seconds(table, 'build_timeout_sec', where, _DEFAULT_S, ceilings, 'build_s')
  return Machine(
    image=image(table, 'docker_image', where),
    build_s=build_s,
    cpus=cpus,
    memory_bytes=_bytes(table, 'memory', where, ceilings, 'memory_bytes'),
    storage_bytes=_bytes(table, 'storage', where, ceilings, 'storage_bytes'),
    network=_network(table, where, 'public'),
    env=_env(table, where),
    workdir=workdir(table, 'workdir', where),
    healthcheck=_healthcheck(table, where, ceilings),
  )


def image(table, name: str, where: str) -> str:
  """The name of an image, which no program can take for an option or a path."""
  found = _text(table, name, where)
  if found and not re.fullmatch('[a-z0-9][A-Za-z0-9._/:@-]{0,254}', found):
    raise ValueError(
      f'{where}.{name} is {reprlib.repr(found)}: must be the name of an image'
    )
  return found


def workdir(table, name: str, where: str) -> str:
  """A directory in a container; '' if the task does not say."""
  found = _text(table, name, where)
  if found and not _is_absolute(found):
    raise ValueError(
      f'{where}.{name} is {reprlib.repr(found)}: must be an absolute path, without '
      "'.' or '..'"
    )
  return found


def _healthcheck(table, where: str, ceilings: Ceilings) -> Healthcheck | None:
  if table.get('healthcheck') is None:
    return None
  where = f'{where}.healthcheck'
  found = _table(table, 'healthcheck', where)
  command = _text(found, 'command', where)
  if not command.strip():
    raise ValueError(f'{where}.command is missing')
  times = {}
  for name in ('interval', 'timeout', 'start_period', 'start_interval'):
    default = getattr(Healthcheck, f'{name}_s')
    value = _number(found, f'{name}_sec', where, 'float', default, -1)
    check_ceiling(value, ceilings, 'wall_s', f'{where}.{name}_sec')
    times[f'{name}_s'] = max(float(value), 0.1)
  times['start_period_s'] = float(found.get('start_period_sec', 0.0))
  retries = _number(found, 'retries', where, 'int', Healthcheck.retries)
  check_ceiling(retries, ceilings, 'tool_calls', f'{where}.retries')
  return Healthcheck(command, retries=retries, **times)


def _artifacts(table) -> tuple[Artifact, ...]:
  entries = table.get('artifacts', [])
  if not isinstance(entries, list):
    raise ValueError('artifacts: must be a list of paths or tables')
  found = []
  for number, entry in enumerate(entries):
    where = f'artifacts[{number}]'
    entry = {'source': entry} if isinstance(entry, str) else entry
    check_type(entry, 'Mapping[str, Any]', where)
    source = _text(entry, 'source', where)
    if not _is_absolute(source):
      raise ValueError(
        f'{where}.source is {reprlib.repr(source)}: must be an absolute path, without '
        "'.' or '..'"
      )
    _check_service(entry, where)
    exclude = entry.get('exclude', [])
    check_type(exclude, 'tuple[str, ...]', f'{where}.exclude')
    found.append(Artifact(source, tuple(exclude)))
  return tuple(found)


def _collect(verifier, ceilings: Ceilings) -> tuple[Collect, ...]:
  entries = verifier.get('collect', [])
  if not isinstance(entries, list):
    raise ValueError('verifier.collect: must be a list of tables')
  found = []
  for number, entry in enumerate(entries):
    where = f'verifier.collect[{number}]'
    check_type(entry, 'Mapping[str, Any]', where)
    _check_service(entry, where)
    command = _text(entry, 'command', where)
    if not command.strip():
      raise ValueError(f'{where}.command is missing')
    limit_s = _seconds(entry, 'timeout_sec', where, 60.0, ceilings, 'wall_s')
    found.append(Collect(command, limit_s, user(entry, where)))
  return tuple(found)


def _check_service(entry, where: str) -> None:
  if _text(entry, 'service', where) not in ('', 'main'):
    raise ValueError(
      f'{where}.service is {reprlib.repr(entry["service"])}: only main is supported'
    )


def _is_absolute(path: str) -> bool:
  return (
    path.startswith('/')
    and posixpath.normpath(path) == (path.rstrip('/') or '/')
    and not path.startswith('//')
    and path.isprintable()
  )
