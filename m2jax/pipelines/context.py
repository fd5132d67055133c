"""What a pipeline is given: its directories, its author, and what is done already."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from m2jax.pipelines.seat import Seat


@dataclasses.dataclass(frozen=True)
class Context:
  """Attributes:
  dataset: the directory that is written; sites/ has environments' packages.
  author: the seat for statements.
  done: ids of candidates with a record; a pipeline skips them before it works.
  say: shows one line of progress, such as the package at hand.
  """

  dataset: Path
  author: Seat
  done: frozenset[str] = frozenset()
  say: Callable[[str], None] = lambda line: None

  def directory(self, name: str) -> Path:
    """A directory of the dataset, created if missing."""
    path = self.dataset / name
    path.mkdir(parents=True, exist_ok=True)
    return path
