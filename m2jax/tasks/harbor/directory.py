"""Task directories in Harbor's format: read, written and checked.

    task.toml            timeouts, and `[metadata.m2jax]`: the fields of `Metadata`
    instruction.md       the user's message
    environment/         Dockerfile, workspace.tar.gz, overlay/, setup.sh
    tests/               test.sh, which writes a reward, and the verifier's other files
    solution/            solve.sh, and its files

Source: facts/pipelines.md §4, and the Python package `harbor`, whose `Task` accepts
what `write` writes (tests/tasks/test_harbor.py). The workspace at the start is
`workspace.tar.gz` without `Metadata.remove`, and then the files of `overlay/`, on which
setup.sh has run: modes, links and times. The Dockerfile does the same. The archive may
be a hard link, shared by many tasks.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2jax.tasks.harbor import compose

ARCHIVE = 'workspace.tar.gz'
OVERLAY = 'overlay'
SETUP = 'setup.sh'
_SCHEMA = '1.4'  # harbor 0.26, models/task/config.py
_DOCKERFILE = """\
FROM {image}
RUN apt-get update && apt-get install -y --no-install-recommends {packages} \\
    && rm -rf /var/lib/apt/lists/*
{install}WORKDIR /workspace
{steps}"""


class BadTask(ValueError):
  """A directory is not a task; the message names the file and what is wrong."""


@dataclasses.dataclass(frozen=True)
class Metadata:
  """`[metadata.m2jax]` of task.toml.

  Attributes:
    pipeline, family: what made the task, and its class within the kind.
    collect, exclude: patterns of the agent's work (`compose`).
    remove: paths of the archive that the agent does not see.
    site: directory of Python packages in the dataset's `sites/`; '' for none.
    verifier_site: that of the verifier, if the agent does not have it.
    hide: names of Python modules whose copies on this machine sandboxes do not show,
      since the task is about them.
    verifier_needs: field of `sandbox.Limits` → at least this in the verifier's sandbox.
    answer: path in the judged tree that holds the final answer; '' for none.
    listing: whether test.sh gets the modes, links and other entries of the workspace.
    run: command that is run on each of the hidden inputs, `tests/inputs/N/`; '' for
      none (`runs`).
    max_tool_calls: maximum tool calls of an episode.
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
  baseline_calls: int = 1
  source: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Draft:
  """A task to be written.

  Attributes:
    name: of the directory; letters, digits, '.', '_' and '-'.
    instruction: Markdown.
    metadata: its facts.
    archive: path of a tar.gz to link into the directory; None for an empty workspace.
    setup: shell script for the workspace, run before an episode begins.
    overlay, tests, solution: relative path → content. `tests` has test.sh, `solution`
      has solve.sh.
    image: base image of the Dockerfile.
    install: Python requirements for the Dockerfile.
    packages: Debian packages for the Dockerfile.
    agent_s, verifier_s: time limits.
  """

  name: str
  instruction: str
  metadata: Metadata
  tests: Mapping[str, bytes]
  solution: Mapping[str, bytes]
  archive: Path | None = None
  setup: str = ''
  overlay: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  image: str = 'python:3.13-slim'
  install: tuple[str, ...] = ()
  packages: tuple[str, ...] = ()
  agent_s: float = 1800.0
  verifier_s: float = 120.0

  def by(self, author: str) -> Draft:
    """The draft with the author of its statement in `details`."""
    details = {**self.metadata.details, 'author': author}
    metadata = dataclasses.replace(self.metadata, details=details)
    return dataclasses.replace(self, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Directory:
  """A task that was read.

  Attributes:
    path: of the directory.
    instruction: of instruction.md.
    metadata: of task.toml.
    verifier_s: time limit of the verifier.
  """

  path: Path
  instruction: str
  metadata: Metadata
  verifier_s: float

  @property
  def dataset(self) -> Path:
    """The dataset, of which this is `tasks/SPLIT/NAME`."""
    return self.path.parents[2]

  def archive(self) -> dict[str, bytes]:
    """Files of the archive, those that the agent does not see included."""
    path = self.path / 'environment' / ARCHIVE
    return compose.unpack(path.read_bytes()) if path.exists() else {}

  def workspace(self) -> dict[str, bytes]:
    """Files of the workspace at the start of an episode."""
    files = self.archive()
    for path in self.metadata.remove:
      files.pop(path, None)
    return {**files, **_files(self.path / 'environment' / OVERLAY)}

  def setup(self) -> str:
    """The script that runs in the workspace before an episode; '' for none."""
    path = self.path / 'environment' / SETUP
    return path.read_text(encoding='utf-8') if path.exists() else ''

  def tests(self) -> dict[str, bytes]:
    """Files of tests/."""
    return _files(self.path / 'tests')

  def solution(self) -> dict[str, bytes]:
    """Files of solution/."""
    return _files(self.path / 'solution')


def write(draft: Draft, split_directory: Path) -> Path:
  """Writes a task into `split_directory`; returns its directory.

  An interrupted write leaves a directory whose name begins with a dot.

  Raises:
    BadTask: the draft has no test.sh or solve.sh.
    FileExistsError: there is a task of this name.
  """
  import tomli_w

  for files, name in ((draft.tests, 'test.sh'), (draft.solution, 'solve.sh')):
    if name not in files:
      raise BadTask(f'{draft.name}: no {name}')
  target = split_directory / draft.name
  if target.exists():
    raise FileExistsError(f'{target}: there is a task of this name')
  partial = split_directory / f'.{draft.name}.partial'
  shutil.rmtree(partial, ignore_errors=True)
  environment = partial / 'environment'
  environment.mkdir(parents=True)
  (environment / 'Dockerfile').write_text(_dockerfile(draft))
  if draft.archive is not None:
    _link(draft.archive, environment / ARCHIVE)
  compose.write(draft.overlay, environment / OVERLAY)
  if draft.setup:
    (environment / SETUP).write_text(draft.setup, encoding='utf-8')
  compose.write(draft.tests, partial / 'tests')
  if draft.archive is not None:  # for a test.sh that Harbor runs
    _link(draft.archive, partial / 'tests' / ARCHIVE)
  compose.write(draft.solution, partial / 'solution')
  for script in (partial / 'tests' / 'test.sh', partial / 'solution' / 'solve.sh'):
    script.chmod(0o755)
  (partial / 'instruction.md').write_text(draft.instruction, encoding='utf-8')
  (partial / 'task.toml').write_text(tomli_w.dumps(_toml(draft)), encoding='utf-8')
  partial.rename(target)
  return target


def read(path: Path) -> Directory:
  """Reads a task directory.

  Raises:
    BadTask: something is missing or wrong; names it.
  """
  _refuse_links_out(path)
  for name in ('task.toml', 'instruction.md', 'tests/test.sh'):
    if not (path / name).is_file():
      raise BadTask(f'{path}: no {name}')
  try:
    table = tomllib.loads((path / 'task.toml').read_text(encoding='utf-8'))
  except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
    raise BadTask(f'{path}/task.toml: {error}') from error
  ours = table.get('metadata', {}).get('m2jax')
  if ours is None:
    raise BadTask(
      f'{path}/task.toml: no [metadata.m2jax], so no pipeline of m2jax made this task,'
      ' and its verifier cannot be kept apart from the agent here; run it with `harbor'
      ' run`, or make tasks with `python -m experiments.make_tasks`'
    )
  try:
    known = {field.name: field for field in dataclasses.fields(Metadata)}
    values = {
      key: tuple(value) if isinstance(value, list) else value
      for key, value in ours.items()
      if key in known
    }
    metadata = Metadata(**values)
    verifier_s = float(table.get('verifier', {}).get('timeout_sec', 600.0))
  except (AttributeError, TypeError, ValueError) as error:
    raise BadTask(f'{path}/task.toml: metadata.m2jax: {error!r}') from error
  instruction = (path / 'instruction.md').read_text(encoding='utf-8')
  return Directory(path, instruction, metadata, verifier_s)


def _refuse_links_out(path: Path) -> None:
  """Raises BadTask if a link leads out of the directory, or there are other kinds."""
  root = path.resolve()
  for directory, names, files in os.walk(path):
    for name in (*names, *files):
      entry = Path(directory, name)
      if not entry.resolve().is_relative_to(root):
        raise BadTask(f'{entry}: a link that leads out of the task')
      if name in files and not entry.is_file():
        raise BadTask(f'{entry}: not a file')


def _dockerfile(draft: Draft) -> str:
  steps = []
  if draft.archive is not None:
    steps.append(f'ADD {ARCHIVE} /workspace/')
  if draft.metadata.remove:
    steps.append('RUN rm -f ' + ' '.join(map(_quoted, draft.metadata.remove)))
  if draft.overlay:
    steps.append(f'COPY {OVERLAY}/ /workspace/')
  if draft.setup:
    steps += [f'COPY {SETUP} /tmp/', f'RUN bash /tmp/{SETUP} && rm /tmp/{SETUP}']
  install = ''
  if draft.install:
    names = ' '.join(map(_quoted, draft.install))
    install = f'RUN pip install --no-cache-dir {names}\n'
  if draft.metadata.hide:
    wanted = [
      f'-name {_quoted(n)}' for m in draft.metadata.hide for n in (m, f'{m}.py')
    ]
    found = f"find / -xdev -path '*-packages/*' \\( {' -o '.join(wanted)} \\)"
    install += f'RUN {found} -prune -exec rm -rf {{}} +\n'
  return _DOCKERFILE.format(
    image=draft.image,
    packages=' '.join(['bash', *draft.packages]),
    install=install,
    steps=''.join(f'{s}\n' for s in steps),
  )


def _quoted(word: str) -> str:
  return "'" + word.replace("'", "'\\''") + "'"


def _toml(draft: Draft) -> dict[str, Any]:
  ours = {
    key: list(value) if isinstance(value, tuple) else value
    for key, value in dataclasses.asdict(draft.metadata).items()
  }
  return {
    'schema_version': _SCHEMA,
    'metadata': {'m2jax': ours},
    'agent': {'timeout_sec': draft.agent_s},
    'verifier': {'timeout_sec': draft.verifier_s},
    'environment': {'network_mode': 'no-network', 'cpus': 1, 'memory_mb': 2048},
  }


def _link(source: Path, target: Path) -> None:
  try:
    os.link(source, target)
  except OSError:  # another file system
    shutil.copyfile(source, target)


def _files(root: Path) -> dict[str, bytes]:
  if not root.is_dir():
    return {}
  return {
    path.relative_to(root).as_posix(): path.read_bytes()
    for path in sorted(root.rglob('*'))
    if path.is_file() and not path.is_symlink()
  }
