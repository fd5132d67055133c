"""What a family draws: a workspace, what is asked, its solution and its end state.

docs/facts/m2-and-forge.md (Terminal-Gym): a structured record of task, environment,
test and solution. Texts and commands have slots, `@name@`, for the values that a
statement must tell. The end state names everything that may differ from the workspace;
whatever it does not name must stay as it was.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

NOTES = 'NOTES.md'
RULE = (
  'Leave everything else as it is: no other file may be changed, removed or added, '
  'and nothing temporary may be left.'
)
_SLOT = re.compile(r'@(\w+)@')
_FILE_MODE = 0o644

Entry = Mapping[str, Any]


class Degenerate(Exception):
  """A draw that makes no task, such as one where no file matches; drawn again."""


@dataclasses.dataclass(frozen=True)
class Drawn:
  """One task, without its statement.

  Attributes:
    files: relative path → content of the workspace.
    values: slot → text; what a statement gives, and solutions need.
    indirect: slot → description that replaces the value in indirect statements. The
      workspace contains the value, and it is unique there.
    goal: what to do, in one or two sentences.
    steps: how, with names of commands.
    format: format of the results, as NOTES.md states it.
    constraint: what a careless solution misses; the tests check it.
    commands: the solution, a shell command per step.
    end: path → what differs from the workspace: `content`, `link`, or None if removed.
    slips: (right, wrong) pieces of the commands, such as flags.
    example: the command of a beginner who follows the seed's example alone.
    setup: shell script for modes, links and times.
    state: path → entries of the workspace that `setup` makes or changes.
    inputs: files of hidden inputs, one mapping per input.
    outputs: what the asked program must print for each of them.
    run: the command for a hidden input.
  """

  files: Mapping[str, bytes]
  values: Mapping[str, str]
  indirect: Mapping[str, str]
  goal: str
  steps: tuple[str, ...]
  format: str
  constraint: str
  commands: tuple[str, ...]
  end: Mapping[str, Entry | None]
  slips: tuple[tuple[str, str], ...]
  example: str
  setup: str = ''
  state: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
  inputs: tuple[Mapping[str, bytes], ...] = ()
  outputs: tuple[str, ...] = ()
  run: str = ''

  def workspace(self) -> dict[str, bytes]:
    """The files, with the notes."""
    about = f'# About this folder\n\n{self.filled(self.format)}\n\n{RULE}\n'
    return {**self.files, NOTES: about.encode()}

  def filled(self, text: str, values: Mapping[str, str] | None = None) -> str:
    """A text with its slots filled, by default with the values."""
    return filled(text, self.values if values is None else values)

  def solution(self) -> str:
    """The solution as a shell script."""
    return script(self.filled(command) for command in self.commands)

  def expected(self) -> dict[str, Any]:
    """The end state: `entries`, a path → entry for all that there may be, and runs."""
    entries: dict[str, dict[str, Any]] = {}
    for path, data in self.workspace().items():
      entries[path] = {**content(data.decode('latin-1')), 'given': True}
      entries[path] |= {'mode': _FILE_MODE, 'encoding': 'latin-1'}
    for path, entry in self.state.items():
      entries[path] = {**entries.get(path, {}), **entry, 'given': True}
    given = list(entries)
    for path, entry in self.end.items():
      if entry is None:
        del entries[path]
      else:
        entries[path] = dict(entry)
    # Folders that are left empty may stay.
    folders = {str(p) for path in given for p in PurePosixPath(path).parents}
    outputs = list(self.outputs)
    return {'entries': entries, 'directories': sorted(folders), 'outputs': outputs}


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of tasks.

  Attributes:
    name: the family's name.
    tool: main command of its solutions.
    seeds: patterns that a seed's text must all match.
    draw: makes a task from a random generator. Raises Degenerate.
    hide: draws the hidden inputs of a task anew, from a generator that depends on the
      dataset's salt; None if there are none.
  """

  name: str
  tool: str
  seeds: tuple[str, ...]
  draw: Callable[..., Drawn]
  hide: Callable[..., Drawn] | None = None


def content(text: str, compare: str = 'exact', mode: int | None = None) -> Entry:
  """The entry of a file.

  Args:
    text: what it contains.
    compare: 'exact'; 'lines', in any order; 'words', where spaces and empty lines do
      not count; 'json', by value; 'any', not empty.
    mode: permission bits, where they are asked for.
  """
  entry: dict[str, Any] = {'kind': 'file', 'text': text, 'compare': compare}
  return entry if mode is None else {**entry, 'mode': mode}


def link(target: str) -> Entry:
  """The entry of a symbolic link."""
  return {'kind': 'link', 'target': target}


def filled(text: str, values: Mapping[str, str]) -> str:
  """A text with its slots filled."""
  return _SLOT.sub(lambda found: values[found.group(1)], text)


def script(commands) -> str:
  """A shell script that stops at the first failure."""
  head = 'set -eo pipefail\nexport LC_ALL=C TZ=UTC\n'
  return head + ''.join(f'{command}\n' for command in commands)
