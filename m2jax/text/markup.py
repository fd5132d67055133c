"""M2's special tokens and the fixed strings of its chat template.

Source: facts/m2-and-forge.md §2.1. Special tokens are single ids; `<invoke>`,
`<parameter>`, `<response>` and `<tools>` are plain text.
"""

from __future__ import annotations

BOS = ']~!b['
ROLE = ']~b]'
EOS = '[e~['
THINK = '<think>'
THINK_END = '</think>'
TOOL_CALL = '<minimax:tool_call>'
TOOL_CALL_END = '</minimax:tool_call>'

SPECIAL_TOKENS = (BOS, ROLE, EOS, THINK, THINK_END, TOOL_CALL, TOOL_CALL_END)

DEFAULT_SYSTEM = 'You are a helpful assistant.'

TOOLS_HEADER = (
  '\n\n# Tools\n'
  'You may call one or more tools to assist with the user query.\n'
  'Here are the tools available in JSONSchema format:\n'
  '\n<tools>\n'
)
TOOLS_FOOTER = (
  '</tools>\n\n'
  'When making tool calls, use XML format to invoke tools and pass parameters:\n\n'
)
# Between the two tool-call tokens of the instructions.
TOOLS_EXAMPLE = (
  '\n<invoke name="tool-name-1">\n'
  '<parameter name="param-key-1">param-value-1</parameter>\n'
  '<parameter name="param-key-2">param-value-2</parameter>\n'
  '...\n'
  '</invoke>\n'
)
