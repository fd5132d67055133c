"""Trees that tests run in, and what tests leave in directories.

Standard library only: the file is copied into each task.
"""

import contextlib
import os
import shutil
import tempfile


def composed(here, collect, exclude):
  """A tree of the original files with the agent's work in /workspace over them.

  Args:
    here: the task's tests/.
    collect, exclude: what is work, as `compose.is_work` takes it.

  Raises:
    compose.Rejected: the work cannot be laid over them.
  """
  import compose

  policy = collect, exclude
  with open(os.path.join(here, 'workspace.tar.gz'), 'rb') as file:
    original = compose.unpack(file.read())
  work = compose.gather('/workspace', *policy)
  place, ours = os.path.join(here, 'workspace'), {}
  if os.path.isdir(place):
    ours = compose.gather(place, ('*',), ())
  target = tempfile.mkdtemp()
  compose.write(compose.compose(original, work, ours, *policy), target)
  return target


@contextlib.contextmanager
def copied(tree, changed, without=()):
  """A copy of a tree with other texts, which cannot be written; removed at the end.

  Args:
    tree: a directory.
    changed: {path: text} instead of its files, or besides them.
    without: paths of files that are left out.
  """
  place = tempfile.mkdtemp()
  target = os.path.join(place, 'tree')
  left_out = {os.path.join(tree, path) for path in without}
  try:
    shutil.copytree(
      tree,
      target,
      ignore=lambda at, names: [n for n in names if os.path.join(at, n) in left_out],
    )
    _set_modes(place, 0o755, 0o644)
    for path, text in changed.items():
      full = os.path.join(target, path)
      os.makedirs(os.path.dirname(full), exist_ok=True)
      with open(full, 'w', encoding='utf-8', errors='surrogateescape') as file:
        file.write(text)
    _set_modes(place, 0o555, 0o444)
    yield target
  finally:
    remove(place)


def _set_modes(root, directory_mode, file_mode):
  os.chmod(root, directory_mode | 0o200)
  for directory, names, files in os.walk(root):
    for name in names:
      os.chmod(os.path.join(directory, name), directory_mode)
    for name in files:
      os.chmod(os.path.join(directory, name), file_mode)
  os.chmod(root, directory_mode)


def entries():
  """Entries of the directories that tests can write, in a sandbox of the verifier's.

  What a run leaves there could tell a later one its number.
  """
  if not os.environ.get('M2JAX_PRIVATE'):
    return set()
  logs = os.environ['M2JAX_LOGS']
  found = set()
  for place in (tempfile.gettempdir(), '/dev/shm', logs, os.path.dirname(logs)):
    with contextlib.suppress(OSError):
      found |= {os.path.join(place, name) for name in os.listdir(place)}
  return found


def remove(path):
  """Removes what a run may have left without permissions."""
  if os.path.isdir(path) and not os.path.islink(path):
    os.chmod(path, 0o700)
    for directory, names, _ in os.walk(path):
      for name in names:
        full = os.path.join(directory, name)
        if not os.path.islink(full):
          os.chmod(full, 0o700)
    shutil.rmtree(path, ignore_errors=True)
  else:
    with contextlib.suppress(OSError):
      os.unlink(path)
