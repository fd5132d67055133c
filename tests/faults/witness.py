"""What the processes of a run write down, and what of it is in the final weights.

Each process appends lines of JSON to DIRECTORY/witness.jsonl: `resumed` with the step
that it begins with, `update` with step and items, `saved` with a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Writer:
  """Also prints each line, so that a parent can choose the moment to kill."""

  def __init__(self, directory: pathlib.Path):
    self._path = directory / 'witness.jsonl'

  def __call__(self, what: str, **more) -> None:
    line = json.dumps(dict(what=what, pid=os.getpid(), **more))
    with open(self._path, 'a', encoding='utf-8') as file:
      print(line, file=file)
    # A line of its own, whatever the view's thread is writing.
    sys.stdout.write(f'\n{line}\n')
    sys.stdout.flush()


def read(directory: pathlib.Path) -> list[dict]:
  """All records; a line that a killed process has torn is left out."""
  path, found = directory / 'witness.jsonl', []
  for line in path.read_text().splitlines() if path.exists() else []:
    with contextlib.suppress(json.JSONDecodeError):
      found.append(json.loads(line))
  return found


class Surviving(NamedTuple):
  """Of the lineage of the final weights.

  Attributes:
    updates: items by step.
    undone: number of updates that a restart has undone.
    lives: number of processes that came as far as training.
  """

  updates: dict[int, list[int]]
  undone: int
  lives: int

  @property
  def items(self) -> list[int]:
    """In the order in which they were trained."""
    return [item for step in sorted(self.updates) for item in self.updates[step]]


def surviving(records: Sequence[dict]) -> Surviving:
  """Replays the records; an update must be the step after the last one.

  If `saved` is among them, each process must begin with a state that was saved, and its
  engine must serve it.
  """
  check = any(record['what'] == 'saved' for record in records)
  updates: dict[int, list[int]] = {}
  saved: dict[int, str] = {}
  undone = lives = 0
  for record in records:
    step = record.get('step')
    match record['what']:
      case 'resumed':
        lives += 1
        if step and check:
          assert saved[step] == record['digest'], 'other weights than were saved'
          assert record['served'] == step  # the engine serves them too
        lost = [s for s in updates if s > step]
        undone += len(lost)
        for s in lost:
          del updates[s]
      case 'saved':
        saved[step] = record['digest']
      case 'update':
        assert step == max(updates, default=0) + 1
        updates[step] = record['items']
  return Surviving(updates, undone, lives)
