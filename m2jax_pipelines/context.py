"""What a pipeline is given: its directories, its author, and what is done already."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from m2jax_pipelines.llm import LLMClient


@dataclasses.dataclass(frozen=True)
class Context:
  """Attributes:
  dataset: the directory that is written; sites/ has environments' packages.
  author: the client that writes statements.
  done: ids of candidates with a record; a pipeline skips them before it works.
  rows: these records, of runs that this one continues.
  say: shows one line of progress, such as the package at hand.
  """

  dataset: Path
  author: LLMClient
  done: frozenset[str] = frozenset()
  rows: Sequence[Mapping[str, Any]] = ()
  say: Callable[[str], None] = lambda line: None

  def directory(self, name: str) -> Path:
    """A directory of the dataset, created if missing."""
    path = self.dataset / name
    path.mkdir(parents=True, exist_ok=True)
    return path

  def salt(self) -> str:
    """A random text of the dataset, drawn once: a continued run has the same.

    Hidden cases that depend on the seed alone could be drawn by anyone who has this
    code. The file is never part of a task.
    """
    path = self.dataset / 'salt'
    if not path.exists():
      self.dataset.mkdir(parents=True, exist_ok=True)
      part = path.with_name('.salt')
      part.touch(mode=0o600)
      part.write_text(secrets.token_hex(16), encoding='utf-8')
      part.replace(path)
    return path.read_text(encoding='utf-8')
