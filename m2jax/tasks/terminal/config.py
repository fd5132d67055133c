"""Settings of the terminal tasks: number of files, their lengths, made-up names."""

from __future__ import annotations

import dataclasses
import functools
import json

from m2jax.checks import require
from m2jax.tasks.task import TasksConfig


@dataclasses.dataclass(frozen=True)
class TerminalConfig(TasksConfig):
  """Distribution of the terminal tasks.

  Attributes:
    weights: as in `TasksConfig`; empty: all families are equally frequent.
    files: minimum and maximum number of real files in a workspace.
    lines: minimum and maximum number of lines that a real file is cut to.
    pseudo_names: fraction of files renamed to a made-up word.
    pseudo_words: fraction of words in instructions that are made up.
    spare_calls: tool calls allowed beyond `Task.baseline_calls`.
  """

  kind: str = 'terminal'
  files: tuple[int, int] = (3, 5)
  lines: tuple[int, int] = (20, 80)
  pseudo_names: float = 0.5
  pseudo_words: float = 0.5
  spare_calls: int = 1

  def __post_init__(self):
    super().__post_init__()
    for field, (low, high) in (('files', self.files), ('lines', self.lines)):
      object.__setattr__(self, field, (low, high))  # lists come from JSON and configs
    check = functools.partial(require, self)
    check(3 <= self.files[0] <= self.files[1] <= 12, 'files', 'within 3-12')
    check(16 <= self.lines[0] <= self.lines[1] <= 400, 'lines', 'within 16-400')
    for field in ('pseudo_names', 'pseudo_words'):
      check(0.0 <= getattr(self, field) <= 1.0, field, 'a share in [0, 1]')
    check(0 <= self.spare_calls <= 8, 'spare_calls', '0-8')

  @classmethod
  def from_changes(cls, changes: str) -> TerminalConfig:
    """Returns the config that `changes()` described.

    Raises:
      ValueError: not JSON, an unknown field, or a value out of range.
    """
    if not changes:
      return cls()
    fields = json.loads(changes)
    known = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(fields, dict) or not known.issuperset(fields):
      raise ValueError(
        f'unknown TerminalConfig fields in {changes!r}: expected {sorted(known)}'
      )
    return cls(**fields)
