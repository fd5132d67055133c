"""BFCL's entries and tool descriptions, from the installed package's files."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INSTALL = 'pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0'
CATEGORY = 'multi_turn_base'
# constants/executable_backend_config.py; the module name is also the document's.
MODULES = {
  'GorillaFileSystem': 'gorilla_file_system',
  'MathAPI': 'math_api',
  'MessageAPI': 'message_api',
  'TwitterAPI': 'posting_api',
  'TicketAPI': 'ticket_api',
  'TradingBot': 'trading_bot',
  'TravelAPI': 'travel_booking',
  'VehicleControlAPI': 'vehicle_control',
}
STATELESS = ('MathAPI',)
_TYPES = {'dict': 'object', 'float': 'number', 'tuple': 'array'}


def root() -> Path:
  """Directory of the package.

  Raises:
    ValueError: it is not installed.
  """
  found = importlib.util.find_spec('bfcl_eval')
  if found is None or not found.submodule_search_locations:
    raise ValueError(f'bfcl-eval is not installed: {INSTALL}')
  return Path(found.submodule_search_locations[0])


@functools.cache
def entries() -> tuple[Mapping[str, Any], ...]:
  """The entries of the category, each with its `ground_truth`."""
  name = f'BFCL_v4_{CATEGORY}.json'
  asked = _lines(root() / 'data' / name)
  answers = {row['id']: row for row in _lines(root() / 'data/possible_answer' / name)}
  return tuple(
    {**row, 'ground_truth': answers[row['id']]['ground_truth']} for row in asked
  )


def tools(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
  """OpenAI dicts of the tools that an entry has."""
  excluded = set(entry.get('excluded_function', ()))
  documents = root() / 'data' / 'multi_turn_func_doc'
  return [
    {
      'type': 'function',
      'function': {
        'name': row['name'],
        'description': row['description'],
        'parameters': _schema(row['parameters']),
      },
    }
    for name in entry['involved_classes']
    for row in _lines(documents / f'{MODULES[name]}.json')
    if row['name'] not in excluded
  ]


def requests(entry: Mapping[str, Any]) -> Sequence[str]:
  """The user's message of each turn."""
  return ['\n'.join(m['content'] for m in turn) for turn in entry['question']]


def _schema(value: Any) -> Any:
  """JSON schema of BFCL's types."""
  if isinstance(value, list):
    return [_schema(item) for item in value]
  if not isinstance(value, dict):
    return value
  out = {key: _schema(item) for key, item in value.items()}
  kind = out.get('type')
  if kind == 'any':
    del out['type']
  elif isinstance(kind, str):
    out['type'] = _TYPES.get(kind, kind)
  return out


def _lines(path: Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text('utf-8').splitlines() if line]
