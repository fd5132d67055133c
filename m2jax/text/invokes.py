"""Reads and writes `<invoke>` and `<parameter>`, the elements of a tool-call block.

A string value is written raw, so that it may contain the tags that would end it, and is
read verbatim, with the white space at its ends: tools that edit files match it exactly.
Which closing tag ends an element depends on the version of the template, and is the
same for `</parameter>` and `</invoke>` (facts/clients-and-peers.md §1):

- `m2`: the first closing tag that is followed, after white space, by the next element
  or by the end of the surrounding text; without one, the first closing tag. A raw
  `</parameter>` inside a value is part of the value, as in M2's official API.
- `m2.1` (M2.1, M2.5, M2.7): the first closing tag. A raw `</parameter>` ends the value.
  So that a call with half of a value is never executed, a call is malformed if text is
  left over in it, if a closing tag is left over behind it, or if a value contains the
  opening tag of another element.

`write` raises an error for a value that `read` would not give back: one with tags of
its own such as `</parameter>\\n<parameter name=`, or, from M2.1 on, any such tag. In
JSON values it escapes `<` instead. Special tokens are never markup here: they are
tokens, and plain text that spells one stays text (`parsing.Piece`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

VERSIONS = ('m2', 'm2.1')

_TAGS = ('<invoke', '</invoke', '<parameter', '</parameter')
_NAMES = {tag: f'<{tag} name=' for tag in ('invoke', 'parameter')}
_CLOSINGS = tuple(f'</{tag}>' for tag in _NAMES)
_OPENINGS = {tag: re.compile(name + '([^<>]*)>') for tag, name in _NAMES.items()}
_ENDS = {
  tag: re.compile(rf'</{tag}>(?=\s*+(?:{name}|\Z))') for tag, name in _NAMES.items()
}
# The end of a call that no later text can change, in either version.
_NEXT = re.compile(r'</invoke>\s*+(?=<invoke name=)')
# Characters of a block in which an incremental reader looks for _NEXT again.
_TAIL_CHARS = 128


class Element(NamedTuple):
  """An element `<tag name="…">body</tag>`; `raw` is its whole text."""

  name: str
  body: str
  raw: str


def elements(text: str, tag: str, version: str) -> list[Element | str]:
  """The elements of a text, and the texts between them that are not blank, in order.

  Takes time linear in the text. A name may be unquoted, as in the official guide.
  """
  opening, end = _OPENINGS[tag], f'</{tag}>'
  ends = _ENDS[tag] if version == 'm2' else None
  found, at = [], 0
  while start := opening.search(text, at):
    match = ends.search(text, start.end()) if ends else None
    if match is None:
      ends = None  # there is none behind later openings, either
    stop = match.start() if match else text.find(end, start.end())
    if stop < 0:
      break
    found.append(text[at : start.start()])
    at = stop + len(end)
    name = start[1].strip().strip('"\'')
    raw = text[start.start() : at]
    found.append(Element(name, text[start.end() : stop], raw))
  found.append(text[at:])
  if version != 'm2':
    # A closing tag behind an element may be the one that was meant to end it.
    for k in range(1, len(found), 2):
      if any(closing in found[k + 1] for closing in _CLOSINGS):
        found[k] = found[k].raw
  return [part for part in found if isinstance(part, Element) or part.strip()]


class Block:
  """Reads the calls of a block incrementally.

  Attributes:
    text: all of the block's text.
  """

  def __init__(self, version: str):
    self._version = version
    self._read: list[str] = []
    self._rest: list[str] = []
    self._tail = ''

  @property
  def text(self) -> str:
    return ''.join(self._read + self._rest)

  def feed(self, text: str) -> list[Element | str]:
    """`elements` that are complete, whatever follows: they precede another call."""
    self._rest.append(text)
    recent = self._tail + text
    self._tail = recent[-_TAIL_CHARS:]
    return self._complete() if _NEXT.search(recent) else []

  def _complete(self) -> list[Element | str]:
    # Cut at each of these places, so that the result does not depend on when.
    rest = ''.join(self._rest)
    cuts = [0, *(match.end() for match in _NEXT.finditer(rest))]
    self._read.append(rest[: cuts[-1]])
    self._rest = [rest[cuts[-1] :]]
    self._tail = self._rest[0][-_TAIL_CHARS:]
    return [
      part
      for start, end in itertools.pairwise(cuts)
      for part in elements(rest[start:end], 'invoke', self._version)
    ]

  def end(self, *, closed: bool) -> tuple[list[Element | str], str]:
    """The other elements, and the text that is left if the block was not closed."""
    found = self._complete()
    (rest,) = self._rest
    if closed:
      return found + elements(rest, 'invoke', self._version), ''
    return found, rest


def write_call(call: Any, where: str, version: str) -> str:
  """The `<invoke>` element of an OpenAI call.

  Args:
    call: a call with or without the `function` envelope; arguments as JSON text, as an
      object or None.
    where: path of the call, for errors.

  Raises:
    ValueError: it is no call, or one that `read` would not give back.
  """
  function = call.get('function', call) if isinstance(call, Mapping) else None
  name = function.get('name') if isinstance(function, Mapping) else None
  if not isinstance(name, str) or not name:
    raise ValueError(f'{where}: needs a function with a name')
  arguments = function.get('arguments')
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
      raise ValueError(f'{where}.function.arguments: not JSON ({error})') from None
  elif arguments is None:
    arguments = {}
  if not isinstance(arguments, Mapping):
    raise ValueError(
      f'{where}.function.arguments: must be a JSON object, not '
      f'{type(arguments).__name__}'
    )
  return _write(name, arguments, where, version)


def _write(name: str, arguments: Mapping[str, Any], where: str, version: str) -> str:
  values = {
    key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    for key, value in arguments.items()
  }
  text = _text(name, values)
  if not _has_markup(name, values) or _is_read_back(name, values, version):
    return text
  for key, value in arguments.items():
    if not isinstance(value, str):  # JSON can be spelled without the tags
      values[key] = values[key].replace('<', '\\u003c')
  if _is_read_back(name, values, version):
    return _text(name, values)
  for key, value in values.items():
    if not _is_read_back('f', {'p': value}, version):
      raise ValueError(
        f'{where}.function.arguments: {key[:64]!r} contains tags of tool calls, such '
        f'as </parameter>, where the template {version!r} would split the value'
      )
  raise ValueError(f'{where}.function: a name in it contains brackets or quotes')


def _text(name: str, values: Mapping[str, str]) -> str:
  lines = (
    f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items()
  )
  return f'<invoke name="{name}">\n{"".join(lines)}</invoke>\n'


def _has_markup(name: str, values: Mapping[str, str]) -> bool:
  """Whether a call may be read as something else; cheap, and rarely true."""
  if any(character in text for text in (name, *values) for character in '<>"\''):
    return True
  return any(tag in value for value in values.values() for tag in _TAGS)


def _is_read_back(name: str, values: Mapping[str, str], version: str) -> bool:
  """Whether a block of two such calls is read as the two."""
  calls = elements(2 * _text(name, values), 'invoke', version)
  expected = name, list(values.items())
  return [read(call, version) for call in calls] == [expected] * 2


def read(call: Element | str, version: str) -> tuple[str, list[tuple[str, str]]] | None:
  """Name and parameters of a call, values verbatim; None if it is malformed."""
  if isinstance(call, str) or not call.name:
    return None
  found = elements(call.body, 'parameter', version)
  if any(isinstance(part, str) for part in found):
    return None
  if version != 'm2':
    if any(opening in part.body for part in found for opening in _NAMES.values()):
      return None
  return call.name, [(part.name, part.body) for part in found]
