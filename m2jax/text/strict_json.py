"""Reads JSON as in RFC 8259, of bounded depth; errors name the path.

Python's reader accepts more: NaN and infinities, integers of thousands of digits and
lone surrogates (which UTF-8 cannot encode), and it silently drops a value of a
duplicate key. The template, the tokenizer or a client's parser would then fail. The
gateway reads requests with this module, and the parser the model's arguments, so that
any completion can be sent back as history.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

# Deeper than schemas and arguments of real tools; well below Python's recursion limit.
MAX_DEPTH = 100
# Parts of a path that an error shows.
_SHOWN_PARTS = 8
_SHOWN_KEY_CHARS = 64

_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\],]', re.DOTALL)


class JsonFault(ValueError):
  """JSON that cannot be accepted.

  Attributes:
    path: the place of the error, such as 'tools[0].function.name'; '' for the whole
      text.
    reason: what is wrong there.
  """

  def __init__(self, path: str, reason: str):
    super().__init__(f'{path}: {reason}' if path else reason)
    self.path = path
    self.reason = reason

  def __reduce__(self):
    return JsonFault, (self.path, self.reason)


class _Duplicate(ValueError):
  pass


def loads(data: bytes | bytearray | str, max_depth: int = MAX_DEPTH) -> Any:
  """Reads a JSON text.

  Args:
    data: a text, or its UTF-8 bytes.
    max_depth: maximum nesting of objects and lists.

  Raises:
    JsonFault: not JSON, nested deeper, a duplicate key in an object, a lone surrogate,
      a non-finite number or an integer beyond 64 bits.
  """
  try:
    text = data if isinstance(data, str) else data.decode()
    value = _decode(text)
  except _Duplicate:
    raise _locate(text, max_depth) from None
  except RecursionError:
    raise _locate(text, max_depth) from None
  except UnicodeDecodeError as error:
    raise JsonFault('', f'not UTF-8 at byte {error.start}') from None
  except ValueError as error:
    raise JsonFault('', f'not JSON: {error}') from None
  check(value, max_depth)
  return value


def check(value: Any, max_depth: int = MAX_DEPTH) -> None:
  """Raises JsonFault for a value of json.loads that `loads` would not accept."""
  # Entries: a container, its location as (location of its parent, key), its depth.
  stack = [([value], None, 0)]
  while stack:
    container, where, depth = stack.pop()
    is_object = isinstance(container, dict)
    for key, item in container.items() if is_object else enumerate(container):
      if is_object and not key.isascii() and not _is_text(key):
        raise JsonFault(
          _path(where), f'the key {_shown(key)} contains a lone surrogate'
        )
      kind = type(item)
      if kind is str:
        if not item.isascii() and not _is_text(item):
          raise JsonFault(
            _path((where, key)), 'contains a lone surrogate, which is not text'
          )
      elif kind is dict or kind is list:
        if depth >= max_depth:
          raise _too_deep(_path((where, key)), max_depth)
        if item:
          stack.append((item, (where, key), depth + 1))
      elif kind is float:
        if not math.isfinite(item):
          raise JsonFault(_path((where, key)), f'{item} is not a finite number')
      elif kind is int and not is_int64(item):
        raise JsonFault(_path((where, key)), 'this integer does not fit into 64 bits')


def is_int64(value: int) -> bool:
  """Whether an integer fits into 64 bits, signed or not."""
  return -(2**63) <= value < 2**64


def _pairs(pairs: list[tuple[str, Any]]) -> dict:
  value = dict(pairs)
  if len(value) != len(pairs):
    raise _Duplicate
  return value


_decode = json.JSONDecoder(object_pairs_hook=_pairs).decode


def _is_text(value: str) -> bool:
  try:
    value.encode()
  except UnicodeEncodeError:
    return False
  return True


def _too_deep(path: str, max_depth: int) -> JsonFault:
  return JsonFault(path, f'is nested more than {max_depth} objects and lists deep')


def _path(where: tuple | None) -> str:
  parts = []
  while where is not None:
    where, part = where
    parts.append(part)
  return _join(parts[-2::-1])  # without the list around the whole value


def _join(parts: Iterable[str | int]) -> str:
  parts = list(parts)
  out = ''
  for part in parts[:_SHOWN_PARTS]:
    if isinstance(part, int):
      out += f'[{part}]'
    else:
      out += f'.{_shown(part)}' if out else _shown(part)
  return out + ('.…' if len(parts) > _SHOWN_PARTS else '')


def _shown(key: str) -> str:
  """A key as ASCII, of bounded length."""
  return key[:_SHOWN_KEY_CHARS].encode('ascii', 'backslashreplace').decode()


def _locate(text: str, max_depth: int) -> JsonFault:
  """The first place where a text is nested too deep or repeats a key."""
  # Entries: key or index of the current item, and the keys of an object so far.
  stack: list[list] = []
  for match in _TOKEN.finditer(text):
    token = match[0]
    if token in ('{', '['):
      if len(stack) >= max_depth:
        return _too_deep(_join(key for key, _ in stack), max_depth)
      stack.append([None, set()] if token == '{' else [0, None])
    elif token in ('}', ']'):
      stack.pop()
    elif token == ',':
      stack[-1][0] = None if stack[-1][1] is not None else stack[-1][0] + 1
    elif stack and stack[-1][0] is None:
      key = json.loads(token)
      stack[-1][0] = key
      if key in stack[-1][1]:
        return JsonFault(_join(key for key, _ in stack), 'is a duplicate key')
      stack[-1][1].add(key)
  return JsonFault('', 'not JSON')
