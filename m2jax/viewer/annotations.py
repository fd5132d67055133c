"""Later knowledge about a run's trajectories: an append-only file of JSON lines.

A trajectory is written once; what people or programs find out later goes to
WORKDIR/annotations.jsonl, and never changes it. One object per line:

  {"schema": 1, "time_s": …, "session": S, "kind": "note", "text": …,
   "completion": C or null, "token": index in its response or null}
  {"schema": 1, "time_s": …, "session": S, "kind": "tokens", "name": NAME,
   "completion": C, "version": V, "values": [one number per response token]}
  {"schema": 1, "time_s": …, "session": S, "kind": "flag", "flag": FLAG, "on": true}

FLAG is 'hacked', 'infrastructure' or 'look' (look at this); the last record of a flag
decides whether the trajectory has it. NAME is 'learner_logprob' or 'entropy', of the
weights of version V (`experiments.replay --record` computes them). Several processes
may append: each locks the file for a line. A full disk leaves no partial line; what a
killed process leaves becomes a separate line, which readers skip.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from m2jax.observe import metrics

SCHEMA = 1
FILE = 'annotations.jsonl'
NAMES = 'learner_logprob', 'entropy'
FLAGS = 'hacked', 'infrastructure', 'look'
MAX_TEXT_CHARS = 10_000
MAX_FLAGGED = 10_000  # trajectories: each page has all of their flags
_MAX_PER_SESSION = 1000  # notes that are read


class Annotations:
  """The file of one run; any thread may call it."""

  def __init__(self, path: str | os.PathLike):
    self._path = pathlib.Path(path)
    self._lock = threading.Lock()
    self._read_bytes = 0
    self._places: dict[str, list[tuple[int, int]]] = {}  # (offset, bytes) by session
    self._flagged: dict[str, set[str]] = {}

  def note(
    self,
    session: str,
    text: str,
    completion: str | None = None,
    token: int | None = None,
  ) -> dict[str, Any]:
    """Appends a user's note; returns it.

    Raises:
      ValueError: the text is empty or too long; names the field.
      OSError: the file cannot be written.
    """
    if not isinstance(text, str) or not text.strip():
      raise ValueError('text: must be a string that is not empty')
    if len(text) > MAX_TEXT_CHARS:
      raise ValueError(f'text: longer than {MAX_TEXT_CHARS} characters')
    if completion is not None and not isinstance(completion, str):
      raise ValueError('completion: must be a string or null')
    if token is not None and (not isinstance(token, int) or not 0 <= token < 2**31):
      raise ValueError('token: must be an index or null')
    return self._append(
      session, kind='note', text=text, completion=completion, token=token
    )

  def flag(self, session: str, flag: str, on: bool) -> dict[str, Any]:
    """Appends that a trajectory has a flag, or no longer has it; returns the record.

    Raises:
      ValueError: an unknown flag, or too many trajectories have one; names the field.
      OSError: the file cannot be written.
    """
    if flag not in FLAGS:
      raise ValueError(f'flag: must be one of {FLAGS}')
    if not isinstance(on, bool):
      raise ValueError('on: must be true or false')
    if on and len(self.flagged() | {session: ()}) > MAX_FLAGGED:
      raise ValueError(
        f'flag: {MAX_FLAGGED:,} trajectories have one; remove some first'
      )
    return self._append(session, kind='flag', flag=flag, on=on)

  def flagged(self) -> dict[str, list[str]]:
    """Flags of each trajectory that has any, of the last MAX_FLAGGED at most."""
    with self._lock:
      self._index()
      found = [(s, sorted(flags)) for s, flags in self._flagged.items() if flags]
    return dict(found[-MAX_FLAGGED:])

  def tokens(
    self,
    session: str,
    completion: str,
    name: str,
    version: int,
    values: Sequence[float],
  ) -> dict[str, Any]:
    """Appends one number per response token of a completion; returns the record.

    Raises:
      ValueError: an unknown name, or a value that is not finite.
      OSError: the file cannot be written.
    """
    if name not in NAMES:
      raise ValueError(f'name: must be one of {NAMES}, not {name!r}')
    values = [round(float(v), 6) for v in values]
    if not all(map(math.isfinite, values)):
      raise ValueError(f'values: {name} of {completion} has one that is not finite')
    return self._append(
      session,
      kind='tokens',
      name=name,
      completion=completion,
      version=version,
      values=values,
    )

  def of(self, session: str) -> list[dict[str, Any]]:
    """The annotations of a trajectory, the oldest first, the last 1,000 at most."""
    with self._lock:
      self._index()
      places = self._places.get(session, [])[-_MAX_PER_SESSION:]
      if not places:
        return []
      with open(self._path, 'rb') as file:
        found = []
        for offset, n in places:
          file.seek(offset)
          found.append(json.loads(file.read(n)))
    return found

  def counts(self) -> dict[str, int]:
    """Number of annotations by session."""
    with self._lock:
      self._index()
      return {session: len(places) for session, places in self._places.items()}

  def _append(self, session: str, **fields) -> dict[str, Any]:
    record = {'schema': SCHEMA, 'time_s': round(time.time(), 3), 'session': session}
    record |= fields
    line = json.dumps(record, separators=(',', ':')).encode() + b'\n'
    with self._lock:
      file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
      try:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = os.fstat(file).st_size
        torn = size and os.pread(file, 1, size - 1) != b'\n'
        metrics.write_all(file, b'\n' + line if torn else line)
      finally:
        os.close(file)
    return record

  def _index(self) -> None:
    """Finds the lines that were appended since the last call."""
    try:
      file = open(self._path, 'rb')
    except FileNotFoundError:
      return
    with file:
      file.seek(self._read_bytes)
      for line in file:
        if not line.endswith(b'\n'):
          break  # being written
        try:
          record = json.loads(line)
          session = record['session']
        except (ValueError, KeyError, TypeError):
          session = None
        if isinstance(session, str):
          place = self._read_bytes, len(line)
          self._places.setdefault(session, []).append(place)
          if record.get('kind') == 'flag' and record.get('flag') in FLAGS:
            flags = self._flagged.setdefault(session, set())
            (flags.add if record.get('on') else flags.discard)(record['flag'])
        self._read_bytes += len(line)
