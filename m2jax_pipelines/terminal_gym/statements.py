"""Statements of one task at several depths; all are judged by the same tests.

The report's stage 2, query evolution (docs/facts/m2-and-forge.md): hints and paths are
removed, and one test suite judges every variant.

    depth 0   the goal, the steps with names of commands, the format, the rule
    depth 1   steps composed: the goal alone, without hints
    depth 2   indirect: paths are described instead of named; a constraint is added,
              which the tests check at every depth
    depth 3   context shortened: format and rule are in the workspace's NOTES.md
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from m2jax_pipelines.llm import SCRIPTED, LLMClient
from m2jax_pipelines.terminal_gym.drawn import NOTES, RULE, Drawn

_BEGINNING = re.compile(r'(?:\A|(?<=[a-z]\. ))t(?=he\b)')
DEPTHS = ('direct', 'composed', 'indirect', 'shortened')


@dataclasses.dataclass(frozen=True)
class Statement:
  """Attributes:
  text: the instruction to the agent.
  by: its author.
  repairs: what was wrong with the author's earlier attempts.
  problem: why it cannot be used; '' if it can.
  """

  text: str
  by: str
  repairs: tuple[str, ...] = ()
  problem: str = ''


def scripted(drawn: Drawn, depth: int) -> str:
  """The procedural statement at a depth."""
  values = stated_values(drawn, depth)
  parts = [drawn.filled(drawn.goal, values)]
  if depth == 0:
    steps = [f'{i}. {drawn.filled(s)}' for i, s in enumerate(drawn.steps, 1)]
    parts.append('\n'.join(steps))
  if depth >= 2:
    parts.append(drawn.filled(drawn.constraint, values))
  if depth < 3:
    parts += [drawn.filled(drawn.format, values), RULE]
  else:
    parts.append(f'{NOTES} says what the result must look like and what to leave.')
  text = '\n\n'.join(parts) + '\n'
  # A description may begin a sentence.
  return _BEGINNING.sub(lambda found: found.group().upper(), text)


def stated_values(drawn: Drawn, depth: int) -> Mapping[str, str]:
  """Slot → its value, or the description that replaces it."""
  return {**drawn.values, **drawn.indirect} if depth >= 2 else drawn.values


def problem(drawn: Drawn, depth: int, text: str) -> str:
  """What is wrong with a statement at a depth; '' if nothing is."""
  if not 40 <= len(text) <= 4000:
    return f'it has {len(text)} characters: write 40 to 4000'
  used = drawn.goal + (drawn.constraint if depth >= 2 else '')
  for slot, value in drawn.values.items():
    hidden = depth >= 2 and slot in drawn.indirect
    if hidden and value in text:
      return f'it names {value!r}, which this variant must describe instead'
    if not hidden and f'@{slot}@' in used and value not in text:
      return f'it does not name {value!r}'
  if depth >= 1 and any(drawn.filled(c) in text for c in drawn.commands):
    return 'it names a command of the solution'
  if depth == 3 and NOTES not in text:
    return f'it does not refer to {NOTES}'
  if depth < 3 and RULE not in text:
    return f'it does not have this sentence: {RULE}'
  return ''


async def write(author: LLMClient, drawn: Drawn, depth: int, repairs: int) -> Statement:
  """The author's statement; what is wrong is fed back at most `repairs` times. Then the
  scripted one takes its place, as in every pipeline."""
  base = scripted(drawn, depth)
  request = (
    'Rewrite this task for a person at a terminal, in your own words. Keep all names, '
    f'numbers and quoted texts, and its last paragraph word for word.\n\n{base}'
  )
  messages = [{'role': 'user', 'content': request}]
  wrong: list[str] = []
  while True:
    tried: list[str] = []

    def accept(text: str, tried: list[str] = tried) -> bool:
      tried.append(text)
      return not problem(drawn, depth, text)

    text = await author.write(messages, lambda: base, accept)
    if text.by == SCRIPTED and tried:
      wrong.append(problem(drawn, depth, tried[0]))
    if text.by != SCRIPTED or not tried or len(wrong) > repairs:
      return Statement(
        text.text, text.by, tuple(wrong), problem(drawn, depth, text.text)
      )
    messages += [
      {'role': 'assistant', 'content': tried[0]},
      {'role': 'user', 'content': f'Not usable: {wrong[-1]}. Write it again.'},
    ]
