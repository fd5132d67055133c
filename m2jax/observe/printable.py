"""Text for people's eyes: hostile model output made safe to show.

A terminal obeys control characters and a browser obeys bidirectional marks; what a
model or its tools printed may hold either. They are shown, not obeyed. HTML escaping
is the template's own work and comes on top.
"""

from __future__ import annotations

import re

# C0 without tab and newline, DEL, C1, bidirectional marks and isolates, zero-width
# characters, line and paragraph separators, byte order mark, lone surrogates.
_UNSAFE = re.compile(
  '[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff'
  '\ufff9-\ufffb\ud800-\udfff]'
)


def _show(match: re.Match) -> str:
  return f'⟨U+{ord(match.group()):04X}⟩'


def printable(text: object) -> str:
  """Any object as text without control characters; newlines and tabs stay."""
  text = text if isinstance(text, str) else '' if text is None else str(text)
  return _UNSAFE.sub(_show, text.replace('\r\n', '\n'))


def one_line(text: object, limit_chars: int) -> str:
  """`printable`, white space collapsed, cut to at most limit_chars with an ellipsis."""
  text = text if isinstance(text, str) else '' if text is None else str(text)
  # Cut before the regular work: an observation may be a megabyte.
  text = ' '.join(printable(text[: 8 * limit_chars + 64]).split())
  return text if len(text) <= limit_chars else text[: limit_chars - 1] + '…'


def clip(text: object, limit_chars: int) -> str:
  """`printable`; a long text keeps its head and tail and says what was left out."""
  text = text if isinstance(text, str) else '' if text is None else str(text)
  if len(text) <= limit_chars:
    return printable(text)
  head, tail = limit_chars * 2 // 3, limit_chars // 3
  left_out = len(text) - head - tail
  return (
    f'{printable(text[:head])}\n… {left_out:,} characters left out …\n'
    f'{printable(text[-tail:])}'
  )
