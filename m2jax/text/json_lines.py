"""Reads JSON lines from elsewhere: the memory of a line and its depth are bounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_LINE_BYTES = 256 << 20


def lines(file: BinaryIO, most: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
  """Yields (number from 1, line with its end), blank ones too.

  Raises:
    ValueError: a line has more than `most` bytes.
  """
  number = 0
  while line := file.readline(most + 1):
    number += 1
    if len(line) > most:
      raise ValueError(f'line {number}: more than {most} bytes')
    yield number, line


def loads(line: bytes | str) -> Any:
  """The value of a line, as `json.loads`, which accepts NaN.

  Raises:
    ValueError: not UTF-8, not JSON, or nested too deep.
  """
  try:
    return json.loads(line)
  except RecursionError:
    raise ValueError('nested too deep') from None
