"""Rejection sampling: a model's own verified trajectories, as chats for SFT.

docs/facts/m2-and-forge.md §2.3: SFT learns from trajectories that several scaffolds
produced and a verifier accepted. Every scaffold attempts every task several times
(`suites`, so a stopped run can continue); `select` keeps attempts that succeeded,
within limits that `SampleConfig` states, and counts why others are not kept.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m2jax.agents import scaffold as scaffold_lib
from m2jax.agents.agent import AgentConfig
from m2jax.checks import require
from m2jax_pipelines.suites import SuiteConfig

KEPT = 'kept'


@dataclasses.dataclass(frozen=True)
class SampleConfig:
  """What is attempted, and what is kept.

  Attributes:
    suite: tasks, trials, sampling and limits; its agent is not used.
    scaffolds: name -> an agent that attempts all tasks. Its context is never edited,
      so that an attempt is one chat.
    keep: most chats of a task and scaffold; those with the fewest tool calls.
    max_tool_errors: most calls of a chat that were not valid.
    thinking: whether every message of the assistant must have thinking. SFT on chats
      that end without it teaches a policy that begins with `<think>` nothing to go on.
  """

  suite: SuiteConfig
  scaffolds: Mapping[str, AgentConfig]
  keep: int = 1
  max_tool_errors: int = 0
  thinking: bool = False

  def __post_init__(self):
    require(self, self.keep > 0, 'keep', 'above 0')
    require(self, self.max_tool_errors >= 0, 'max_tool_errors', '0 or more')
    named = self.scaffolds and not any('/' in name for name in self.scaffolds)
    require(self, bool(named), 'scaffolds', "at least one, with names without '/'")
    for name, agent in self.scaffolds.items():
      for part in _parts(agent):
        if not _one_chat(part):
          raise ValueError(
            f'scaffolds[{name!r}]: wants kind=whitebox with context.thinking=keep and '
            'neither context edits nor sub-agents: an attempt must be one chat'
          )

  def of(self, scaffold: str) -> SuiteConfig:
    """The suite of one scaffold."""
    return dataclasses.replace(self.suite, agent=self.scaffolds[scaffold])


class Selection(NamedTuple):
  """What `select` found.

  Attributes:
    chats: lines for SFT: `messages`, `tools`, and where they come from.
    counts: (scaffold, family) -> outcome -> number of attempts; outcomes are 'kept',
      'failed', 'infrastructure', 'tool_errors', 'no_thinking', 'repeated' and 'beyond'
      (more than `keep` succeeded).
  """

  chats: list[dict[str, Any]]
  counts: dict[tuple[str, str], collections.Counter[str]]


def select(
  config: SampleConfig, rows: Mapping[str, Sequence[Mapping[str, Any]]], model: str
) -> Selection:
  """Chooses the chats.

  Args:
    config: limits.
    rows: scaffold -> records of `suites.run`; the last of a task and trial counts.
    model: name of the model, for the chats.
  """
  chats, counts = [], collections.defaultdict(collections.Counter)
  for scaffold, found in rows.items():
    last = {(row['task'], row['trial']): row for row in found}
    by_task = collections.defaultdict(list)
    for row in last.values():
      row = {**row, 'messages': [_fields(message) for message in row['messages']]}
      if reason := _reason(config, row):
        counts[scaffold, row['family']][reason] += 1
      else:
        by_task[row['task']].append(row)
    for task, good in by_task.items():
      good.sort(key=lambda row: (row['tool_calls'], row['trial']))
      seen: set[str] = set()
      for row in good:
        text = json.dumps(_written(row['messages']), sort_keys=True)
        reason = 'repeated' if text in seen else KEPT
        if reason == KEPT and len(seen) == config.keep:
          reason = 'beyond'
        counts[scaffold, row['family']][reason] += 1
        if reason == KEPT:
          seen.add(text)
          about = {'task': task, 'scaffold': scaffold, 'model': model, 'success': 1.0}
          chats.append(about | {name: row[name] for name in ('messages', 'tools')})
  return Selection(chats, dict(counts))


def write(path: Path, chats: Sequence[Mapping[str, Any]]) -> None:
  """Writes chats as JSON lines, atomically; `data.chats` reads them."""
  new = path.with_suffix('.new')
  with open(new, 'w', encoding='utf-8') as file:
    file.writelines(json.dumps(chat) + '\n' for chat in chats)
  new.replace(path)


def _fields(message: Mapping[str, Any]) -> dict[str, Any]:
  """A message as chats have it: its thinking in one place."""
  other = 'reasoning', 'reasoning_details'
  fields = scaffold_lib.with_thinking(message)
  return {name: value for name, value in fields.items() if name not in other}


def _reason(config: SampleConfig, row: Mapping[str, Any]) -> str:
  """Why an attempt cannot be kept; '' if it can."""
  if row['outcome'] != 'judged':
    return 'infrastructure'
  if row['success'] < 1.0 or row['end_reason'] != 'answer':
    return 'failed'
  if row['tool_errors'] > config.max_tool_errors:
    return 'tool_errors'
  said = [m for m in row['messages'] if m['role'] == 'assistant']
  if config.thinking and not all(m.get('reasoning_content') for m in said):
    return 'no_thinking'
  return ''


def _written(messages: Sequence[Mapping[str, Any]]) -> list:
  """What the model wrote, without the ids of calls."""
  return [
    [
      message.get('content') or '',
      message.get('reasoning_content') or '',
      [call['function'] for call in message.get('tool_calls') or ()],
    ]
    for message in messages
    if message['role'] == 'assistant'
  ]


def _parts(agent: AgentConfig) -> list[AgentConfig]:
  """The agents of a mixture, or the agent itself."""
  if hasattr(agent, 'domains'):
    return [part for inner in agent.domains.values() for part in _parts(inner)]
  return _parts(agent.agent) if hasattr(agent, 'agent') else [agent]


def _one_chat(agent: AgentConfig) -> bool:
  if agent.kind != 'whitebox':
    return False
  context = agent.context
  edited = context.policy or context.actions or agent.sub_agents.depth
  return not edited and context.thinking == 'keep'
