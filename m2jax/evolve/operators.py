"""Mutation operators of the proposers that have no model: which values they try.

Data: one entry a field of the scaffold, with the values or the range from which random
search, TPE and the analyst choose. All are general: no operator names a task, a tool or
an environment (`'*'` is every tool). Ranges are cut to the job's bounds.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from m2jax.evolve.scaffold import Bound, Number


@dataclasses.dataclass(frozen=True)
class Options:
  """One of several values."""

  field: str
  values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Range:
  """A number between two; `whole`: a whole one."""

  field: str
  low: float
  high: float
  whole: bool = False


Operator = Options | Range

LAST_TURN = """def act(episode):
  if episode["turns_left"] == 1:
    return {"message": "This is your last turn: answer now."}
  return None
"""
AFTER_ERROR = """def act(episode):
  results = episode["turns"][-1]["results"]
  if results and all(r.startswith("error:") for r in results):
    return {"message": "Read the error, and change the call."}
  return None
"""
REPEATED_CALL = """def act(episode):
  turns = episode["turns"]
  calls = turns[-1]["calls"]
  if calls and any(t["calls"] == calls for t in turns[:-1]):
    return {"message": "You have made this call before."}
  return None
"""
COOLER_AFTER_ERROR = """def act(episode):
  results = episode["turns"][-1]["results"]
  if results and all(r.startswith("error:") for r in results):
    return {"temperature": 0.3}
  return None
"""

OPERATORS: tuple[Operator, ...] = (
  Range('sampling.temperature', 0.0, 1.5),
  Range('sampling.top_p', 0.3, 1.0),
  Options('sampling.top_k', (0, 1, 2, 5, 10, 20, 40)),
  Range('sampling.min_p', 0.0, 0.3),
  Range('sampling.repetition_penalty', 0.9, 1.3),
  Range('sampling.frequency_penalty', -0.2, 1.0),
  Range('sampling.presence_penalty', -0.2, 1.0),
  Range('max_tokens', 16, 1024, whole=True),
  Options('observation_bytes', (256, 512, 1024, 2048, 4096)),
  Options(
    'system',
    (
      None,
      'Use the tools.',
      'Work step by step, and check each result before the next step.',
      'If a call fails, read the error and change the call.',
      'Never make the same call twice. If something does not work, try another way.',
      'Plan first. Do what was asked and nothing else, then answer.',
      'Before you answer, verify the result with a tool.',
      'When you have found an error, look for the same error elsewhere.',
    ),
  ),
  Options(
    'instruction',
    (
      '{instruction}',
      'Your task: {instruction}',
      '{instruction}\nThink briefly.',
      '{instruction}\nCheck your result before you answer.',
    ),
  ),
  Options(
    'descriptions',
    (
      {},
      {'*': '{description} One call at a time.'},
      {'*': '{description} Check the result before the next call.'},
    ),
  ),
  Options('context.policy', ('', 'drop_results', 'window', 'summarise', 'restart')),
  Options('context.actions', ((), ('drop_results',), ('restart',))),
  Options('context.threshold', (0.5, 0.75, 1.0)),
  Options('context.keep_turns', (1, 2, 4, 8)),
  Options('context.keep_first', (0, 1, 2)),
  Options('context.notes_tokens', (64, 96, 192)),
  Options('context.thinking', ('keep', 'drop')),
  Options('retry.malformed', (0, 1, 2, 3)),
  Options('retry.length', (0, 1, 2, 3)),
  Options('retry.temperature', (None, 0.0, 0.5, 1.0)),
  Options('loops.identical', (0, 2, 3, 4)),
  Options('loops.errors', (0, 2, 3)),
  Options('loops.alternating', (0, 4, 6)),
  Options('loops.reaction', ('message', 'resample', 'end')),
  Options(
    'loops.message',
    (
      'You repeat yourself. Try something else.',
      'This has not worked. State what you know, then do the next step.',
      'Stop repeating this call: answer, or use other arguments.',
    ),
  ),
  Options('loops.temperature', (0.3, 0.7, 1.0, 1.3)),
  Options('rules', ('', LAST_TURN, AFTER_ERROR, REPEATED_CALL, COOLER_AFTER_ERROR)),
)


def limits(operator: Range, bounds: Mapping[str, Bound]) -> tuple[float, float]:
  """The range within the job's bounds."""
  bound = bounds[operator.field]
  assert isinstance(bound, Number)
  low = min(max(operator.low, bound.low), bound.high)
  return low, max(low, min(operator.high, bound.high))


def allowed(operator: Options, bounds: Mapping[str, Bound]) -> tuple[Any, ...]:
  """The values within the job's bounds."""
  bound = bounds[operator.field]
  return tuple(value for value in operator.values if not bound.problem(value))


def draw(
  operator: Operator, current: Any, rng: random.Random, bounds: Mapping[str, Bound]
) -> Any:
  """Another value: half of the draws of a range are near the current one."""
  if isinstance(operator, Options):
    others = [v for v in allowed(operator, bounds) if v != current]
    return rng.choice(others) if others else current
  low, high = limits(operator, bounds)
  near = isinstance(current, (int, float)) and rng.random() < 0.5
  value = rng.gauss(current, 0.15 * (high - low)) if near else rng.uniform(low, high)
  value = min(max(value, low), high)
  return round(value) if operator.whole else round(value, 4)
