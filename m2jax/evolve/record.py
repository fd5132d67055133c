"""The record of a lineage: WORKDIR/record.jsonl, append-only, one JSON object a line.

Every line has `schema` (1), `kind` and `time_s` (seconds since the epoch, for readers
only: no decision uses it). Lines of a round have `round`, from 1; the candidate of a
round is the node of that number, the scaffold of the start is node 0.

  begin      one line: `config` (gate, archive, budget, bounds, smoke_tasks, seed,
             paired_seeds), `proposer` (its settings), `files` (the start's folder:
             name → text), `digest`, `tools`, `splits` {development, second, sealed:
             [spec, …]}
  baseline   round 0: the start's development scores: `scores` [[spec, seed, score], …],
             `failures`, `cost`
  proposal   `parent` (node), `changes` {field: value}, `files`, `digest`, `diff`
             (unified, against the parent), `note` (one line), `memory` and `criticism`
             (markdown, the proposer's), `source` (a model, or 'recorded answers'),
             `error` ('' or why there is no proposal), `cost`
  checked    `problems` [one line each]: bounds, code, duplicates, cycles; `readded`
             (share of added lines that were deleted before)
  smoke      `ends` [end_reason, …], `cost`
  look       `look` (from 0), `pairs` [[spec, seed, incumbent, candidate], …] since the
             look before (a score is in [0, 1], or null after an infrastructure
             failure), `incumbent` (node), `failures` (the candidate's), `cost`,
             `incumbent_cost`
  decision   `decision` ('keep', 'revert' or 'reject'), `phase` ('proposal', 'checked',
             'smoke' or 'gate'), `reason`; of the gate also `pairs`, `effect`, `low`,
             `high`, `evidence`, `needed`
  second     a keep's scores on the second split, and the start's (round 0): `scores`,
             `mean`, `cost`. Nothing reads it but people.
  stop       `reason`: why the rounds ended
  sealed     the third split, opened once, for 'start', 'incumbent' and others by name:
             `results` {name: [[spec, seed, score], …]}, `means` {name: mean}, `effect`,
             `low`, `high` (incumbent − start), `cost`

`cost` is {tokens (prompt and response), seconds, episodes}; `failures` is [{score,
end_reason, text}, …], without specs. A line is one write, synced; SIGKILL can tear only
the last one, which the next opening removes: its phase runs again.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from typing import Any

SCHEMA = 1
FILE_NAME = 'record.jsonl'
KINDS = (
  'begin',
  'baseline',
  'proposal',
  'checked',
  'smoke',
  'look',
  'decision',
  'second',
) + ('stop', 'sealed')

Line = dict[str, Any]


class DamagedRecord(ValueError):
  """A line before the last is no record; the message names it."""


def read(path: pathlib.Path) -> list[Line]:
  """The lines of a record, also while it is written; a torn last line is left out.

  Raises:
    DamagedRecord: another line is damaged, or of a newer version.
  """
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    return []
  return _parsed(data[: data.rfind(b'\n') + 1], path)


def _parsed(data: bytes, path: pathlib.Path) -> list[Line]:
  lines = []
  for number, text in enumerate(data.splitlines(), 1):
    try:
      line = json.loads(text)
      good = line['schema'] == SCHEMA and line['kind'] in KINDS
    except (ValueError, KeyError, TypeError, RecursionError):
      good = False
    if not good:
      raise DamagedRecord(
        f'{path}, line {number}: no record of schema {SCHEMA}: restore the file, or '
        '--fresh starts anew'
      )
    lines.append(line)
  return lines


class Record:
  """A record that one process writes; `m2jax.train.workdir` locks its directory."""

  def __init__(self, path: pathlib.Path):
    """Opens or creates a record; removes a torn last line.

    Raises:
      DamagedRecord: see `read`.
    """
    self.lines = read(path)
    self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.ftruncate(self._file, _whole_bytes(path))
    os.lseek(self._file, 0, os.SEEK_END)

  def append(self, kind: str, **fields: Any) -> Line:
    """Writes a line and returns it as it will be read."""
    line = {'schema': SCHEMA, 'kind': kind, 'time_s': round(time.time(), 3), **fields}
    data = json.dumps(line, allow_nan=False, separators=(',', ':')).encode() + b'\n'
    if os.write(self._file, data) != len(data):
      raise OSError(f'{FILE_NAME}: a line was written in part: is the disk full?')
    os.fsync(self._file)
    self.lines.append(json.loads(data))
    return self.lines[-1]

  def close(self) -> None:
    os.close(self._file)


def _whole_bytes(path: pathlib.Path) -> int:
  return path.read_bytes().rfind(b'\n') + 1
