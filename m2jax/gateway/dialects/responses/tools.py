"""Tools of OpenAI's responses, and back: the model knows functions only.

- A function of a namespace is the function `NAMESPACE__NAME`.
- A custom tool takes free text: it is a function with the string argument `input`, and
  the grammar of its format is part of its description. A model may name the argument
  otherwise: `deltas.CUSTOM` marks the function, so that the text still arrives.
- A tool that the real service executes itself is not shown to the model, and counted.

`Tools.item` gives a call back in the form in which the client declared its tool.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from m2jax.gateway import deltas, fields, formats
from m2jax.gateway.errors import invalid, unsupported

_LONGEST_NAME = 128
_USED = ('type', 'name', 'description', 'parameters', 'format')
_HOSTED = (
  'apply_patch', 'code_interpreter', 'computer', 'computer_use_preview', 'file_search',
  'image_generation', 'local_shell', 'mcp', 'shell', 'tool_search', 'web_search',
  'web_search_preview',
)  # fmt: skip


class Declared(NamedTuple):
  """How the client declared a tool."""

  kind: str
  name: str
  namespace: str | None


class Names(dict[str, Declared]):
  """The declarations by the names that the model knows."""

  def item(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as an output item, without id, call_id and status."""
    kind, wire_name, namespace = self.get(name, ('function', name, None))
    item: dict[str, Any] = {'type': f'{kind}_call', 'name': wire_name}
    if kind == 'custom_tool':
      item['input'] = arguments[deltas.CUSTOM_INPUT]
    else:
      item['arguments'] = json.dumps(arguments, ensure_ascii=False)
    if namespace is not None:
      item['namespace'] = namespace
    return item


def known_name(name: str, namespace: str | None) -> str:
  """The name of a tool that the model knows."""
  return f'{namespace.removesuffix("__")}__{name}' if namespace else name


def parse(value: Any, ignored: list[str]) -> tuple[list[dict] | None, Names]:
  """Functions for the prompt, as OpenAI chat tools, and the declarations."""
  tools: list[dict] = []
  names = Names()
  for i, tool in enumerate(fields.listed(value or [], 'tools')):
    where = f'tools[{i}]'
    kind = fields.mapping(tool, where).get('type')
    if kind in _HOSTED:
      ignored.append(f'tools.{kind}')
    elif kind == 'namespace':
      namespace = fields.tool_name(tool.get('name'), f'{where}.name', set())
      prefix = tool.get('description')
      for k, inner in enumerate(fields.listed(tool.get('tools'), f'{where}.tools')):
        at = f'{where}.tools[{k}]'
        _add(tools, names, inner, at, ignored, namespace, prefix)
        prefix = None  # the namespace is described once, with its first tool
    else:
      _add(tools, names, tool, where, ignored)
  return tools or None, names


def _add(
  tools: list[dict],
  names: Names,
  tool: Any,
  where: str,
  ignored: list[str],
  namespace: str | None = None,
  prefix: str | None = None,
) -> None:
  kind = fields.mapping(tool, where).get('type')
  if kind not in ('function', 'custom'):
    raise invalid(
      f"unknown type {str(kind)[:100]!r}; use 'function', 'custom' or 'namespace'",
      f'{where}.type',
    )
  name = fields.tool_name(tool.get('name'), f'{where}.name', set(), _LONGEST_NAME)
  known = known_name(name, namespace)
  if known in names:
    raise invalid(f'{name!r} is defined twice', f'{where}.name')
  texts = [text for text in (prefix, tool.get('description')) if text]
  function: dict[str, Any] = {'name': known}
  if kind == 'custom':
    texts += _format(tool.get('format'), f'{where}.format')
    declared = Declared('custom_tool', name, namespace)
    parameters = {
      'type': 'object',
      'properties': {deltas.CUSTOM_INPUT: {'type': 'string'}},
      'required': [deltas.CUSTOM_INPUT],
    }
  else:
    declared = Declared('function', name, namespace)
    parameters = tool.get('parameters')
    if parameters is not None:
      fields.schema(parameters, f'{where}.parameters')
  if 'tools' not in ignored:
    ignored += fields.ignored_in(tool, _USED, 'tools')
  if texts:
    function['description'] = '\n'.join(
      fields.text(text, f'{where}.description') for text in texts
    )
  if parameters is not None:
    function['parameters'] = parameters
  names[known] = declared
  wrapper = deltas.CUSTOM if kind == 'custom' else 'function'
  tools.append({'type': wrapper, 'function': function})


def _format(value: Any, where: str) -> list[str]:
  """The description of a custom tool's input."""
  value = fields.mapping(value or {}, where)
  match value.get('type', 'text'):
    case 'text':
      return []
    case 'grammar':
      syntax = fields.text(value.get('syntax'), f'{where}.syntax')
      grammar = fields.text(value.get('definition'), f'{where}.definition')
      return [f'The input must match this {syntax} grammar:\n{grammar}']
    case kind:
      raise invalid(
        f"unknown type {str(kind)[:100]!r}; use 'text' or 'grammar'", f'{where}.type'
      )


def choose(
  choice: Any, tools: list[dict] | None, names: Names
) -> tuple[list[dict] | None, formats.Format | None]:
  """The tools under a tool_choice, and the format of a response that must be a call."""
  if choice is None or choice == 'auto':
    return tools, None
  if choice == 'none':
    return None, None
  named = isinstance(choice, dict)
  kind = choice.get('type') if named else choice
  if kind == 'allowed_tools' or kind in _HOSTED:
    raise unsupported(f'{kind} is not supported', 'tool_choice')
  if kind not in ('required', 'function', 'custom') or named != (kind != 'required'):
    raise invalid(
      "must be 'auto', 'none', 'required' or name one of the tools", 'tool_choice'
    )
  if tools is None:
    raise invalid('needs tools', 'tool_choice')
  if not named:
    return tools, formats.tool_call(tools)
  name = fields.text(choice.get('name'), 'tool_choice.name')
  namespace = fields.text(choice.get('namespace') or '', 'tool_choice.namespace')
  known = known_name(name, namespace)
  if known not in names:
    raise invalid('must be the name of one of the tools', 'tool_choice.name')
  return tools, formats.tool_call(t for t in tools if t['function']['name'] == known)
