"""task.toml of a task that a pipeline made, and the most that any task may ask for.

A task directory may come from anywhere. Of Harbor's own fields, those below are checked
and the others ignored; `[metadata.m2jax]` may have the fields of `Metadata` and no
others. Without that table the task is another tool's (`standard`). Every fault is a
`BadTask` that names the file and the field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import reprlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from m2jax import sandbox
from m2jax.checks import check_fields, check_type
from m2jax.tasks.harbor import compose
from m2jax.text import strict_json

_VERIFIER_S = 600.0  # Harbor's default
# harbor 0.26, models/task/config.py
_STANDARD = {
  'agent': {'timeout_sec': 'float'},
  'verifier': {'timeout_sec': 'float'},
  'environment': {
    'build_timeout_sec': 'float',
    'cpus': 'float',
    'memory_mb': 'int',
    'storage_mb': 'int',
    'gpus': 'int',
  },
}


class BadTask(ValueError):
  """A directory is not a task; the message names the file and what is wrong."""


@dataclasses.dataclass(frozen=True)
class Ceilings(sandbox.Limits):
  """The most that a task may ask for; one that asks for more is a `BadTask`.

  Attributes:
    cpu_s, memory_bytes, processes, output_bytes, file_bytes, workspace_bytes: limits of
      the verifier's sandbox, as in `sandbox.Limits`; the memory also of a container.
    wall_s: elapsed time of the verifier.
    tool_calls: tool calls of an episode.
    cpus, storage_bytes: processors and file system of a container.
    build_s, agent_s: elapsed time of an image's build, and of an episode.
  """

  cpu_s: int = 3600
  memory_bytes: int = 4 << 30
  processes: int = 1024
  output_bytes: int = 8 << 20
  file_bytes: int = 1 << 30
  workspace_bytes: int = 1 << 30
  wall_s: float = 3600.0
  tool_calls: int = 1000
  cpus: int = 8
  storage_bytes: int = 16 << 30
  build_s: int = 3600
  agent_s: int = 14_400


CEILINGS = Ceilings()


@dataclasses.dataclass(frozen=True)
class Metadata:
  """`[metadata.m2jax]` of task.toml.

  Attributes:
    pipeline, family: what made the task, and its class within the kind.
    collect, exclude: patterns of the agent's work (`compose`).
    remove: paths of the archive that the agent does not see.
    site: directory of Python packages in the dataset's `sites/`; '' for none.
    verifier_site: the verifier's site, if the agent does not have it.
    hide: names of Python modules (`sklearn`, `sklearn.datasets.data`) whose copies on
      this machine sandboxes do not show, since the task is about them.
    verifier_needs: field of `sandbox.Limits` → at least this in the verifier's sandbox.
    answer: path of the final answer in the judged tree; '' for none.
    listing: whether test.sh gets the modes, links and other entries of the workspace.
    run: command that is run on each of the hidden inputs, `tests/inputs/N/`; '' for
      none (`runs`).
    max_tool_calls: maximum tool calls of an episode.
    wall_s: elapsed time of an episode in seconds; 0: not limited by the task.
    baseline_calls: tool calls that a correct solution needs.
    source: provenance: name, version, sha256, licence.
    details: further facts of the pipeline.
  """

  pipeline: str
  family: str
  collect: tuple[str, ...] = ('*',)
  exclude: tuple[str, ...] = ()
  remove: tuple[str, ...] = ()
  site: str = ''
  verifier_site: str = ''
  hide: tuple[str, ...] = ()
  verifier_needs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  answer: str = ''
  listing: bool = False
  run: str = ''
  max_tool_calls: int = 50
  wall_s: float = 0.0
  baseline_calls: int = 1
  source: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
  """Errors of a file of a task, as BadTask with its path."""
  try:
    yield
  except RecursionError:
    raise BadTask(f'{path}: nested too deep') from None
  except ValueError as error:
    raise BadTask(f'{path}: {error}') from error


def load(text: str) -> dict[str, Any]:
  """The table of a task.toml, finite, within 64 bits and of bounded depth.

  Raises:
    ValueError, RecursionError: it is none.
  """
  table = tomllib.loads(text)
  strict_json.check(table)
  return table


def is_made(table: Mapping[str, Any]) -> bool:
  """Whether a pipeline of m2jax made the task: it has [metadata.m2jax]."""
  check_type(table.get('metadata', {}), 'Mapping[str, Any]', 'metadata')
  return 'm2jax' in table.get('metadata', {})


def parse(table: Mapping[str, Any], ceilings: Ceilings) -> tuple[Metadata, float]:
  """Metadata, and the verifier's time limit in seconds, of a made task.

  Raises:
    ValueError: a field is missing, unknown, of another type, out of range or above the
      ceilings.
  """
  verifier_s = min(_VERIFIER_S, ceilings.wall_s)
  for section, types in _STANDARD.items():
    values = table.get(section, {})
    check_type(values, 'Mapping[str, Any]', section)
    for name in types.keys() & values.keys():
      check_type(values[name], types[name], f'{section}.{name}')
      if name == 'timeout_sec' and not values[name]:
        raise ValueError(f'{section}.{name} is 0: must be above 0')
  if (asked := table.get('verifier', {}).get('timeout_sec')) is not None:
    check_ceiling(asked, ceilings, 'wall_s', 'verifier.timeout_sec')
    verifier_s = float(asked)
  return _metadata(table['metadata']['m2jax'], ceilings), verifier_s


def _metadata(ours: Mapping[str, Any], ceilings: Ceilings) -> Metadata:
  where = 'metadata.m2jax'
  check_type(ours, 'Mapping[str, Any]', where)
  check_fields(Metadata, ours, where)
  for name in ('pipeline', 'family'):
    if name not in ours:
      raise ValueError(f'{where}.{name} is missing')
  for name in ('remove', 'answer', 'site', 'verifier_site'):
    paths = ours.get(name, ())
    for path in filter(None, [paths] if isinstance(paths, str) else paths):
      if not compose.is_inside(path):
        shown = f'{where}.{name} has {reprlib.repr(path)}'
        raise ValueError(f"{shown}: must be a relative path, without '.' or '..'")
  for name, value in ours.get('verifier_needs', {}).items():
    if name not in sandbox.Limits.__dataclass_fields__ or name == 'wall_s':
      raise ValueError(f'{where}.verifier_needs has no field {reprlib.repr(name)}')
    field = f'{where}.verifier_needs.{name}'
    check_type(value, 'int', field)
    check_ceiling(value, ceilings, name, field)
  values = {k: tuple(v) if isinstance(v, list) else v for k, v in ours.items()}
  found = Metadata(**values)
  field = f'{where}.max_tool_calls'
  check_ceiling(found.max_tool_calls, ceilings, 'tool_calls', field)
  check_ceiling(found.wall_s, ceilings, 'agent_s', f'{where}.wall_s')
  return found


def check_ceiling(value: float, ceilings: Ceilings, name: str, field: str) -> None:
  """Raises ValueError if a task asks for more than it may."""
  if value > (most := getattr(ceilings, name)):
    raise ValueError(
      f'{field} is {value}, above {most}: set tasks.ceilings.{name} to allow it'
    )
