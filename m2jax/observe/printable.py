"""Makes untrusted model output safe to display.

A terminal obeys control characters and a browser obeys bidirectional marks; the output
of a model or of its tools may contain either. Here they become visible code points.
HTML escaping is separate: the template does it.
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
  """Any object as text without control characters, except newlines and tabs."""
  text = text if isinstance(text, str) else '' if text is None else str(text)
  return _UNSAFE.sub(_show, text.replace('\r\n', '\n'))


def one_line(text: object, limit_chars: int) -> str:
  """`printable` with white space collapsed; longer texts end in an ellipsis."""
  text = text if isinstance(text, str) else '' if text is None else str(text)
  # Truncate before the regex: an observation may be a megabyte.
  text = ' '.join(printable(text[: 8 * limit_chars + 64]).split())
  return text if len(text) <= limit_chars else text[: limit_chars - 1] + '…'


def clip(text: object, limit_chars: int) -> str:
  """`printable`; of a long text the head, the tail and a count of what was omitted."""
  text = text if isinstance(text, str) else '' if text is None else str(text)
  if len(text) <= limit_chars:
    return printable(text)
  head, tail = limit_chars * 2 // 3, limit_chars // 3
  omitted = len(text) - head - tail
  return (
    f'{printable(text[:head])}\n… {omitted:,} characters omitted …\n'
    f'{printable(text[-tail:])}'
  )
