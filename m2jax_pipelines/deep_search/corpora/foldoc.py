"""FOLDOC, the Free On-line Dictionary of Computing: Debian's `dict-foldoc`.

A dictd database: `foldoc.index` has lines of headword, offset and length in base 64;
links are in braces.
"""

from __future__ import annotations

import gzip
import re
import string
from pathlib import Path

from m2jax_pipelines import installed

DESCRIPTION = 'a dictionary of computing, with entries that link to each other'
FOLD = True
_DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + '+/'
_LINK = re.compile(r'\{([^{}]+)\}')
_MAX_CHARS = 6000


def read(directory: Path):
  """Returns the entries and their source."""
  path, source = installed.debian('dict-foldoc', 'usr/share/dictd', directory)
  data = gzip.decompress((path / 'foldoc.dict.dz').read_bytes())
  places: dict[tuple[int, int], list[str]] = {}
  for line in (path / 'foldoc.index').read_text('utf-8').splitlines():
    headword, offset, length = line.split('\t')
    if not headword.startswith('00-database'):
      places.setdefault((_number(offset), _number(length)), []).append(headword)
  passages = []
  for (offset, length), headwords in sorted(places.items()):
    text = data[offset : offset + length].decode('utf-8', 'replace').strip()
    lines = text.splitlines()
    # The text begins with its headwords, in their own case.
    body = next((i for i, line in enumerate(lines) if not line.strip()), 0)
    titles = tuple(line.strip() for line in lines[:body] if line.strip())
    if titles and len(text) <= _MAX_CHARS:
      known = dict.fromkeys((*titles, *headwords))
      unique = {title.casefold(): title for title in reversed(known)}
      names = tuple(title for title in known if unique[title.casefold()] == title)
      passages.append((names, (), text, _LINK.findall(text)))
  return passages, source


def _number(digits: str) -> int:
  value = 0
  for digit in digits:
    value = value * 64 + _DIGITS.index(digit)
  return value
