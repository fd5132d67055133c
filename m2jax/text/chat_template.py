"""M2's chat template as Jinja, for programs that render chats themselves.

It renders the same text as `chat.render`, from the same strings: chat_template.jinja,
preceded by the constants of markup.py. Unlike `chat.render` it cannot prevent a user's
text from becoming special tokens, and it requires the arguments of a call to be an
object.
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
  """The template's source.

  Its variables are `messages` and optionally `tools` and `add_generation_prompt`, as
  `transformers.apply_chat_template` passes them.
  """
  body = importlib.resources.files('m2jax.text').joinpath('chat_template.jinja')
  set_ = ''.join(
    f'{{%- set {name} = {json.dumps(value)} -%}}\n'
    for name, value in _CONSTANTS.items()
  )
  return set_ + body.read_text(encoding='utf-8')
