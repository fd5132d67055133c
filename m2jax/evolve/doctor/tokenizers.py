"""Whether a run's tokenizer is that of its weights."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from m2jax.evolve.doctor import settings
from m2jax.evolve.doctor.finding import Evidence, Finding
from m2jax.text import json_lines

NAME = 'tokenizer.json'
MAX_BYTES = 256 << 20


def vocab_size(workdir: pathlib.Path) -> int | None:
  """Number of ids of WORKDIR/tokenizer.json; None if it cannot be read."""
  found = _read(workdir / NAME)
  if found is None:
    return None
  vocabulary = settings.get(found, 'model.vocab')
  added = settings.get(found, 'added_tokens')
  ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
  for token in added if isinstance(added, list) else ():
    ids.append(settings.get(token, 'id'))
  return max((i for i in ids if type(i) is int), default=-1) + 1 or None


def examine(workdir: pathlib.Path, config: Mapping[str, Any]) -> Iterator[Finding]:
  """Compares it with those of the checkpoints, and of the run that it starts from."""
  mine = _read(workdir / NAME)
  if mine is None:
    return
  others = [*sorted(workdir.glob(f'*/*/host/{NAME}'))[-8:]]
  for field in 'init_from', 'start':
    source = settings.get(config, field)
    if isinstance(source, str) and source and '\0' not in source:
      others.append(pathlib.Path(source) / NAME)
  differing = []
  for path in others:
    other = _read(path)
    if other is not None and other != mine:
      differing.append(str(path))
  if differing:
    yield Finding(
      'tokenizer',
      f'{NAME} differs from {differing[0]}, the tokenizer of the weights',
      evidence=(Evidence('tokenizers that differ', (float(len(differing)),), (), 0.0),),
    )


def _read(path: pathlib.Path) -> Any:
  try:
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
      return None
    return json_lines.loads(path.read_bytes())
  except (OSError, ValueError):
    return None
