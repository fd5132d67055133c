"""Trajectories in ATIF, the Agent Trajectory Interchange Format of Harbor, version 1.8.

https://github.com/harbor-framework/harbor/blob/main/rfcs/0001-trajectory-format.md

A document is one trajectory, as a dict of JSON values. Messages of system and user are
steps; an assistant message is a step with its thinking, its calls, the observations
that answer them, and the ids, log-probabilities and versions of its completion. What
ATIF has no field for is in `extra` under 'm2jax', so that our own documents come back
exactly. Completions that no message shows are there too: the messages of an agent that
streams, begins a conversation anew or has sub-agents are those of one conversation,
often without the last answer.

Documents of other tools are read too, and any tool can write what ours has. A verdict
in a document is therefore a claim: its trajectory is marked as not judged, which masks
it from training, unless the caller trusts the document.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from m2jax import checks, records
from m2jax.observe import transcript
from m2jax.pool import tables

VERSION = 'ATIF-v1.8'
OTHERS = 'other_completions'  # in `extra`: those that no reply shows
_OURS = 'm2jax'
_SOURCES = {'system': 'system', 'user': 'user', 'developer': 'system'}
_MASKED, _NOT_JUDGED = 'infrastructure', 'imported without a verdict'
_WHERE = f'extra.{_OURS}'
_SESSION = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.:@+=~-]{0,255}')
# Field of a completion → that of ATIF's metrics.
_ARRAYS = {
  'prompt_ids': 'prompt_token_ids',
  'response_ids': 'completion_token_ids',
  'logprobs': 'logprobs',
}


def document(
  trajectory: records.Trajectory,
  completions: Sequence[records.Completion] = (),
  reward: records.TrajectoryReward | None = None,
  agent: str = _OURS,
  others: Iterable[records.Completion] = (),
) -> dict[str, Any]:
  """A trajectory as an ATIF document.

  Args:
    trajectory: the trajectory with its messages.
    completions: those that the agent acted on, in order of turn. Which of them the
      assistant messages show is found by `_shown`.
    reward: the learner's reward.
    agent: name of the agent.
    others: completions that the agent did not act on.
  """
  shown = _shown(trajectory.messages, completions)
  replies = itertools.count()
  paired = {c.id for c in shown.values()}
  apart = [*(c for c in completions if c.id not in paired), *others]
  steps: list[dict[str, Any]] = []
  for message in trajectory.messages:
    role = message.get('role')
    if role == 'assistant':
      steps.append(_reply(message, shown.get(next(replies))))
    elif role == 'tool' and steps and steps[-1]['source'] == 'agent':
      _observe(steps[-1], message)
    else:
      step = {'source': _SOURCES.get(role, 'user')}
      text = transcript.plain_text(message.get('content'))
      extra = _rest({'role': step['source'], 'content': text}, message)
      steps.append({**step, 'message': text, **extra})
  for number, step in enumerate(steps, start=1):
    step['step_id'] = number
  fields = {k: v for k, v in vars(trajectory).items() if k != 'messages'}
  if reward is not None:
    fields['reward'] = dataclasses.asdict(reward)
  if apart:
    fields[OTHERS] = [_metrics(c) for c in apart]
  metrics = [step['metrics'] for step in steps if 'metrics' in step]
  found = {
    'schema_version': VERSION,
    'session_id': trajectory.session,
    'trajectory_id': trajectory.session,
    'agent': {'name': agent, 'version': _version()},
    'steps': steps,
    'final_metrics': {
      'total_prompt_tokens': sum(m['prompt_tokens'] for m in metrics),
      'total_completion_tokens': sum(m['completion_tokens'] for m in metrics),
      'total_steps': len(steps),
    },
    'extra': {_OURS: fields},
  }
  if not metrics:
    found['final_metrics'] = {'total_steps': len(steps)}
  return found


def unmatched(document: Mapping[str, Any]) -> tuple[int, int]:
  """Replies without token ids, and completions that no reply shows, of our document."""
  replies = [step for step in document['steps'] if step['source'] == 'agent']
  others = document['extra'][_OURS].get(OTHERS, ())
  return sum('metrics' not in step for step in replies), len(others)


_Shown = dict[int, records.Completion]  # by the position among the replies


def _shown(
  messages: Sequence[Mapping[str, Any]], completions: Sequence[records.Completion]
) -> _Shown:
  """The completions that the assistant messages show, where that is certain.

  A reply with calls names its completion by their ids. For the others the messages are
  read in two ways, of which one must agree with all names: as all completions in order,
  or as a conversation. If both do and differ, only the names count.
  """
  replies = [m for m in messages if m.get('role') == 'assistant']
  answered = bool(messages) and messages[-1].get('role') == 'assistant'
  by_id = {c.id: c for c in completions}
  named: _Shown = {}
  for i, reply in enumerate(replies):
    if c := by_id.pop(records.completion_named(reply), None):
      named[i] = c
  may_be_all = len(completions) == len(replies) and _linked(completions)
  if may_be_all and not named and not answered:
    return {}  # the last reply shows the last completion, or the first is an example
  readings = [_conversation(completions, len(replies), named, answered)]
  if may_be_all:
    readings.insert(0, dict(enumerate(completions)))
  agreeing = [reading for reading in readings if _agree(reading, named)]
  if not agreeing or not _agree(agreeing[0], agreeing[-1]):
    return named
  return named | agreeing[0]


def _linked(completions: Sequence[records.Completion]) -> bool:
  """Whether each continues one of the others, or the agent says why it does not.

  Otherwise some are of a conversation that the messages do not have, such as a title.
  """
  ids = {c.id for c in completions}
  if any(c.parent is not None and c.parent not in ids for c in completions):
    return False  # the beginning of a conversation is not there
  return all(
    c.parent or c.follows in ids or c.fork_reason in ('context_edited', 'sub_agent')
    for c in completions[1:]
  )


def _conversation(
  completions: Sequence[records.Completion],
  replies: int,
  named: _Shown,
  answered: bool,
) -> _Shown:
  """The last completion and those whose ids it extends, as the last of the replies.

  What precedes them are examples in the first prompt, which nobody sampled: certain if
  a name says so, or if the session began with them.

  Args:
    answered: whether the messages end with the last answer; a name says it better.
  """
  by_id = {c.id: c for c in completions}
  chain: list[records.Completion] = []
  last = max(completions, key=lambda c: c.turn, default=None)
  while last is not None and len(chain) < len(completions):
    chain.append(last)
    last = by_id.get(last.parent)
  chain = chain[::-1]
  ids = [c.id for c in chain]
  starts = [i - ids.index(c.id) for i, c in named.items() if c.id in ids]
  start = starts[0] if starts else replies - len(chain) + (not answered)
  if start > 0 and not starts and chain and chain[0].fork_reason is not None:
    return {}
  if start < 0 or replies - start not in (len(chain) - 1, len(chain)):
    return {}
  return dict(enumerate(chain[: replies - start], start=start))


def _agree(a: _Shown, b: _Shown) -> bool:
  """Whether no reply shows two completions, and no completion is shown twice."""
  places = {c.id: i for i, c in a.items()}
  return all(
    places.get(c.id, i) == i and (i not in a or a[i].id == c.id) for i, c in b.items()
  )


def _version() -> str:
  try:
    return metadata.version(_OURS)
  except metadata.PackageNotFoundError:
    return 'unknown'


def _reply(
  message: Mapping[str, Any], completion: records.Completion | None
) -> dict[str, Any]:
  """The step of an assistant message."""
  text = transcript.plain_text(message.get('content'))
  again: dict[str, Any] = {'role': 'assistant', 'content': text}
  step: dict[str, Any] = {'source': 'agent', 'message': text}
  thinking = message.get('reasoning_content')
  if isinstance(thinking, str):
    step['reasoning_content'] = again['reasoning_content'] = thinking
  calls = message.get('tool_calls')
  if isinstance(calls, (list, tuple)) and calls:
    step['tool_calls'] = [_call(call, i) for i, call in enumerate(calls)]
    again['tool_calls'] = [_openai_call(call) for call in step['tool_calls']]
  step |= _rest(again, message)
  if completion is not None:
    step['metrics'] = _metrics(completion)
    if completion.ended_s:
      ended = datetime.datetime.fromtimestamp(completion.ended_s, datetime.UTC)
      step['timestamp'] = ended.isoformat()
  return step


def _call(call: Any, position: int) -> dict[str, Any]:
  function = call.get('function') if isinstance(call, Mapping) else None
  function = function if isinstance(function, Mapping) else {}
  given = function.get('arguments')
  arguments = given
  if isinstance(given, str):
    try:
      arguments = json.loads(given)
    except (ValueError, RecursionError):
      arguments = None
  found = {
    'tool_call_id': str((isinstance(call, Mapping) and call.get('id')) or position),
    'function_name': str(function.get('name', '')),
    'arguments': arguments if isinstance(arguments, dict) else {},
  }
  if _openai_call(found) != call:
    found['extra'] = {_OURS: call}
  return found


def _openai_call(call: Mapping[str, Any]) -> Any:
  """The call of a message; the one that it was made of, if that is stored."""
  ours = (call.get('extra') or {}).get(_OURS)
  if ours is not None:
    return ours
  arguments = json.dumps(call['arguments'])
  return {
    'id': call['tool_call_id'],
    'type': 'function',
    'function': {'name': call['function_name'], 'arguments': arguments},
  }


def _observe(step: dict[str, Any], message: Mapping[str, Any]) -> None:
  """Adds a tool message to the step of its call."""
  text = transcript.plain_text(message.get('content'))
  result: dict[str, Any] = {'content': text}
  again: dict[str, Any] = {'role': 'tool', 'content': text}
  known = {call['tool_call_id'] for call in step.get('tool_calls', ())}
  if message.get('tool_call_id') in known:
    result['source_call_id'] = again['tool_call_id'] = message['tool_call_id']
  result |= _rest(again, message)
  step.setdefault('observation', {'results': []})['results'].append(result)


def _rest(again: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
  """The message itself, if it could not be made from the step again."""
  return {} if dict(message) == again else {'extra': {_OURS: dict(message)}}


def _metrics(c: records.Completion) -> dict[str, Any]:
  arrays = ('prompt_ids', 'response_ids', 'logprobs', 'experts')
  rest = {k: v for k, v in vars(c).items() if k not in arrays}
  return {
    'prompt_tokens': len(c.prompt_ids),
    'completion_tokens': len(c.response_ids),
    'prompt_token_ids': c.prompt_ids.tolist(),
    'completion_token_ids': c.response_ids.tolist(),
    'logprobs': c.logprobs.tolist(),
    'extra': {_OURS: rest | {'versions': c.versions.tolist()}},
  }


# --- Reading ---


def read(
  document: Mapping[str, Any], *, trusted: bool = False
) -> tuple[
  records.Trajectory, list[records.Completion], records.TrajectoryReward | None
]:
  """The trajectory of an ATIF document, its completions, and its reward.

  The trajectory belongs to no work item. Completions are those with token ids and
  log-probabilities.

  Args:
    document: JSON from anywhere.
    trusted: whether its verdict and rewards count; otherwise it is not judged.

  Raises:
    ValueError: the document is not of ATIF, or has a value that cannot be; names the
      field.
  """
  version = document.get('schema_version') if isinstance(document, dict) else None
  if not str(version).startswith('ATIF-v1.'):
    raise ValueError(f'schema_version is {reprlib.repr(version)}: must be ATIF-v1.x')
  try:
    ours = dict((document.get('extra') or {}).get(_OURS) or {})
    steps = document['steps']
    messages = tuple(
      message for i, step in enumerate(steps) for message in _messages(step, i)
    )
    reward, others = ours.pop('reward', None), ours.pop(OTHERS, ())
    session = ours.get('session') or document.get('trajectory_id')
    session = session or document.get('session_id')
    if not session:
      raise ValueError('trajectory_id and session_id are missing')
    if not isinstance(session, str) or not _SESSION.fullmatch(session):
      shown = reprlib.repr(session)
      raise ValueError(f'session is {shown}: must be a name, not a path')
    contents = (m.get('content') for m in messages if m['role'] == 'user')
    fields = dict(
      rank=0,
      task=transcript.plain_text(next(contents, '')),
      family=str(document['agent'].get('name')),
      wall_s=0.0,
      tool_calls=sum(len(step.get('tool_calls') or ()) for step in steps),
    ) | {k: v for k, v in ours.items() if k not in ('item', 'messages')}
    if not trusted:
      claim = ours.get('success')
      reward, fields = None, fields | {'rewards': {}, 'success': 0.0}
      fields |= {'end_reason': _MASKED, 'error': _NOT_JUDGED}
      if claim is not None:
        fields['error'] += f'; the document claims success {reprlib.repr(claim)}'
    fields = dict(end_reason=_MASKED, error=_NOT_JUDGED, success=0.0) | fields
    checks.check_fields(records.Trajectory, fields, _WHERE)
    trajectory = records.Trajectory(
      **fields | {'session': session, 'item': -1, 'messages': messages}
    )
    completions = _completions(session, steps, others)
    reward = reward and records.TrajectoryReward(**reward)
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'not an ATIF document: {error!r}') from error
  return trajectory, completions, reward


def _messages(step: Mapping[str, Any], number: int) -> Iterable[dict[str, Any]]:
  """The OpenAI messages of a step."""
  text = transcript.plain_text(step['message'])
  source = step['source']
  if source not in ('system', 'user', 'agent'):
    shown = reprlib.repr(source)
    raise ValueError(
      f'steps[{number}].source is {shown}: must be system, user or agent'
    )
  message: dict[str, Any] = {'role': source, 'content': text}
  if source == 'agent':
    message['role'] = 'assistant'
    if step.get('reasoning_content') is not None:
      message['reasoning_content'] = step['reasoning_content']
    if step.get('tool_calls'):
      message['tool_calls'] = [_openai_call(call) for call in step['tool_calls']]
  yield _own_message(step, number) or message
  for result in (step.get('observation') or {}).get('results', ()):
    tool = {'role': 'tool', 'content': transcript.plain_text(result.get('content'))}
    if result.get('source_call_id') is not None:
      tool['tool_call_id'] = result['source_call_id']
    yield _own_message(result, number) or tool


def _own_message(part: Mapping[str, Any], number: int) -> dict[str, Any] | None:
  """The message that a step or result was made of, if that is stored."""
  ours = (part.get('extra') or {}).get(_OURS)
  if ours and not (isinstance(ours, dict) and isinstance(ours.get('role'), str)):
    raise ValueError(f'steps[{number}].extra.{_OURS}: must be a message with its role')
  return ours


def _completions(session: str, steps, others) -> list[records.Completion]:
  """Completions by turn: those of the steps, and the others."""
  places = [
    (f'steps[{i}].metrics', step.get('metrics') or {})
    for i, step in enumerate(steps)
    if step['source'] == 'agent'
  ]
  places += [(f'{_WHERE}.{OTHERS}[{i}]', other) for i, other in enumerate(others)]
  found: list[records.Completion] = []
  for turn, (where, metrics) in enumerate(places):
    if any(metrics.get(name) is None for name in _ARRAYS.values()):
      continue
    ours = dict((metrics.get('extra') or {}).get(_OURS) or {})
    given = {field: metrics[name] for field, name in _ARRAYS.items()}
    given['versions'] = ours.pop('versions', [0] * len(given['response_ids']))
    defaults = dict(
      id=f'{session}/{turn}',
      turn=turn,
      parent=None,
      fork_reason=None,
      finish_reason='stop',
      status='ok',
      overrides=[],
    )
    fields = defaults | ours | {'session': session}
    checks.check_fields(records.Completion, fields, f'{where}.extra.{_OURS}')
    arrays = {
      field: tables.array(values, field, f'{where}.{_ARRAYS.get(field, field)}')
      for field, values in given.items()
    }
    for field in ('logprobs', 'versions'):
      if len(arrays[field]) != len(arrays['response_ids']):
        raise ValueError(
          f'{where}: {field} has {len(arrays[field])} entries for '
          f'{len(arrays["response_ids"])} completion_token_ids'
        )
    fields['overrides'] = tuple(fields['overrides'])
    found.append(records.Completion(**fields, **arrays))
  return sorted(found, key=lambda c: c.turn)
