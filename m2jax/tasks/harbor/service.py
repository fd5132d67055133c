"""environment/docker-compose.yaml: its one service, `main`, as a container.

Harbor merges such a file over its own, in which `main` sleeps. Here `main` may set what
`Service` has. Keys that do not matter to one container are ignored; every other key,
and every other service, is an error that names it, since a task without it would be
another task. Source: harbor 0.26, environments/docker; the Compose specification.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
import shlex
from collections.abc import Mapping
from typing import Any

from m2jax.checks import check_type
from m2jax.tasks.harbor import compose, standard
from m2jax.text import strict_json

# Where Harbor has its directories in a container, by its variables.
VARIABLES = {
  'CONTEXT_DIR': '.',
  'TEST_DIR': '/tests',
  'ENV_VERIFIER_LOGS_PATH': '/logs/verifier',
  'ENV_AGENT_LOGS_PATH': '/logs/agent',
  'ENV_ARTIFACTS_PATH': '/logs/artifacts',
}
_USED = ('image', 'build', 'environment', 'working_dir', 'user', 'command')
# Of one container that is started and removed here, with this module's limits.
_IGNORED = (
  *('container_name', 'cpus', 'deploy', 'expose', 'hostname', 'init', 'labels'),
  *('logging', 'mem_limit', 'memswap_limit', 'platform', 'ports', 'pull_policy'),
  *('restart', 'stdin_open', 'stop_grace_period', 'stop_signal', 'tty'),
)
_LOGS = ('/logs', '/logs/verifier', '/logs/agent', '/logs/artifacts')
_TEMPLATE = re.compile(
  r'\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_]\w*)'
  r'|\{(?P<name>[A-Za-z_]\w*)(?::?-(?P<default>[^{}]*))?\})'
)
_NAME = re.compile('[A-Za-z_][A-Za-z0-9_]*')
_SLEEPS = re.compile(r'(sleep (infinity|inf|[0-9]+[smhd]?)|tail -f /dev/null);?')
_MAX_TEXT = 1 << 16


@dataclasses.dataclass(frozen=True)
class Service:
  """The service `main`.

  Attributes:
    image: name of an image; '' to build one.
    context: directory of the build in environment/; '' for itself.
    dockerfile: path of the Dockerfile in the context.
    env: variable -> text.
    workdir, user: '' for those of the image.
    command: shell command that runs beside the agent; '' for none.
    network: 'none', or '' for that of task.toml.
  """

  image: str = ''
  context: str = ''
  dockerfile: str = 'Dockerfile'
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  workdir: str = ''
  user: str = ''
  command: str = ''
  network: str = ''


def parse(text: str, variables: Mapping[str, str]) -> Service:
  """Reads a docker-compose.yaml.

  Args:
    text: the file.
    variables: values of `$NAME`, in addition to `VARIABLES`; others are empty.

  Raises:
    ValueError: it is none, or has what is not supported.
  """
  import yaml

  try:
    # Aliases can make a small file a huge tree; no task needs them.
    if any(isinstance(t, yaml.AliasToken) for t in yaml.scan(text, yaml.SafeLoader)):
      raise ValueError('aliases (*NAME) are not supported')
    table = yaml.safe_load(text)
  except yaml.YAMLError as error:
    raise ValueError(f'not YAML: {" ".join(str(error).split())}') from None
  _check_keys(table)
  strict_json.check(table)
  check_type(table, 'Mapping[str, Any]', 'the file')
  for name in ('networks', 'volumes', 'secrets', 'configs', 'include'):
    if table.get(name):
      raise ValueError(f'{name}: not supported: remove it')
  services = table.get('services') or {}
  check_type(services, 'Mapping[str, Any]', 'services')
  if others := [name for name in services if name != 'main']:
    raise ValueError(
      f'services.{reprlib.repr(others[0])}: only the service main is supported: start '
      'the program in its image instead'
    )
  main = services.get('main') or {}
  check_type(main, 'Mapping[str, Any]', 'services.main')
  return _main(_filled(main, {**VARIABLES, **variables}), variables)


def _check_keys(value: Any) -> None:
  items = value.values() if isinstance(value, dict) else value
  for key in value if isinstance(value, dict) else ():
    if not isinstance(key, str):
      raise ValueError(f'the key {reprlib.repr(key)}: must be text')
  for item in items if isinstance(value, dict | list) else ():
    _check_keys(item)


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
  """A tree whose texts have values in place of their variables."""
  if isinstance(value, dict):
    return {key: _filled(item, variables) for key, item in value.items()}
  if isinstance(value, list):
    return [_filled(item, variables) for item in value]
  if not isinstance(value, str):
    return value

  left = _MAX_TEXT - len(value)

  def of(match):
    nonlocal left
    if match['escaped']:
      return '$'
    name = match['plain'] or match['name']
    found = variables.get(name) or match['default'] or ''
    left -= len(found)
    if left < 0:
      raise ValueError(f'a text of more than {_MAX_TEXT} characters with its variables')
    return found

  return _TEMPLATE.sub(of, value)


def _main(main: Mapping[str, Any], variables: Mapping[str, str]) -> Service:
  where, network = 'services.main', ''
  for name, value in main.items():
    match name:
      case 'volumes':
        _check_volumes(value, where)
      case 'network_mode':
        if value not in ('none', 'bridge', 'default'):
          raise ValueError(
            f'{where}.network_mode is {reprlib.repr(value)}: must be none or bridge'
          )
        network = 'none' if value == 'none' else ''
      case _ if name not in _USED + _IGNORED and value:
        raise ValueError(f'{where}.{reprlib.repr(name)}: not supported: remove it')
  workdir = standard.workdir(main, 'working_dir', where)
  image = standard.image(main, 'image', where)
  user = standard.user(main, where)
  context, dockerfile = _build(main.get('build'), f'{where}.build')
  return Service(
    image='' if main.get('build') else image,
    context=context,
    dockerfile=dockerfile,
    env=_environment(main.get('environment'), f'{where}.environment', variables),
    workdir=workdir,
    user=user or '',
    command=_command(main.get('command'), f'{where}.command'),
    network=network,
  )


def _build(build: Any, where: str) -> tuple[str, str]:
  """(context, Dockerfile) in environment/."""
  build = {'context': build} if isinstance(build, str) else build or {}
  check_type(build, 'Mapping[str, Any]', where)
  for name, value in build.items():
    if name not in ('context', 'dockerfile', 'tags', 'pull', 'network') and value:
      raise ValueError(f'{where}.{reprlib.repr(name)}: not supported: remove it')
    if name in ('context', 'dockerfile'):
      check_type(value, 'str | None', f'{where}.{name}')
  context = (build.get('context') or '.').removeprefix('./')
  context = context.rstrip('/') or '/'
  dockerfile = (build.get('dockerfile') or 'Dockerfile').removeprefix('./')
  context = '' if context == '.' else context
  for name, path in (('context', context), ('dockerfile', dockerfile)):
    if path and not compose.is_inside(path):
      raise ValueError(
        f'{where}.{name} is {reprlib.repr(path)}: must be in environment/'
      )
  return context, dockerfile


def _environment(found: Any, where: str, variables) -> dict[str, str]:
  if isinstance(found, list):
    check_type(found, 'tuple[str, ...]', where)
    pairs = [item.partition('=') for item in found]
    # A name alone takes the value that compose itself has.
    found = {k: v if mark else variables.get(k) for k, mark, v in pairs}
  found = found or {}
  check_type(found, 'Mapping[str, Any]', where)
  env = {}
  for name, value in found.items():
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
      raise ValueError(f'{where} has {reprlib.repr(name)}: no name of a variable')
    if value is None:
      continue
    if isinstance(value, bool) or not isinstance(value, str | int | float):
      raise ValueError(f'{where}.{name} is {reprlib.repr(value)}: must be a text')
    check_type(str(value), 'str', f'{where}.{name}')
    env[name] = str(value)
  return env


def _command(command: Any, where: str) -> str:
  """A shell command; '' for one that only keeps the container alive."""
  if isinstance(command, list):
    check_type(command, 'tuple[str, ...]', where)
    wrapped = len(command) == 3 and command[1] == '-c'
    text = command[2] if wrapped else shlex.join(command)
    kept = shlex.join(command)
  else:
    check_type(command, 'str | None', where)
    text = kept = command or ''
  words = ' '.join(text.replace('exec ', '').split())
  words = re.sub(r"^(?:ba)?sh -c (['\"])(.*)\1$", r'\2', words)
  return '' if _SLEEPS.fullmatch(words) or not words else kept


def _check_volumes(volumes: Any, where: str) -> None:
  """Harbor's own directories may be mounted: every container here has them."""
  for volume in volumes if isinstance(volumes, list) else [volumes]:
    target = volume.get('target') if isinstance(volume, dict) else None
    if isinstance(volume, str):
      target = volume.partition(':')[2].partition(':')[0]
    if target not in _LOGS:
      raise ValueError(
        f'{where}.volumes has {reprlib.repr(volume)}: only {", ".join(_LOGS[1:])} may '
        'be mounted: copy files in the Dockerfile'
      )
