"""A workdir belongs to one run: the settings it was started with lie in it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from m2jax.text import tokenizer

_FILE = 'config.json'


class OtherRun(RuntimeError):
  """The workdir holds a run with other settings."""


def open_workdir(config: Any, workdir: Path, fresh: bool = False) -> None:
  """Makes the workdir the run's own, or checks that it is.

  Args:
    config: a dataclass of JSON-able values.
    workdir: made if missing.
    fresh: delete the run that it holds.

  Raises:
    OtherRun: it holds a run with other settings; names them. A run that left nothing
      but its settings is none.
  """
  path = workdir / _FILE
  now = json.loads(json.dumps(dataclasses.asdict(config)))
  if path.exists() and any(other != path for other in workdir.iterdir()):
    before = json.loads(path.read_text())
    if not before.keys() & now.keys():  # such as a model's
      raise OtherRun(f'{path} was not written by a run: give another --workdir')
    if fresh:
      shutil.rmtree(workdir)
      open_workdir(config, workdir)
      return
    differing = [
      f'{name}: there {old!r}, now {new!r}'
      for name, old, new in differences(before, now)
    ]
    if differing:
      raise OtherRun(
        f'{workdir} holds a run with other settings ({"; ".join(differing)}): '
        'give another --workdir, or --fresh to delete it and start anew'
      )
    return
  workdir.mkdir(parents=True, exist_ok=True)
  new = path.with_suffix('.new')
  new.write_text(json.dumps(now, indent=2))
  new.replace(path)


def keep_tokenizer(
  path: Path, make: Callable[[], tokenizer.Tokenizer], vocab_size: int
) -> tokenizer.Tokenizer:
  """The run's tokenizer, made once and kept at `path`.

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
  """(dotted name, old value, new value) of every leaf in which two mappings differ."""
  if isinstance(old, dict) and isinstance(new, dict):
    for key in sorted(old.keys() | new.keys()):
      name = f'{path}.{key}' if path else key
      yield from differences(old.get(key), new.get(key), name)
  elif old != new:
    yield path, old, new
