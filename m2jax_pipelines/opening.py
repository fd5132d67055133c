"""The opening of a statement: who asks, and what for, in a model's words.

Where every requirement has an exact test, a rewritten requirement could ask for
something else than is judged. So the author writes the paragraph before them, and the
requirements stay word for word. Without a model there is no such paragraph.
"""

from __future__ import annotations

import re

from m2jax_pipelines.seat import Seat, Text

_CHARS = 40, 800
_REQUEST = (
  'Someone needs the work that is described below. Write the two or three sentences '
  'with which that person asks for it: who they are, and what they need it for. The '
  'description follows your text as it is, so add nothing to it: no requirement, no '
  'number, nothing in quotation marks, no list.\n\n'
)


async def write(author: Seat, requirements: str) -> Text:
  """The statement with these requirements, and who wrote its opening."""
  messages = [{'role': 'user', 'content': _REQUEST + requirements}]
  told = await author.write(messages, lambda: '', acceptable)
  text = f'{told.text.strip()}\n\n{requirements}' if told.text else requirements
  return Text(text, told.by)


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
