"""The introduction of a statement: who asks, and what for, in a model's words.

Where every requirement has an exact test, a rewritten requirement could differ from
what is tested. So the author writes a paragraph before the requirements, and these stay
word for word. Without a model there is no such paragraph.
"""

from __future__ import annotations

import re

from m2jax_pipelines.llm import LLMClient, Text

_CHARS = 40, 800
_REQUEST = (
  'Someone needs the work that is described below. Write the two or three sentences '
  'with which that person asks for it: who they are, and what they need it for. The '
  'description follows your text as it is, so add nothing to it: no requirement, no '
  'number, nothing in quotation marks, no list.\n\n'
)


async def write(author: LLMClient, requirements: str) -> Text:
  """The requirements with an introduction, and who wrote it."""
  messages = [{'role': 'user', 'content': _REQUEST + requirements}]
  written = await author.write(messages, lambda: '', acceptable)
  text = f'{written.text.strip()}\n\n{requirements}' if written.text else requirements
  return Text(text, written.by)


def acceptable(text: str) -> bool:
  """Whether a text asks for the work without adding anything that could be checked."""
  least, most = _CHARS
  text = text.strip()
  one_paragraph = '\n' not in text and not text.startswith(('#', '-', '*'))
  return (
    least <= len(text) <= most
    and one_paragraph
    and not re.search(r'[\d"“”„«»`<>{}]', text)
  )
