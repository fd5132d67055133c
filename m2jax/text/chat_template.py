"""M2's chat template as Jinja, for programs that render chats themselves.

The same text as `chat.render`, from the same fixed strings: chat_template.jinja with
the constants of markup.py set before it. Unlike `chat.render` it cannot keep a user's
text from reading as special tokens, and it takes the arguments of a call as an object
only.
"""

from __future__ import annotations

import importlib.resources
import json

from m2jax.text import chat, markup

_CONSTANTS = {
  'bos': markup.BOS,
  'role': markup.ROLE,
  'eos': markup.EOS,
  'think': markup.THINK,
  'think_end': markup.THINK_END,
  'tool_call': markup.TOOL_CALL,
  'tool_call_end': markup.TOOL_CALL_END,
  'tools_header': markup.TOOLS_HEADER,
  'tools_footer': markup.TOOLS_FOOTER,
  'tools_example': markup.TOOLS_EXAMPLE,
  'default_system': chat.DEFAULT.default_system,
}


def source() -> str:
  """The template. It wants `messages`, and may have `tools` and
  `add_generation_prompt`, as `transformers.apply_chat_template` gives them."""
  body = importlib.resources.files('m2jax.text').joinpath('chat_template.jinja')
  set_ = ''.join(
    f'{{%- set {name} = {json.dumps(value)} -%}}\n'
    for name, value in _CONSTANTS.items()
  )
  return set_ + body.read_text(encoding='utf-8')
