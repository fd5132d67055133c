"""Shared by the jobs' mains: flags, ConfigDict → dataclasses, one-line errors, Ctrl-C,
and the start of several processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import logging as std_logging
import os
import pathlib
import re
import signal
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import ml_collections
from absl import app, flags, logging
from ml_collections.config_flags import config_flags

from experiments import fields
from m2jax import checks
from m2jax.observe import console, progress

if typing.TYPE_CHECKING:
  from m2jax.sharding import MeshConfig, Sharding
  from m2jax.train.loop import LoopConfig

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.')
FRESH = flags.DEFINE_bool('fresh', False, 'Delete the run in --workdir and start anew.')
DOCTOR = flags.DEFINE_bool(
  'doctor', True, 'Let the run doctor examine a training job while it runs.'
)
DISTRIBUTED = flags.DEFINE_bool(
  'distributed',
  False,
  'This is one of several processes of a job, all started alike and with the same '
  '--workdir on shared storage. On TPU pods and under Slurm or Open MPI they find each '
  'other; elsewhere set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and '
  'JAX_PROCESS_ID.',
)
CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'configs/NAME.py[:variant], or NAME[:variant].', lock_config=True
)
_CONFIGS = pathlib.Path(__file__).resolve().parent.with_name('configs')

# Exit codes. Schedulers start a job again except after FINAL, and after success.
FAILED, FINAL = 1, 2
INTERRUPTED = 130  # a shell's exit code for a program that Ctrl-C ended
# When one of several processes dies, JAX ends the others after the first; when one ends
# before the others, after the second.
_HEARTBEAT_TIMEOUT_S, _SHUTDOWN_TIMEOUT_S = 30, 60
_PROCESS_VARIABLES = {'count': 'JAX_NUM_PROCESSES', 'process': 'JAX_PROCESS_ID'}
_URL = re.compile(r'[A-Za-z][\w+.-]*:/')  # a path has none, and no run is in one
_CHATTY_LOGGERS = ('httpx', 'httpcore', 'uvicorn', 'jax', 'asyncio')
_CHATTY_FILES = ('/orbax/', '/jax/', '/grain/', '/etils/')  # these use absl's logger


class BadInput(ValueError):
  """A user error: reported in one line, without a traceback."""


def config_file(path: str) -> str:
  """The file of a --config: `path`, or else that of ours which it names.

  Our configs are beside `experiments`, in a checkout as in a wheel. Outside a checkout
  `configs/forge.py`, `forge.py` and `forge` all name one.

  Raises:
    ValueError: there is neither.
  """
  if os.path.isfile(path):
    return path
  given, ours = pathlib.PurePath(path), {p.stem: p for p in _CONFIGS.glob('[!_]*.py')}
  plain = str(given.parent) in ('.', 'configs') and given.suffix in ('', '.py')
  if plain and given.stem in ours:
    return str(ours[given.stem])
  raise ValueError(
    f'no such file, and no config of ours; these are {", ".join(sorted(ours))}'
  )


class _ConfigParser(config_flags.ConfigFileFlagParser):
  def parse(self, path: str) -> Any:
    file, colon, variant = path.partition(':')
    return super().parse(config_file(file) + colon + variant)


flags.FLAGS['config'].parser = _ConfigParser('config')


def workdir() -> pathlib.Path:
  """--workdir, which most jobs need; `run` has refused a URL."""
  if not WORKDIR.value:
    raise BadInput('--workdir is missing: give the directory of the run')
  return pathlib.Path(WORKDIR.value)


def check_path(flag: str, value: str | None) -> None:
  """Raises BadInput if a flag of a directory or file to write has a URL: as a path it
  would be a folder of this host, whose loss nobody notices."""
  if value and _URL.match(value):
    raise BadInput(
      f'--{flag}={value}: a URL, but the job writes to local paths only: mount the '
      'storage, and give the path in it'
    )


@contextlib.contextmanager
def pipelines() -> Iterator[None]:
  """Imports of m2jax_pipelines in the body end the program with one line and code 2 if
  that distribution is not installed."""
  try:
    yield
  except ModuleNotFoundError as error:
    if str(error.name).partition('.')[0] != 'm2jax_pipelines':
      raise
    fail(BadInput(f'{error.name} is missing: pip install -e ./m2jax_pipelines'))


def values() -> dict[str, Any]:
  """--config as nested dicts."""
  if CONFIG.value is None:
    raise BadInput('--config is missing: give configs/NAME.py[:variant]')
  try:
    return CONFIG.value.to_dict()
  except OSError as error:  # the file could not be read; reported only now
    raise BadInput(f'--config: {_last_line(error)}') from error


def start(mesh: MeshConfig) -> None:
  """Sets up the process (`m2jax.startup`); call it before jax is used.

  A CPU is divided into the devices of `mesh`, whose axis of -1 gets what the others
  leave of `startup.devices`. With --distributed each process is one device.
  """
  from m2jax import startup

  several = flags.FLAGS.is_parsed() and DISTRIBUTED.value
  startup.prepare(None if several else mesh.over(startup.devices()).size)


def watching(
  path: pathlib.Path, show: Callable[..., None], pool_url: str = ''
) -> contextlib.AbstractContextManager[None]:
  """The run doctor, which examines this job while the body runs, unless --nodoctor.

  Args:
    path: the job's workdir.
    show: is passed what it found (`RunView.set_findings`).
    pool_url: the job's pool, if it is not in the workdir.
  """
  if not DOCTOR.value:
    return contextlib.nullcontext()
  from m2jax.evolve.doctor import live

  return live.watching(path, show, pool_url=pool_url)


_HELD_OUT = 'held-out loss'


@contextlib.contextmanager
def view(
  job: str, loops: Mapping[str, LoopConfig], metrics, leads: bool, held_out: bool
) -> Iterator[Callable[[], None]]:
  """Shows the progress of a training job, from its metrics, while the body runs.

  Args:
    job: its name.
    loops: budget of each phase of its records, in order.
    metrics: the MetricsWriter that it writes to.
    leads: whether this is process 0, the only one that shows it.
    held_out: whether a held-out loss follows, before which the body calls the function
      that it gets.
  """
  if not leads:
    yield lambda: None
    return
  from m2jax.observe.terminal import RunView

  expected_s = {p: loop.seconds or 0.2 * loop.steps for p, loop in loops.items()}
  if held_out:
    expected_s[_HELD_OUT] = 0.05 * sum(expected_s.values())
  left = list(loops)

  def on_record(record: Mapping[str, Any]) -> None:
    phase = record['phase']
    if phase in left[1:]:
      del left[: left.index(phase)]
      shown.begin(phase)
    shown.on_record(record)

  title = f'm2jax {job}'
  with (
    RunView(expected_s, title=title) as shown,
    watching(workdir(), shown.set_findings),
  ):
    metrics.add_listener(on_record)
    shown.begin(left[0])
    yield lambda: shown.begin(_HELD_OUT)
    shown.done()


def join_processes() -> int:
  """Connects to the job's other processes if --distributed; returns this one's index.

  Raises:
    BadInput: no address or number of processes is given.
  """
  if not DISTRIBUTED.value:
    return 0
  import jax

  from m2jax import sharding

  ours = {
    name: int(os.environ[variable])
    for name, variable in _PROCESS_VARIABLES.items()
    if variable in os.environ
  }
  jax.config.update('jax_enable_preemption_service', False)  # it takes SIGTERM
  try:
    sharding.join(
      **ours,
      heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
      shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT_S,
    )
  except ValueError as error:
    raise BadInput(
      f'--distributed: {error} Set JAX_COORDINATOR_ADDRESS=HOST:PORT, '
      'JAX_NUM_PROCESSES and JAX_PROCESS_ID'
    ) from error
  logging.info('process %d of %d', jax.process_index(), jax.process_count())
  return jax.process_index()


def make_sharding(mesh: MeshConfig, field: str = 'config.mesh') -> Sharding:
  """The job's mesh; for several processes whose config has none, all devices as fsdp.

  From here on the process compiles for its own devices only. To be called after
  `join_processes`. `field`: of the config, which errors name.

  Raises:
    BadInput: the mesh leaves out devices of the job's processes.
  """
  import jax

  from m2jax import platforms, sharding

  platforms.own_only()
  devices = jax.device_count()
  if jax.process_count() > 1 and mesh.size == 1:
    sizes = dict.fromkeys(mesh.sizes, 1)
    mesh = dataclasses.replace(mesh, **sizes | {'fsdp': devices})
    logging.info('%s: all %d devices, fsdp=%d', field, devices, devices)
  mesh = mesh.over(devices)
  if jax.process_count() > 1 and mesh.size != devices:
    raise BadInput(
      f'{field} has {mesh.size} devices, the {jax.process_count()} processes have '
      f'{devices}: set --{field}.data, fsdp, expert, tensor and context so that '
      f'their product is {devices}'
    )
  return sharding.make(mesh)


def resumes(checkpoints: pathlib.Path) -> bool:
  """Whether the job continues from a checkpoint of its own in this directory."""
  from m2jax.checkpoint import CheckpointManager

  if FRESH.value:
    return False
  return CheckpointManager(checkpoints, read_only=True).latest_step() is not None


@contextlib.contextmanager
def leader_first() -> Iterator[bool]:
  """Process 0 runs the body first; the others wait and run it after it succeeded.

  For files that one process writes and all read: the workdir's settings, the tokenizer.
  Yields whether this is process 0.

  Raises:
    Stopped: the body failed in process 0, which reports the error.
  """
  import jax
  import numpy as np
  from jax.experimental import multihost_utils

  from m2jax.forge.errors import Stopped

  leads, several = jax.process_index() == 0, jax.process_count() > 1
  share = lambda code: int(multihost_utils.broadcast_one_to_all(np.int32(code)))
  if several and not leads and (code := share(0)):
    raise Stopped('process 0 stopped: see its message', repeatable=code != FINAL)
  try:
    yield leads
  except BaseException as error:
    if several and leads:
      share(exit_code(error))
    raise
  if several and leads:
    share(0)


def build(kind: type, values: Any, path: str = 'config') -> Any:
  """A dataclass of `kind` from a ConfigDict or mapping, nested dataclasses included.

  Raises:
    BadInput: a field the dataclass does not have, one that is missing, or a bad value.
  """
  if isinstance(values, ml_collections.ConfigDict):
    values = values.to_dict(preserve_field_references=False)
  if values and (entries := fields.entries_of(kind)) is not None:
    return {name: build(entries, v, f'{path}.{name}') for name, v in values.items()}
  if dataclasses.is_dataclass(values):
    return values
  if not dataclasses.is_dataclass(kind) or values is None:
    return tuple(values) if isinstance(values, list) else values
  name = kind.__name__
  try:
    if hasattr(kind, 'kinds'):  # None is the kind's default (`fields.complete`)
      values = {field: value for field, value in values.items() if value is not None}
      name = f'kind {values.get("kind")!r}'
    kind = fields.chosen(kind, values)
  except ValueError as error:
    raise BadInput(f'{path}.{error}') from error
  hints = typing.get_type_hints(kind)
  known = {f.name: f for f in dataclasses.fields(kind)}
  unknown = sorted(set(values) - set(known))
  if unknown:
    raise BadInput(
      f'{path}: {name} has no field {", ".join(unknown)}; it has {", ".join(known)}'
    )
  missing = [
    name
    for name, f in known.items()
    if name not in values
    and f.default is dataclasses.MISSING
    and f.default_factory is dataclasses.MISSING
  ]
  if missing:
    raise BadInput(f'{path}: {kind.__name__} needs {", ".join(missing)}')
  nested = {
    name: build(_inner(hints[name]), value, f'{path}.{name}')
    for name, value in values.items()
  }
  try:
    return kind(**nested)
  except (TypeError, ValueError) as error:
    raise BadInput(f'{path}: {error}') from error


def _inner(hint: Any) -> Any:
  """`X` of `X | None`."""
  kinds = [kind for kind in fields.kinds_of(hint) if kind is not type(None)]
  return kinds[0] if len(kinds) == 1 else hint


def run(
  main: Callable[[], None], *expected: type[Exception], distributed: bool = False
) -> NoReturn:
  """Runs a program: `main()` after the flags are parsed.

  Bad input (BadInput, a ValueError of ours, missing files, and the `expected` errors),
  losses that stay NaN and a full disk end it with one line and code 2, which a
  scheduler does not repeat. Errors of the machine, and ValueErrors of other packages
  such as a storage layer, end it with code 1; Ctrl-C and SIGTERM with code 130, SIGTERM
  in a training loop after a checkpoint (`m2jax.train.stopping`).
  `distributed`: `main` calls `join_processes`.
  """

  def guarded(argv):
    quiet()
    try:
      if argv[1:]:
        raise BadInput(f'unexpected argument {argv[1]!r}: flags start with --')
      if DISTRIBUTED.value and not distributed:
        raise BadInput('--distributed: this job is one process')
      check_path('workdir', WORKDIR.value)
      with interruptible(), progress.listening(progress.Logged()):
        main()
    except Exception as error:
      full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
      if full:
        fail(BadInput(f'{error.strerror}: make room, then the same command resumes'))
      if isinstance(error, (ValueError, FileNotFoundError, *expected)) or hasattr(
        error, 'repeatable'
      ):
        fail(error)
      raise

  console.install()
  try:
    with pipelines():
      app.run(guarded, flags_parser=_parse)
  except SystemExit as end:
    if end.code == INTERRUPTED and not DISTRIBUTED.value:
      # A thread may still compile, and crashes when JAX is taken down. (Of several
      # processes JAX has to tell the others.)
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(INTERRUPTED)
    raise


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
  """Ctrl-C and SIGTERM in the body end the program with one line and code 130."""
  from m2jax.train import stopping

  stopping.forget()
  previous = signal.signal(signal.SIGTERM, stopping.on_signal)
  try:
    yield
  except KeyboardInterrupt:
    print('\nstopped: the same command resumes', file=sys.stderr)
    sys.exit(INTERRUPTED)
  finally:
    signal.signal(signal.SIGTERM, previous)


def check_stopped() -> None:
  """Ends an interrupted server: Ctrl-C ends it with success.

  Raises:
    KeyboardInterrupt: it was SIGTERM: a scheduler would take success for the end of it.
  """
  from m2jax.train import stopping

  if stopping.requested():
    raise KeyboardInterrupt


def fail(error: Exception, at_once: bool = False) -> NoReturn:
  """Exits with the error's message and code; --verbosity=1 shows the traceback.

  `at_once` is for the loss of another process: JAX would wait for it, and then abort.
  """
  logging.debug('%s', error, exc_info=error)
  message, code = str(error) or repr(error), exit_code(error)
  where = traceback.extract_tb(error.__traceback__)[-1:]
  if isinstance(error, ValueError) and where and not _ours(where[0].filename):
    where = where[0]
    name = '/'.join(pathlib.Path(where.filename).parts[-3:])
    message += f' ({name}, line {where.lineno}; --verbosity=1 shows the traceback)'
  print(f'error: {message}', file=sys.stderr, flush=True)
  if at_once:
    sys.stdout.flush()
    os._exit(code)
  sys.exit(code)


def _ours(filename: str) -> bool:
  """Whether code of this project raised an error, whose message is for users."""
  packages = map(sys.modules.get, ('experiments', 'm2jax', 'm2jax_pipelines'))
  folders = [folder for package in packages if package for folder in package.__path__]
  return any(map(pathlib.Path(filename).is_relative_to, folders))


def exit_code(error: BaseException) -> int:
  """FINAL for an error that the same command would meet again, else FAILED."""
  return FAILED if checks.repeatable(error) else FINAL


def quiet() -> None:
  """Logs only warnings of libraries, and INFO of this project."""
  for name in _CHATTY_LOGGERS:
    std_logging.getLogger(name).setLevel(std_logging.WARNING)

  def ours(record: std_logging.LogRecord) -> bool:
    if not any(part in record.pathname for part in _CHATTY_FILES):
      return True
    interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)  # not an error
    return record.levelno >= std_logging.WARNING and not interrupted

  logging.get_absl_logger().addFilter(ours)


def _parse(argv: list[str]) -> list[str]:
  """Parses the flags; an error in them ends the program with one line."""
  try:
    return flags.FLAGS(argv)
  except (AttributeError, KeyError) as error:  # an override of no field
    field = re.search(r'\w+', str(error))[0]  # a suggestion may follow it
    given = [a for a in argv if field in a.partition('=')[0].split('.')]
    if not given:
      raise  # an error inside the config file
    beside = _fields_beside(given[0], argv)
    fail(BadInput(f"{given[0]}: the config has no field '{field}'{beside}"))
  except (flags.Error, OSError) as error:
    # An error inside a config file has its traceback in the message.
    about, traced, _ = str(error).partition(': Error whilst parsing config file:')
    fail(BadInput(f'{about}: {_last_line(error)}' if traced else about))


def _fields_beside(flag: str, argv: list[str]) -> str:
  """'; config.GROUP has …', for an override of a field that its group does not have."""
  source = next((a for a in argv if a.startswith('--config=')), '').partition('=')[2]
  path, _, variant = source.partition(':')
  try:
    spec = importlib.util.spec_from_file_location('config_again', config_file(path))
  except ValueError:
    return ''
  if spec is None:
    return ''
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  group, where = module.get_config(*filter(None, [variant])), 'config'
  for name in flag.partition('=')[0].split('.')[1:]:
    if not isinstance(group.get(name), ml_collections.ConfigDict):
      break
    group, where = group[name], f'{where}.{name}'
  return f'; {where} has {", ".join(sorted(group))}'


def _last_line(error: Exception) -> str:
  return str(error).strip().splitlines()[-1].strip()
