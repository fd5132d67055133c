"""A client's request bodies as a small file that tests replay.

Kept are the structure and what the gateway decides by: types, roles, names, ids, calls,
reasoning and results. Long texts, descriptions and default values are third-party
products' prose: a placeholder with their length takes their place. Ids, keys and paths
are renamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m2jax.gateway import hints

DIRECTORY = Path(__file__).parent.parent / 'recorded'
_LONGEST = 60
# What a text begins with may decide what it is: `<system-reminder>`, a billing header.
_LEAD = re.compile(r'\s*(<[\w-]+>|x-anthropic-billing-header:|[A-Z]\w* ?)')
_IDS = re.compile(
  r'[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32,64}'
)
_PROSE = ('description', 'title', 'default', 'examples', 'definition')


class Scrubber:
  """Replaces prose, ids and paths; the same value always by the same one."""

  def __init__(
    self,
    paths: dict[str, str],
    markers: Sequence[str] = (),
    tools: Sequence[str] = (),
  ):
    """Starts.

    Args:
      paths: text → what takes its place.
      markers: short texts that a placeholder names if they were in its text.
      tools: names of those to keep, if not all.
    """
    self._paths, self._markers, self._tools = paths, markers, tools
    self._ids: dict[str, int] = {}

  def headers(self, headers: dict[str, str]) -> dict[str, str]:
    return self._value(headers)

  def body(self, body: dict) -> dict:
    tools = body.get('tools') or ()
    if self._tools:
      tools = [tool for tool in tools if tool.get('name') in self._tools]
    body = {**body, 'tools': [self._tool(tool) for tool in tools]}
    return self._value(body if body['tools'] else {**body, 'tools': None})

  def _tool(self, tool: Any) -> Any:
    if isinstance(tool, list):
      return [self._tool(item) for item in tool]
    if not isinstance(tool, dict):
      return tool
    return {
      name: '…' if name in _PROSE and isinstance(value, str) else self._tool(value)
      for name, value in tool.items()
      if name not in _PROSE or isinstance(value, str | dict)
    }

  def _value(self, value: Any) -> Any:
    if isinstance(value, dict):
      return {name: self._value(item) for name, item in value.items()}
    if isinstance(value, list):
      return [self._value(item) for item in value]
    return self._text(value) if isinstance(value, str) else value

  def _text(self, text: str) -> str:
    for path, name in self._paths.items():
      text = text.replace(path, name)
    text = _IDS.sub(self._renamed, text)
    if len(text) <= _LONGEST or text.startswith(('{"', 'm2jax:')):
      return text
    lead = _LEAD.match(text)
    named = ''.join(f', {marker}' for marker in self._markers if marker in text)
    return f'{lead[0] if lead else ""}[{len(text)} characters{named}]'

  def _renamed(self, match: re.Match) -> str:
    number = self._ids.setdefault(match[0], len(self._ids) + 1)
    return re.sub('[0-9a-f]', '0', match[0])[: -len(str(number))] + str(number)


def save(
  name: str,
  program: str,
  requests: Sequence[tuple[dict, dict[str, str]]],
  scrubber: Scrubber,
) -> None:
  """Writes bodies and headers: fields that are equal in all of them once.

  Args:
    program: what sent them, with its version.
    requests: each body, and those of its headers that the gateway decides by.
  """
  bodies = [
    scrubber.body(body) | ({'headers': scrubber.headers(headers)} if headers else {})
    for body, headers in requests
  ]
  first = bodies[0]
  same = [k for k in first if all(body.get(k) == first[k] for body in bodies)]
  recorded = {
    'program': program,
    'common': {k: first[k] for k in same},
    'requests': [{k: v for k, v in b.items() if k not in same} for b in bodies],
  }
  text = json.dumps(recorded, indent=1, ensure_ascii=False)
  (DIRECTORY / f'{name}.json').write_text(text + '\n')


def said(request: tuple[dict, dict[str, str]]) -> hints.Hints:
  """What a client says of a request, in its body and its headers."""
  body, headers = request
  return hints.of_headers(headers) | hints.of_codex(body.get('client_metadata'))


def untrained(request: tuple[dict, dict[str, str]]) -> bool:
  """Whether a request is none of the task."""
  return said(request).request_class in ('auxiliary', 'compaction')


def load(name: str) -> list[tuple[dict, dict[str, str]]]:
  """The bodies of a scenario, each with headers."""
  recorded = json.loads((DIRECTORY / f'{name}.json').read_text())
  requests = [{**recorded['common'], **request} for request in recorded['requests']]
  return [(body, body.pop('headers', {})) for body in requests]
