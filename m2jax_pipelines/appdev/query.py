"""Judges a task's text before it is tried: clarity, feasibility, and its techniques.

facts/m2-and-forge.md §5 names three questions for a model. Two have exact answers here:
a text is clear if it names everything that the verifier looks for (`unnamed`), and the
admission decides feasibility. A judge model answers all three by
`RUBRIC`; without one, `RUBRIC`'s patterns do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from m2jax_pipelines import rubric
from m2jax_pipelines.appdev import app as app_lib

RUBRIC = (
  rubric.Item(
    'tech_stack',
    rubric.POSITIVE,
    'The techniques that the task asks for suit the app, and are named.',
    r'plain HTML, CSS and JavaScript',
  ),
  rubric.Item(
    'feasibility',
    rubric.POSITIVE,
    'Every feature can be built as a page without a server of its own or a network.',
    r'no build, no network',
  ),
  rubric.Item(
    'clarity',
    rubric.POSITIVE,
    'Every requirement can be decided by a person who uses the page.',
    r'data-testid="[\w-]+"',
  ),
)
_PLACEHOLDERS = ('TEXT', 'NAME')


def unnamed(app: app_lib.App) -> list[str]:
  """Names of controls and test ids in the steps that the instruction does not mention.

  Values that the verifier types or that are in its data need no mention: the agent must
  not know them.
  """
  said = app.instruction()
  own = _inputs(app)
  missing = []
  for target in _targets([s for c in app.criteria for s in c.steps] + list(app.view)):
    if 'testid' in target and f'data-testid="{target["testid"]}"' not in said:
      missing.append(target['testid'])
    name = target.get('label') or target.get('name')
    if name and name not in own and not _is_named(name, said, own):
      missing.append(name)
  return sorted(set(missing))


def _is_named(name: str, said: str, own: set[str]) -> bool:
  first, _, rest = name.partition(' ')
  if f'"{name}"' in said or re.search(rf'\b{re.escape(name)}\b', said):
    return True
  pattern = any(f'"{first} {word}"' in said for word in _PLACEHOLDERS)
  # '0' to '9' of a calculator are named as a range.
  return pattern and rest in own or name.isdigit() and '"0" to "9"' in said


def _inputs(app: app_lib.App) -> set[str]:
  found = set()
  for criterion in app.criteria:
    for operation, _, *values in criterion.steps:
      if operation == 'fill':
        found.add(values[0].strip())
    for text in criterion.files.values():
      found |= set(_strings(json.loads(text)))
  for operation, _, *values in app.view:
    found |= {values[0].strip()} if operation == 'fill' else set()
  return found


def _strings(value: Any) -> Iterator[str]:
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict | list):
    for item in value.values() if isinstance(value, dict) else value:
      yield from _strings(item)


def _targets(steps) -> Iterator[app_lib.Target]:
  for _, target, *_ in steps:
    while target:
      yield target
      target = target.get('within')
