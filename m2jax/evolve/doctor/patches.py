"""Patches of the code that a config names by import path, in a git worktree.

A diff may change the text of these files and nothing else: no other path, no new,
deleted or renamed file, no mode, no binary. `git` itself reads it, and applies it to a
worktree of the commit at HEAD in a temporary directory. The files of the user's
checkout are read and never written; hooks do not run. The patched code runs in a
sandbox only (`trials`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping

_IMPORT = re.compile(r'[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?::[A-Za-z_]\w*)?')
_REGULAR = ('100644', '100755')
MAX_FILES, MAX_FILE_BYTES = 16, 64 << 10
_TIMEOUT_S = 300.0


class BadPatch(ValueError):
  """A diff that does not apply, or that changes what it may not."""


@dataclasses.dataclass(frozen=True)
class Checkout:
  """The user's repository, as it is at its commit.

  Attributes:
    root: its directory.
    commit: the commit at HEAD.
    files: path from the root → text, of the files that may be patched.
  """

  root: pathlib.Path
  commit: str
  files: Mapping[str, str]


def find(import_paths: Iterable[str], directory: pathlib.Path) -> Checkout | None:
  """The files of import paths in the repository of a directory; None if it has none.

  `package.module` and `module.file:function` are files of the directory, from which the
  job imports them; a package is its own `*.py`. Files that git does not track are left
  out, as are links.
  """
  try:
    root = pathlib.Path(_git(directory, 'rev-parse', '--show-toplevel').strip())
    commit = _git(directory, 'rev-parse', 'HEAD').strip()
  except (BadPatch, OSError):
    return None
  files: dict[str, str] = {}
  for name in import_paths:
    if not _IMPORT.fullmatch(name):
      continue
    place = directory.resolve() / name.partition(':')[0].replace('.', '/')
    try:
      below = place.relative_to(root.resolve()).as_posix()
    except ValueError:
      continue
    listed = _git(root, 'ls-tree', '-z', commit, f'{below}.py', f'{below}/')
    for entry in filter(None, listed.split('\0')):
      about, _, path = entry.partition('\t')
      if about.split()[0] in _REGULAR and path.endswith('.py'):
        text = _git(root, 'show', f'{commit}:{path}')
        if len(files) < MAX_FILES and len(text) <= MAX_FILE_BYTES:
          files[path] = text
  return Checkout(root, commit, files) if files else None


def check(checkout: Checkout, diff: str) -> None:
  """Raises BadPatch unless the diff changes only `checkout.files`, and applies."""
  with worktree(checkout, diff):
    pass


@contextlib.contextmanager
def worktree(checkout: Checkout, diff: str) -> Iterator[pathlib.Path]:
  """A worktree of the commit with the diff applied; removed at the end.

  Raises:
    BadPatch: see `check`.
  """
  if '\0' in diff:
    raise BadPatch('the diff has a NUL')
  with tempfile.TemporaryDirectory(prefix='m2jax-patch-') as parent:
    place = pathlib.Path(parent) / 'worktree'
    _git(
      checkout.root,
      *('worktree', 'add', '--quiet', '--detach', str(place), checkout.commit),
    )
    try:
      _check_paths(place, checkout, diff)
      _git(place, 'apply', '--recount', '-', text=diff)
      yield place
    finally:
      _git(checkout.root, 'worktree', 'remove', '--force', str(place))


def _check_paths(place: pathlib.Path, checkout: Checkout, diff: str) -> None:
  if other := _git(place, 'apply', '--recount', '--summary', '-', text=diff).strip():
    raise BadPatch(f'the diff may only change lines, not: {other[:200]}')
  listed = _git(place, 'apply', '--recount', '--numstat', '-z', '-', text=diff)
  for entry in filter(None, listed.split('\0')):
    added, _, rest = entry.partition('\t')
    _, _, path = rest.partition('\t')
    if path not in checkout.files or not added.isdigit():
      raise BadPatch(
        f'the diff changes {path[:200] or "another file"!r}; it may change only '
        + ', '.join(checkout.files)
      )
  if not listed:
    raise BadPatch('the diff changes nothing')


def _git(directory: pathlib.Path, *arguments: str, text: str | None = None) -> str:
  """Output of git. Raises BadPatch with its message if it fails."""
  env = {k: v for k, v in os.environ.items() if not k.startswith('GIT_')}
  done = subprocess.run(
    ['git', '-c', 'core.hooksPath=/dev/null', '-c', 'core.fsmonitor=false', *arguments],
    cwd=directory,
    env=env | {'GIT_TERMINAL_PROMPT': '0', 'LC_ALL': 'C'},
    input=(text or '').encode('utf-8', 'replace'),
    capture_output=True,
    timeout=_TIMEOUT_S,
  )
  if done.returncode:
    raise BadPatch(done.stderr.decode(errors='replace').strip()[:300] or 'git failed')
  return done.stdout.decode(errors='replace')
