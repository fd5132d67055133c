"""Reads JSON lines from elsewhere: the memory of a line and its depth are bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_LINE_BYTES = 256 << 20
MAX_DEPTH = 200  # what the gateway accepts, and what records put around it


def lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
  """Yields (number from 1, line with its end), blank ones too.

  Raises:
    ValueError: a line has more than `MAX_LINE_BYTES`; names file and line.
  """
  number = 0
  while line := file.readline(MAX_LINE_BYTES + 1):
    number += 1
    if len(line) > MAX_LINE_BYTES:
      raise ValueError(f'{file.name}, line {number}: more than {MAX_LINE_BYTES} bytes')
    yield number, line


def loads(data: bytes | str) -> Any:
  """A JSON value of others, such as a line; as `json.loads`, which accepts NaN.

  Raises:
    ValueError: not UTF-8, not JSON, or nested too deep.
  """
  try:
    value = json.loads(data)
  except RecursionError:
    value = None
  else:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH + 1):
      nested = (v.values() if type(v) is dict else v for v in level)
      level = [v for values in nested for v in values if type(v) in (dict, list)]
      if not level:
        return value
  raise ValueError(f'nested more than {MAX_DEPTH} objects and lists deep')
