"""Verdict on a workspace that an untrusted agent has modified.

The end state is compared with the one computed when the task was built: exactly the
expected files, each a regular file with the expected bytes, and no others. The agent
may have left symlinks, pipes, deep trees or gigabytes, so no link is followed, every
read is bounded by the expected size, and a walk stops at the first difference.

Partial credit, for training, is the fraction that is right among the files that had to
change and the answer, if one was asked for. The number of right ones is first reduced
by one for each other file that was changed and by one if there are additional files;
the result is never below 0.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

# Errors that an agent can cause with its own files; others are the machine's.
_AGENT_ERRORS = frozenset(
  (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.ENXIO, errno.EPERM)
)


@dataclasses.dataclass(frozen=True)
class Expected:
  """The end state that counts as success; call it to judge one.

  Attributes:
    files: name -> content: the whole workspace, which has no directories, untouched
      files included.
    answer: the right final answer; None accepts any answer that is not empty. An empty
      one always fails: an agent that need not answer after an edit unlearns to answer.
    before: the workspace at the start; only used for partial credit.
    partial_credit: factor in [0, 1] on the partial credit of a wrong end state.

  Raises:
    ValueError: a file in a directory.
  """

  files: Mapping[str, bytes]
  answer: str | None = None
  before: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  partial_credit: float = 0.0

  def __post_init__(self):
    if any('/' in path for path in (*self.files, *self.before)):
      raise ValueError('Expected is only defined for workspaces without directories')

  def __call__(self, workspace: Path, answer: str) -> float:
    """Returns 1.0 if `workspace` and `answer` are as expected, else partial credit.

    Raises:
      OSError: the workspace is missing or the machine failed while reading it.
    """
    given = normalize_answer(answer)
    right = bool(given)
    if self.answer is not None:
      right = given == normalize_answer(self.answer)
    if right and self._matches(workspace):
      return 1.0
    if not self.partial_credit:
      return 0.0
    return self.partial_credit * self._partial(workspace, right)

  def _partial(self, workspace: Path, right: bool) -> float:
    """Fraction of the required changes made, less the unwanted ones."""
    paths = self.before.keys() | self.files.keys()
    fd = _open(workspace)
    if fd is None:
      return 0.0
    try:
      as_expected = {path: self._path_matches(fd, path) for path in paths}
      with os.scandir(fd) as entries:
        others = any(entry.name not in paths for entry in entries)
    except OSError as error:
      if error.errno in _AGENT_ERRORS:
        return 0.0
      raise
    finally:
      os.close(fd)
    to_change = {p for p in paths if self.before.get(p) != self.files.get(p)}
    done = [as_expected[path] for path in to_change]
    if self.answer is not None:
      done.append(right)
    unwanted = others + sum(not as_expected[path] for path in paths - to_change)
    return max(0, sum(done) - unwanted) / len(done) if done else 0.0

  def _path_matches(self, fd: int, path: str) -> bool:
    try:
      if path in self.files:
        return _file_matches(fd, path, self.files[path])
      os.stat(path, dir_fd=fd, follow_symlinks=False)
    except OSError as error:
      if error.errno not in _AGENT_ERRORS:
        raise
      return path not in self.files and error.errno == errno.ENOENT
    return False

  def _matches(self, workspace: Path) -> bool:
    fd = _open(workspace)
    if fd is None:
      return False
    try:
      found = set()
      with os.scandir(fd) as entries:
        for entry in entries:
          if entry.name not in self.files:
            return False
          found.add(entry.name)
      return found == self.files.keys() and all(
        _file_matches(fd, name, content) for name, content in self.files.items()
      )
    except OSError as error:
      if error.errno in _AGENT_ERRORS:
        return False
      raise
    finally:
      os.close(fd)


def _open(workspace: Path) -> int | None:
  """Descriptor of the workspace; None if its owner, the agent, denied access."""
  try:
    return os.open(workspace, os.O_RDONLY | os.O_DIRECTORY)
  except PermissionError:
    return None


def _file_matches(directory_fd: int, name: str, content: bytes) -> bool:
  # O_NONBLOCK: opening a pipe must not wait for a writer.
  flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
  fd = os.open(name, flags, dir_fd=directory_fd)
  try:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size > len(content):
      return False
    found = b''
    while chunk := os.read(fd, len(content) + 1 - len(found)):
      found += chunk
  finally:
    os.close(fd)
  return found == content


def normalize_answer(answer: str) -> str:
  """Strips what does not change an answer's meaning.

  Surrounding white space, a trailing period, one pair of quotes or backticks, and a
  leading './'. Case and inner characters are significant.
  """
  text = answer.strip()
  for _ in range(2):  # `a`. and 'a.' both lose the pair and the period
    text = text.removesuffix('.')
    if len(text) > 1 and text[0] == text[-1] and text[0] in '\'"`':
      text = text[1:-1]
  return text.removeprefix('./')
