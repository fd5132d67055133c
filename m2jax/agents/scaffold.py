"""How an agent's scaffold shows a task to the model: its prompt, and names of tools.

Several scaffolds over the same tasks are what M2 is trained on
(docs/facts/m2-and-forge.md §2.3). The functions turn a task's chat and tools, or those
of a demonstration, into what the model is shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax.agents import context
from m2jax.agents.agent import Shown
from m2jax.tasks import BadCall
from m2jax.text import markup


def shown(
  messages: Sequence[Mapping[str, Any]],
  tools: Sequence[Mapping[str, Any]],
  rename: Mapping[str, str],
  instruction: str,
) -> tuple[list[dict], list[dict]]:
  """Messages and tools as the model is shown them.

  Args:
    messages: OpenAI dicts; the first of the user is the task's instruction.
    tools: OpenAI dicts.
    rename: name of a tool or of an argument -> what is shown.
    instruction: text around the task's `{instruction}`.
  """
  found, done = [], False
  for message in messages:
    message = dict(message)
    if message['role'] == 'user' and not done:
      message['content'] = instruction.replace('{instruction}', message['content'])
      done = True
    if rename and message.get('tool_calls'):
      message['tool_calls'] = [_call(call, rename) for call in message['tool_calls']]
    found.append(message)
  return found, [_tool(tool, rename) if rename else dict(tool) for tool in tools]


def described(
  tools: Sequence[Mapping[str, Any]], descriptions: Mapping[str, str]
) -> list[dict]:
  """Tools with other descriptions.

  Args:
    tools: OpenAI dicts.
    descriptions: name of a tool, or '*' for all that are not named -> its description;
      `{description}` is the one that it has.
  """

  def one(tool: Mapping[str, Any]) -> dict:
    function = tool['function']
    text = descriptions.get(function['name'], descriptions.get('*'))
    if text is None:
      return dict(tool)
    text = text.replace('{description}', function.get('description') or '')
    return {**tool, 'function': {**function, 'description': text}}

  return [one(tool) for tool in tools]


def names(
  tools: Sequence[Mapping[str, Any]], rename: Mapping[str, str]
) -> dict[str, str]:
  """What is shown -> the task's name, of all tools and of renamed arguments.

  Raises:
    ValueError: two names are shown as one.
  """
  found = {new: old for old, new in rename.items()}
  if len(found) < len(rename):
    raise ValueError(f'rename={dict(rename)}: two names become one')
  shown_names = {}
  for tool in tools:
    name = tool['function']['name']
    shown_names[rename.get(name, name)] = name
  return found | shown_names


def arguments(function: Mapping[str, Any]) -> dict[str, Any]:
  """Arguments of a model's call.

  Raises:
    BadCall: they are no JSON object, which servers other than the gateway pass on.
  """
  try:
    found = json.loads(function['arguments'])
  except (TypeError, ValueError, RecursionError):
    found = None
  if not isinstance(found, dict):
    raise BadCall('the arguments are not a JSON object')
  return found


def sendable(message: Mapping[str, Any]) -> dict[str, Any]:
  """A model's message as a server takes it back: arguments that are no JSON object,
  which servers refuse, are sent as an empty one."""
  calls = []
  for call in message.get('tool_calls') or ():
    try:
      arguments(call['function'])
    except BadCall:
      call = {**call, 'function': {**call['function'], 'arguments': '{}'}}
    calls.append(call)
  return {**message, 'tool_calls': calls} if calls else dict(message)


def with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
  """A message with its thinking in `reasoning_content`, wherever its server put it.

  vLLM and OpenRouter call it `reasoning`; without a parser it is in the content.
  """
  thought, content = message.get('reasoning_content'), message.get('content')
  if thought or message['role'] != 'assistant':
    return dict(message)
  if isinstance(content, str) and markup.THINK_END in content:
    before, _, after = content.partition(markup.THINK_END)
    thought = before.strip().removeprefix(markup.THINK).strip()
    return {**message, 'content': after.strip(), 'reasoning_content': thought}
  thought = message.get('reasoning')
  return {**message, 'reasoning_content': thought} if thought else dict(message)


def check_names(tools: Sequence[Mapping[str, Any]]) -> None:
  """Raises ValueError if two tools have one name."""
  found = [tool['function']['name'] for tool in tools]
  if len(set(found)) < len(found):
    raise ValueError(
      f"tools {found}: a name occurs twice; rename the task's tool (agent.rename)"
    )


def by_turn(chat: Shown) -> list[Shown]:
  """A chat per completion, without the reasoning of earlier turns."""
  messages = list(chat.messages)
  return [
    Shown([*context.without_thinking(messages[:i]), messages[i]], chat.tools, i)
    for i in context.turns(messages)
  ]


def _call(call: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
  function = call['function']
  arguments = json.loads(function['arguments'])
  renamed = {rename.get(name, name): value for name, value in arguments.items()}
  name = rename.get(function['name'], function['name'])
  return {**call, 'function': {'name': name, 'arguments': json.dumps(renamed)}}


def _tool(tool: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
  function = dict(tool['function'])
  function['name'] = rename.get(function['name'], function['name'])
  if parameters := function.get('parameters'):
    properties = {
      rename.get(name, name): value
      for name, value in parameters.get('properties', {}).items()
    }
    parameters = {**parameters, 'properties': properties}
    if 'required' in parameters:
      parameters['required'] = [rename.get(n, n) for n in parameters['required']]
    function['parameters'] = parameters
  return {**tool, 'function': function}
