"""A workdir belongs to one run, whose settings it stores."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from absl import logging

from m2jax.text import tokenizer

_FILE = 'config.json'
_LOCK = '.lock'
_FLOCK = 'hhqqi0q'  # struct flock of a 64-bit Linux: type, whence, start, length, pid
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of some shared storage

_locks: dict[Path, IO[str]] = {}  # open until the process ends


class WorkdirError(RuntimeError):
  """The workdir cannot be this run's."""

  repeatable = False


class OtherRun(WorkdirError):
  """The workdir has a run with other settings, or another process uses it."""


class UnusableWorkdir(WorkdirError):
  """Nothing can be written to the workdir."""


def open_workdir(
  config: Any, workdir: Path, fresh: bool = False, leads: bool = True
) -> None:
  """Claims a workdir for a run and locks it for this process.

  Args:
    config: a dataclass of JSON-able values.
    workdir: created if missing; locked until this process ends.
    fresh: delete the run in it.
    leads: False in the processes of a job other than the first, which has the lock and
      deletes.

  Raises:
    OtherRun: it has a run with other settings (names them), or one that is running
      (names its process). Settings alone do not count as a run.
    UnusableWorkdir: it cannot be created or written.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if leads:
      _lock(workdir)
    _claim(config, workdir, fresh and leads)
  except OSError as error:
    raise UnusableWorkdir(
      f'--workdir={workdir}: {error.strerror}: give a directory that can be written'
    ) from error


def _claim(config: Any, workdir: Path, fresh: bool) -> None:
  path = workdir / _FILE
  now = json.loads(json.dumps(dataclasses.asdict(config)))
  if path.exists() and any(p.name not in (_FILE, _LOCK) for p in workdir.iterdir()):
    before = json.loads(path.read_text())
    if not before.keys() & now.keys():  # such as a model's
      raise OtherRun(f'{path} was not written by a run: give another --workdir')
    differing = [
      f'{name}: there {old!r}, now {new!r}'
      for name, old, new in differences(before, now)
    ]
    if fresh:
      _empty(workdir)
    elif differing:
      longer = f', --config.init_from={workdir} to train on from its weights'
      raise OtherRun(
        f'{workdir} has a run with other settings ({"; ".join(differing)}): '
        f'give another --workdir{longer if "init_from" in now else ""}, or --fresh to '
        'delete it and start anew'
      )
    else:
      return
  new = path.with_suffix('.new')
  new.write_text(json.dumps(now, indent=2))
  new.replace(path)


def _lock(workdir: Path) -> None:
  """Locks the workdir until this process ends, in whatever way.

  A record lock, which children do not inherit: none can hold it after the run.
  """
  workdir = workdir.resolve()
  if workdir in _locks:
    return
  file = open(workdir / _LOCK, 'a+')  # stays open: closing it releases the lock
  try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    file.seek(0)
    holder = file.read().strip()
    file.close()
    if error.errno in _NO_LOCKS:
      logging.warning('%s: no locks there: start no second run in it', workdir)
      return
    if error.errno not in (errno.EACCES, errno.EAGAIN):
      raise
    raise OtherRun(
      f'--workdir={workdir} is in use by {holder or "another process"}: wait until it '
      'has ended, or give another --workdir'
    ) from error
  file.truncate(0)
  file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
  file.flush()
  _locks[workdir] = file


def in_use(workdir: Path) -> bool | None:
  """Whether a process runs in a workdir; None if that is unknown: none locked it."""
  workdir = workdir.resolve()
  if workdir in _locks:  # this one, whose lock ends once any file of it is closed
    return True
  try:
    file = open(workdir / _LOCK)
  except OSError:
    return None
  # Only asked: a job that starts now must get the lock.
  asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
  with file:
    try:
      found = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    except OSError:
      return None
  return struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK


def _empty(workdir: Path) -> None:
  for path in workdir.iterdir():
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path)
    elif path.name != _LOCK:
      path.unlink()


def keep_tokenizer(
  path: Path, make: Callable[[], tokenizer.Tokenizer], vocab_size: int
) -> tokenizer.Tokenizer:
  """The run's tokenizer, made once and stored at `path`.

  Raises:
    ValueError: it has more tokens than the model's `vocab_size`.
  """
  if not path.exists():
    new = path.with_suffix('.new')
    make().save(new)
    new.replace(path)
  tok = tokenizer.load(path)
  if tok.vocab_size > vocab_size:
    raise ValueError(
      f'the tokenizer {path} has {tok.vocab_size} tokens, more than the '
      f"model's vocab_size={vocab_size}"
    )
  return tok


def differences(old: Any, new: Any, path: str = '') -> Iterator[tuple[str, Any, Any]]:
  """Yields (dotted name, old value, new value) of each leaf that differs."""
  if isinstance(old, dict) and isinstance(new, dict):
    for key in sorted(old.keys() | new.keys()):
      name = f'{path}.{key}' if path else key
      yield from differences(old.get(key), new.get(key), name)
  elif old != new:
    yield path, old, new
