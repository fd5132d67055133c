"""Weaknesses that show in failing trajectories, and fields that may answer them.

Data for the proposer `analyst`: a weakness is a test of a trajectory with remedies. All
are general: none names a task, a tool or an environment. Loops are those that
`agents.loops` detects. A trajectory is read from its text (`evaluator.transcript`),
which is data of tasks and models: what imitates a role in it changes counts only.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from m2jax.agents import context, loops
from m2jax.evolve import operators

_LONG_BYTES = 800
_ROLE = re.compile(r'^(system|user|assistant|tool): ', re.MULTILINE)
_CALL = re.compile(r'^  call (\S+) ?(.*)$', re.MULTILINE)


class Step(enum.Enum):
  """A remedy that is the next number in a direction."""

  UP = 1
  DOWN = -1


@dataclasses.dataclass(frozen=True)
class Trace:
  """A failing trajectory, read from its text.

  Attributes:
    end: its end reason.
    lost: one minus its score.
    turns: its turns, as loop detection sees them.
    text: all of it.
    thought: characters of thinking.
  """

  end: str
  lost: float
  turns: tuple[loops.Turn, ...]
  text: str
  thought: int

  @property
  def results(self) -> list[str]:
    """What the calls returned."""
    return [result for turn in self.turns for result in turn.results]


@dataclasses.dataclass(frozen=True)
class Weakness:
  """What is wrong with a trajectory, and fields that may change it, best first."""

  name: str
  seen: Callable[[Trace], bool]
  remedies: tuple[tuple[str, Any], ...]
  weight: float = 1.0


def _ends(*reasons: str) -> Callable[[Trace], bool]:
  return lambda trace: trace.end in reasons


def _loop(**rule: int) -> Callable[[Trace], bool]:
  config = loops.LoopsConfig(**rule)
  return lambda trace: any(
    loops.detect(trace.turns[: i + 1], config) for i in range(len(trace.turns))
  )


def _again(trace: Trace) -> bool:
  calls = [turn.calls for turn in trace.turns if turn.calls]
  apart = [a for a, b in zip(calls, calls[1:], strict=False) if a != b] + calls[-1:]
  return len(set(apart)) < len(apart)


def _says(pattern: str) -> Callable[[Trace], bool]:
  return lambda trace: any(re.search(pattern, result) for result in trace.results)


def _called(trace: Trace) -> bool:
  return any(turn.calls for turn in trace.turns)


_STEPWISE = 'Work step by step, and check each result before the next step.'
_READ_ERROR = 'If a call fails, read the error and change the call.'
_NEVER_TWICE = (
  'Never make the same call twice. If something does not work, try another way.'
)
_PLAN = 'Plan first. Do what was asked and nothing else, then answer.'
_VERIFY = 'Before you answer, verify the result with a tool.'
_ELSEWHERE = 'When you have found an error, look for the same error elsewhere.'
_BRIEFLY = '{instruction}\nThink briefly.'
_CHECK = '{instruction}\nCheck your result before you answer.'
_ONE_CALL = {'*': '{description} One call at a time.'}
_CHECK_CALL = {'*': '{description} Check the result before the next call.'}
UP, DOWN = Step.UP, Step.DOWN

WEAKNESSES: tuple[Weakness, ...] = (
  Weakness(
    'the context is exceeded',
    _ends('context'),
    (('context.policy', 'drop_results'), ('observation_bytes', DOWN))
    + (('context.policy', 'window'), ('context.policy', 'summarise'))
    + (('context.threshold', DOWN), ('context.keep_turns', DOWN)),
  ),
  Weakness(
    'a response reaches max_tokens',
    _ends('length'),
    (('retry.length', UP), ('max_tokens', UP), ('instruction', _BRIEFLY))
    + (('sampling.frequency_penalty', UP), ('retry.temperature', 0.5)),
  ),
  Weakness(
    'a loop ends the episode',
    _ends('loop'),
    (('loops.reaction', 'message'), ('loops.reaction', 'resample')),
  ),
  Weakness(
    'the time is over',
    _ends('timeout'),
    (('instruction', _BRIEFLY), ('max_tokens', DOWN), ('loops.identical', UP)),
  ),
  Weakness(
    'a call is malformed',
    _says(r'^error: (malformed|the arguments)'),
    (('retry.malformed', UP), ('retry.temperature', 0.0))
    + (('sampling.temperature', DOWN), ('sampling.min_p', UP)),
  ),
  Weakness(
    'the same call repeats',
    _loop(identical=2),
    (('loops.identical', UP), ('system', _NEVER_TWICE))
    + (('loops.reaction', 'resample'), ('rules', operators.REPEATED_CALL))
    + (('sampling.frequency_penalty', UP), ('loops.reaction', 'end')),
  ),
  Weakness(
    'two calls alternate',
    _loop(alternating=4),
    (('loops.alternating', UP), ('system', _NEVER_TWICE))
    + (('rules', operators.REPEATED_CALL), ('sampling.presence_penalty', UP)),
  ),
  Weakness(
    'errors in a row',
    lambda trace: any(
      a.failed and b.failed for a, b in zip(trace.turns, trace.turns[1:], strict=False)
    ),
    (('loops.errors', UP), ('system', _READ_ERROR), ('rules', operators.AFTER_ERROR))
    + (('rules', operators.COOLER_AFTER_ERROR), ('loops.reaction', 'resample')),
  ),
  Weakness(
    'the turns run out',
    _ends('max_turns'),
    (('rules', operators.LAST_TURN), ('system', _PLAN), ('loops.identical', UP)),
  ),
  Weakness(
    'an answer without a call',
    lambda trace: trace.end == 'answer' and bool(trace.turns) and not _called(trace),
    (('system', 'Use the tools.'), ('system', _STEPWISE), ('system', _PLAN)),
  ),
  Weakness(
    'an observation is cut',
    _says(r'\[\d+ bytes cut\]'),
    (('observation_bytes', UP), ('context.policy', 'drop_results')),
  ),
  Weakness(
    'results were removed from the context',
    lambda t: context.DROPPED in t.results or context.NOTES in t.text,
    (('context.keep_turns', UP), ('context.notes_tokens', UP))
    + (('context.keep_first', UP), ('context.threshold', UP)),
  ),
  Weakness(
    'a very long observation',
    lambda trace: max(map(len, trace.results), default=0) >= _LONG_BYTES,
    (('observation_bytes', DOWN), ('context.policy', 'drop_results')),
  ),
  Weakness(
    'a call is made again later',
    _again,
    (('rules', operators.REPEATED_CALL), ('system', _NEVER_TWICE)),
  ),
  Weakness(
    'a call fails',
    _says('^error:'),
    (('system', _READ_ERROR), ('rules', operators.AFTER_ERROR))
    + (('descriptions', _CHECK_CALL),),
  ),
  Weakness(
    'several calls in one turn',
    lambda trace: any(len(turn.calls) > 1 for turn in trace.turns),
    (('descriptions', _ONE_CALL), ('system', _STEPWISE)),
  ),
  Weakness(
    'mostly thinking',
    lambda trace: trace.thought * 2 > len(trace.text),
    (('instruction', _BRIEFLY), ('context.thinking', 'drop')),
  ),
  Weakness(
    'the answer is wrong',
    lambda trace: trace.end == 'answer' and _called(trace),
    (('system', _VERIFY), ('instruction', _CHECK), ('system', _STEPWISE))
    + (('system', _ELSEWHERE), ('descriptions', _CHECK_CALL), ('system', _PLAN)),
  ),
  Weakness(
    'it fails',
    lambda trace: True,
    (('sampling.temperature', DOWN), ('sampling.top_p', DOWN))
    + (('sampling.min_p', UP), ('sampling.top_k', UP), ('max_tokens', UP)),
    weight=0.5,
  ),
)


def read(failure: Mapping[str, Any]) -> Trace:
  """Reads a failing trajectory, whose text is `evaluator.transcript`'s."""
  parts = _ROLE.split(failure['text'])[1:]
  turns: list[loops.Turn] = []
  thought = 0
  for role, body in zip(parts[::2], parts[1::2], strict=True):
    body = body.removesuffix('\n')
    if role == 'assistant':
      content, _, thinking = body.partition('\n  thought: ')
      thought += len(_CALL.split(thinking)[0])
      turns.append(loops.Turn(content, tuple(_CALL.findall(body))))
    elif turns and (role == 'tool' or body.startswith('error:')):
      turns[-1] = dataclasses.replace(turns[-1], results=(*turns[-1].results, body))
  lost = 1 - failure['score']
  return Trace(failure['end_reason'], lost, tuple(turns), failure['text'], thought)


def weighed(failures: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """The weaknesses that occur, by their share of the lost score, largest first."""
  traces = [read(failure) for failure in failures]
  total = sum(trace.lost for trace in traces) or 1.0
  found = {
    w.name: w.weight * sum(t.lost for t in traces if w.seen(t)) / total
    for w in WEAKNESSES
  }
  return {name: s for name, s in sorted(found.items(), key=lambda i: -i[1]) if s}
