"""Sub-agents: the tool by which the model delegates, and their bounds."""

from __future__ import annotations

import dataclasses

from m2jax.checks import require

DELEGATE = 'delegate'
TOOL = {
  'type': 'function',
  'function': {
    'name': DELEGATE,
    'description': 'Let a sub-agent do a task in these files; returns its answer.',
    'parameters': {
      'type': 'object',
      'properties': {'task': {'type': 'string'}},
      'required': ['task'],
    },
  },
}


@dataclasses.dataclass(frozen=True)
class SubAgentsConfig:
  """Bounds of sub-agents.

  Attributes:
    depth: how deep they may nest; 0 offers no `delegate`.
    count: maximum number in an episode.
    max_turns: maximum completions of each.
  """

  depth: int = 0
  count: int = 4
  max_turns: int = 6

  def __post_init__(self):
    for name in ('depth', 'count', 'max_turns'):
      require(self, getattr(self, name) >= 0, name, 'at least 0')
