"""What a client says of a request besides its body: class, agent, compaction, tools.

Sources: Claude Code's gateway protocol (facts/clients-and-peers.md §1; from 2.1.273 on,
with CLAUDE_CODE_GATEWAY_HINT_HEADERS=1) and what both sent when they were recorded
(tests/gateway/recorded). No recording has Codex' `review`, `compact`,
`memory_consolidation`, `prewarm` and `background_turn`.

  class      `x-claude-code-request-class`, one of CLASSES; `x-claude-code-compaction`
             (why: auto, manual, reactive); of Codex `x-openai-subagent` (review,
             compact, memory_consolidation, collab_spawn), `request_kind` and
             `thread_source` of its turn metadata
  agent      of a sub-agent `x-claude-code-agent-id`; Codex's `thread_id`
  compacted  `x-claude-code-context-compacted`, once: the first request after one. Codex
             says with each request which context window it is of: `window_id`, and by
             `window_number` whether compaction began it
  tools      `x-claude-code-prev-tool-durations: Bash=742;Read=9`: milliseconds of the
             calls whose results the request brings, without waiting for permissions

Other clients may send `x-m2jax-request-class`, `x-m2jax-agent-id` and
`x-m2jax-tool-durations`. A value that cannot be read counts as none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

CLASSES = ('main', 'subagent', 'workflow', 'compaction', 'auxiliary')

_CLASS = ('x-m2jax-request-class', 'x-claude-code-request-class')
_AGENT = ('x-m2jax-agent-id', 'x-claude-code-agent-id')
_DURATIONS = ('x-m2jax-tool-durations', 'x-claude-code-prev-tool-durations')
_COMPACTION = 'x-claude-code-compaction'
_COMPACTED = 'x-claude-code-context-compacted'
_CODEX = 'x-openai-subagent'
HEADERS = frozenset((*_CLASS, *_AGENT, *_DURATIONS, _COMPACTION, _COMPACTED, _CODEX))

BODY_FIELD = 'client_metadata'  # of Codex

_CODEX_CLASSES = {'compact': 'compaction', 'memory_consolidation': 'auxiliary'}
_CODEX_KINDS = {
  'compaction': 'compaction',
  'prewarm': 'auxiliary',
  'background_turn': 'auxiliary',
}
_METADATA = 'x-codex-turn-metadata'
_LONGEST = 256  # characters of an agent's id
_LONGEST_METADATA = 16 << 10
_LONGEST_MS = 1e9  # of a tool call: 11 days


@dataclasses.dataclass(frozen=True)
class Hints:
  """What a client says of a request.

  Attributes:
    request_class: one of CLASSES, or ''.
    agent: id of the sub-agent that sends it; '' is the main agent, or unknown.
    compacted: whether it is the first after the client compacted its context.
    tool_s: seconds of the tool calls whose results it brings, of parallel ones each.
    window: id of the context window that a compaction began; the first request with it
      is the first after the compaction. '': the first window, or unknown.
  """

  request_class: str = ''
  agent: str = ''
  compacted: bool = False
  tool_s: float = 0.0
  window: str = ''

  def __or__(self, other: Hints) -> Hints:
    """These, and the other's where these have none."""
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
    return Hints(*(mine or theirs for mine, theirs in pairs))


def headers(scope: Mapping[str, Any]) -> dict[str, str]:
  """The headers of a request that are hints."""
  found = {}
  for name, value in scope['headers']:
    if (key := name.decode('latin-1')) in HEADERS:
      found[key] = value.decode('latin-1').strip()
  return found


def of_headers(found: Mapping[str, str]) -> Hints:
  """The hints in `headers`."""
  agent = _first(found, _AGENT)[:_LONGEST]
  request_class = _first(found, _CLASS).lower()
  if found.get(_COMPACTION):
    request_class = 'compaction'
  elif not request_class and (kind := found.get(_CODEX)):
    request_class = _CODEX_CLASSES.get(kind, 'subagent')
  return Hints(
    request_class if request_class in CLASSES else '',
    agent,
    bool(found.get(_COMPACTED)),
    _seconds(_first(found, _DURATIONS)),
  )


def of_codex(client_metadata: Any) -> Hints:
  """The hints in the body of a request of Codex."""
  text = client_metadata.get(_METADATA) if isinstance(client_metadata, dict) else None
  if not isinstance(text, str) or len(text) > _LONGEST_METADATA:
    return Hints()
  try:
    metadata = json.loads(text)
  except (ValueError, RecursionError):
    return Hints()
  if not isinstance(metadata, dict):
    return Hints()
  fields = ('request_kind', 'thread_source', 'thread_id', 'window_id')
  values = (metadata.get(field) for field in fields)
  kind, source, thread, window = (v if isinstance(v, str) else '' for v in values)
  sub = source == 'subagent'
  request_class = _CODEX_KINDS.get(kind, 'subagent' if sub else '')
  number = metadata.get('window_number')
  compacted = isinstance(number, int) and number > 0
  return Hints(
    request_class,
    agent=thread[:_LONGEST] if sub else '',
    window=window[:_LONGEST] if compacted else '',
  )


def _first(found: Mapping[str, str], names: Iterable[str]) -> str:
  return next((found[name] for name in names if found.get(name)), '')


def _seconds(text: str) -> float:
  """The sum of `NAME=MILLISECONDS;…`; of what cannot be read, nothing."""
  total_ms = 0.0
  for part in text.split(';'):
    try:
      ms = float(part.rpartition('=')[2])
    except ValueError:
      continue
    total_ms += ms if 0 <= ms <= _LONGEST_MS else 0.0
  return total_ms / 1e3
