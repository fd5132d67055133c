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

A directory without `[metadata.m2jax]` is another tool's: the fields of task.toml are
those of `standard`, environment/ is the context of a Dockerfile, or has a
docker-compose.yaml (`service`), or an image is named, and `container` runs it.
A dataset is one of

    DATASET/tasks/{train,dev,held_out}/NAME/   the three splits
    DATASET/NAME/, or DATASET/tasks/NAME/      split by a hash of the name (`split_of`)
    DATASET/                                   one task, which is in every split
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2jax.tasks.harbor import compose, schema, standard
from m2jax.tasks.harbor import service as service_lib
from m2jax.tasks.harbor.schema import BadTask, Metadata

SPLITS = ('train', 'dev', 'held_out')
STAGING = '.staging'  # beside the splits: tasks that are being proved
SHARES = {'train': 0.8, 'dev': 0.1, 'held_out': 0.1}
ARCHIVE = 'workspace.tar.gz'
OVERLAY = 'overlay'
SETUP = 'setup.sh'
COMPOSE = 'environment/docker-compose.yaml'
MAX_BYTES = 256 << 20  # of all files of a task
TOOL_CALLS = 200  # of an episode of a task that does not say
_MAX_TEXT_BYTES = 1 << 20
_MAX_TOML_BYTES = 64 << 10  # a parser needs seconds for deeply dotted keys in more
_NAME = re.compile('[!->A-~]+')  # a spec has separators, '?' and '@'
_SCHEMA = '1.4'  # harbor 0.26, models/task/config.py
_DOCKERFILE = """\
FROM {image}
RUN apt-get update && apt-get install -y --no-install-recommends {packages} \\
    && rm -rf /var/lib/apt/lists/*
{install}WORKDIR /workspace
{steps}"""


@dataclasses.dataclass(frozen=True)
class Draft:
  """A task to be written.

  Attributes:
    name: the directory's name; letters, digits, '.', '_' and '-'.
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
    path: the directory's path.
    instruction: the text of instruction.md.
    metadata: `[metadata.m2jax]`; of another tool's task, what serves in its place.
    verifier_s: time limit of the verifier.
    settings: task.toml of another tool's task; None: a pipeline of m2jax made it.
  """

  path: Path
  instruction: str
  metadata: Metadata
  verifier_s: float
  settings: standard.Settings | None = None

  @property
  def dataset(self) -> Path:
    """The dataset that has the task, also one that is tried before it has a split."""
    parts = self.path.parent.parts
    split = len(parts) > 2 and parts[-2] == 'tasks'
    split = split and (parts[-1] in SPLITS or parts[-1] == STAGING)
    return self.path.parents[2] if split else self.path.parent

  def as_standard(self) -> Directory:
    """A task of ours as other tools run it, by its Dockerfile and test.sh.

    Raises:
      BadTask: its verifier needs what only a sandbox gives it.
    """
    metadata = self.metadata
    for name in ('answer', 'listing', 'run'):
      if getattr(metadata, name):
        raise BadTask(
          f'{self.path}: metadata.m2jax.{name} is only judged in a sandbox: set '
          'episodes.backend=namespaces'
        )
    text = _text(self.path, 'task.toml', _files(self.path, 'task.toml')['task.toml'])
    with schema.named(self.path / 'task.toml'):
      settings = standard.parse(schema.load(text), schema.CEILINGS)
    return dataclasses.replace(self, settings=settings)

  def service(self, variables: Mapping[str, str]) -> service_lib.Service:
    """The container that docker-compose.yaml describes; see `service.parse`."""
    data = _files(self.path, COMPOSE).get(COMPOSE)
    if data is None:
      return service_lib.Service()
    with schema.named(self.path / COMPOSE):
      return service_lib.parse(_text(self.path, COMPOSE, data), variables)

  def files(self, folder: str) -> dict[str, bytes]:
    """Files below a folder, such as 'environment/', by their paths in it."""
    return self._below(folder)

  def archive(self) -> dict[str, bytes]:
    """Files of the archive, those that the agent does not see included."""
    path = f'environment/{ARCHIVE}'
    data = _files(self.path, path).get(path)
    try:
      return {} if data is None else compose.unpack(data)
    except compose.BadArchive as error:
      raise BadTask(f'{self.path / path}: {error}') from error

  def workspace(self) -> dict[str, bytes]:
    """Files of the workspace at the start of an episode."""
    files = self.archive()
    for path in self.metadata.remove:
      files.pop(path, None)
    return {**files, **self._below(f'environment/{OVERLAY}/')}

  def setup(self) -> str:
    """The script that runs in the workspace before an episode; '' for none."""
    path = f'environment/{SETUP}'
    return _text(self.path, path, _files(self.path, path).get(path, b''))

  def tests(self) -> dict[str, bytes]:
    """Files of tests/."""
    return self._below('tests/')

  def solution(self) -> dict[str, bytes]:
    """Files of solution/."""
    return self._below('solution/')

  def _below(self, folder: str) -> dict[str, bytes]:
    found = _files(self.path, folder)
    return {path.removeprefix(folder): data for path, data in found.items()}


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


def read(path: Path, ceilings: schema.Ceilings = schema.CEILINGS) -> Directory:
  """Reads a task directory, which may be from anywhere.

  Args:
    path: the directory's path.
    ceilings: the most that the task may ask for.

  Raises:
    BadTask: something is missing, wrong or not supported; names it. So do the methods
      of the result.
  """
  if not _NAME.fullmatch(path.name):
    wrong = "must be printable ASCII without spaces, '?' and '@'"
    raise BadTask(f'{path.parent}: the name of a task is {path.name!a}: {wrong}')
  toml, test = 'task.toml', 'tests/test.sh'
  needed = [toml, 'instruction.md', test]
  builds = 'environment/Dockerfile', 'tests/Dockerfile', COMPOSE
  found = _files(path, *needed, *builds)
  _check_present(path, found, needed[:2])
  text, instruction = (_text(path, name, found[name]) for name in needed[:2])
  with schema.named(path / toml):
    table = schema.load(text)
    made = schema.is_made(table)
    if made:
      metadata, verifier_s = schema.parse(table, ceilings)
    else:
      settings = standard.parse(table, ceilings)
  if made:
    _check_present(path, found, needed)
    return Directory(path, instruction, metadata, verifier_s)
  metadata = Metadata(
    'harbor', settings.family, max_tool_calls=min(TOOL_CALLS, ceilings.tool_calls)
  )
  task = Directory(path, instruction, metadata, settings.verifier_s, settings)
  if not (
    settings.separate and ('tests/Dockerfile' in found or settings.separate.image)
  ):
    _check_present(path, found, needed)
  service = task.service({})
  place = f'{service.context}/' if service.context else ''
  if not (service.image or settings.machine.image):
    _check_present(
      path, _files(path, file := f'environment/{place}{service.dockerfile}'), [file]
    )
  return task


def _check_present(path: Path, found: Mapping[str, bytes], needed) -> None:
  for name in needed:
    if name not in found:
      raise BadTask(f'{path}: no {name}')


def split_of(name: str, shares: Mapping[str, float] = SHARES) -> str:
  """The split of a task of a dataset without splits: by a hash of its name.

  So it is the same on every machine, and stays when tasks are added.

  Args:
    name: the task's name.
    shares: split -> relative share.

  Example:
    >>> split_of('hello-world')
    'train'
  """
  place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], 'big') / 2**64
  left = place * sum(shares.values())
  for split in SPLITS:
    left -= shares.get(split, 0.0)
    if left < 0:
      return split
  return next(split for split in reversed(SPLITS) if shares.get(split))


def paths(
  dataset: Path, split: str, shares: Mapping[str, float] = SHARES
) -> list[Path]:
  """Directories of a split's tasks, sorted; see the module for a dataset's forms."""
  if (dataset / 'task.toml').is_file():
    return [dataset]
  root, divided = _root(dataset)
  if divided:
    return _entries(root / split)
  found = [path for path in _entries(root) if (path / 'task.toml').is_file()]
  return [path for path in found if split_of(path.name, shares) == split]


def locate(dataset: Path, split: str, name: str) -> Path:
  """The directory of a task of a dataset."""
  if (dataset / 'task.toml').is_file():
    return dataset
  root, divided = _root(dataset)
  return root / split / name if divided else root / name


def _root(dataset: Path) -> tuple[Path, bool]:
  """Where tasks or splits are, and whether they are splits."""
  tasks = dataset / 'tasks'
  if any((tasks / split).is_dir() for split in SPLITS):
    return tasks, True
  has = tasks.is_dir() and not (tasks / 'task.toml').is_file()
  return tasks if has else dataset, False


def _entries(root: Path) -> list[Path]:
  if not root.is_dir():
    return []
  return sorted(path for path in root.iterdir() if not path.name.startswith('.'))


def _files(root: Path, *wanted: str) -> dict[str, bytes]:
  """Files of a task by relative path: those of these names, or below `name/`.

  Looks at every entry of the task, and follows no link.

  Raises:
    BadTask: an entry is a link or no file, or together they are too large.
  """
  if root.is_symlink() or not root.is_dir():
    raise BadTask(f'{root}: not a task directory')
  found, left = {}, MAX_BYTES
  folders = tuple(name for name in wanted if name.endswith('/'))
  try:
    for prefix, names, files, fd in compose.walk(root):
      for name in (*names, *files):
        path, entry = prefix + name, os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISDIR(entry.st_mode):
          continue
        where = root / path.encode('unicode_escape').decode()  # one line
        if not stat.S_ISREG(entry.st_mode):
          raise BadTask(f'{where}: a link, pipe or device; a task has only files')
        left -= entry.st_size
        if left < 0:
          raise BadTask(f'{where}: the task has more than {MAX_BYTES} bytes')
        if path in wanted or path.startswith(folders):
          found[path] = compose.read(name, fd, entry.st_size)
          if found[path] is None:
            raise BadTask(f'{where}: cannot be read')
  except compose.Rejected as error:
    raise BadTask(f'{root}: {error}') from error
  return dict(sorted(found.items()))


def _text(root: Path, path: str, data: bytes) -> str:
  most = _MAX_TOML_BYTES if path in ('task.toml', COMPOSE) else _MAX_TEXT_BYTES
  try:
    if len(data) <= most:
      return data.decode()
    why = f'more than {most} bytes'
  except UnicodeDecodeError as error:
    why = f'not UTF-8 at byte {error.start}'
  raise BadTask(f'{root / path}: {why}')


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
      f'-path {_quoted("*/" + name)}'
      for path in (module.replace('.', '/') for module in draft.metadata.hide)
      for name in (path, f'{path}.py')
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
