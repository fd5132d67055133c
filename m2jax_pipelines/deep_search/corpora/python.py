"""Python's documentation: sections of Debian's `python3.11-doc`, linked by roles."""

from __future__ import annotations

import re
from pathlib import Path

from m2jax_pipelines import installed

DESCRIPTION = 'the documentation of Python, in sections that refer to each other'
FOLD = False
_ROOT = 'usr/share/doc/python3.11/html/_sources'
_FOLDERS = ('library', 'reference', 'howto', 'tutorial')
_RULE = re.compile(r'^([=\-~^*"#+])\1{3,}\s*$')
_LABEL = re.compile(r'^\.\. _`?([^:`]+)`?:\s*$')
_DEFINED = re.compile(
  r'^\s*\.\. (?:module|class|function|exception|data|decorator):: ([\w.]+)', re.M
)
_ROLE = re.compile(
  r':(?:mod|class|func|exc|ref|data|term):`(?:[^`<]*<)?[!~]?([^`>]+)>?`'
)
_MAX_CHARS = 9000


def read(directory: Path):
  """Returns the sections and their source."""
  path, source = installed.debian('python3.11-doc', _ROOT, directory)
  passages, taken = [], set()
  for folder in _FOLDERS:
    for file in sorted((path / folder).glob('*.rst.txt')):
      page = f'{folder}/{file.name.removesuffix(".rst.txt")}'
      for title, labels, text in sections(file.read_text('utf-8', 'replace')):
        name = f'{title} ({page})'
        if len(text) > _MAX_CHARS or name in taken or len(text) < 200:
          continue
        taken.add(name)
        anchors = (*labels, *_DEFINED.findall(text))
        links = [link.removesuffix('()') for link in _ROLE.findall(text)]
        passages.append(((name, title), anchors, text, links))
  return passages, source


def sections(text: str):
  """Yields (title, labels, text) of a page's sections."""
  lines = text.splitlines()
  starts = [
    i - 1
    for i in range(1, len(lines))
    if _RULE.match(lines[i])
    and lines[i - 1].strip()
    and not _RULE.match(lines[i - 1])
    and len(lines[i].strip()) >= len(lines[i - 1].strip())
  ]
  for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
    labels, above = [], start - 1
    while above >= 0 and (not lines[above].strip() or _LABEL.match(lines[above])):
      labels += _LABEL.findall(lines[above])
      above -= 1
    title = re.sub(r':\w+:|`|\*', '', lines[start]).strip()
    body = [line for line in lines[start:end] if not _LABEL.match(line)]
    yield title, labels, '\n'.join(body).strip()
