"""Words that stop a reader: docstrings, comments, pages and names do without them."""

from __future__ import annotations

import ast
import functools
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = 'm2jax', 'm2jax_pipelines', 'experiments', 'configs', 'benchmarks', 'launch'
CODE = [path for name in PACKAGES for path in sorted((ROOT / name).rglob('*.py'))]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Pattern → what to write instead.
WORDS = {
  r'seats?': 'model role, LLM client',
  r'twins?': 'canary, mutated copy',
  r'told': 'reported, given',
  r'tells': 'shows, distinguishes, determines',
  r'stands': 'is in, is',
  r'(?:finding|claim|conclusion|rule|lease) holds': 'is true, is reproduced, is valid',
  r'(?:lie|lies)': 'is, are',
  r'(?:knots?|stretch(?:es)?|rooms)': 'branch points, segments, modules',
  r'hangs? off': 'prefix',
  r'so many': 'n, up to n, this number of',
  r'all the same': 'still, nevertheless',
  r'for ever': 'forever, or the bound',
  r'in vain': 'without success',
  r'by turns': 'alternately',
  r'platform lowered for': 'target platform',
  r'(?:has|have|had) room for': 'fits, has space for',
  r'beside (?:work|other|another|two|one)': 'on a loaded machine',
  r'busy (?:machine|CPU)': 'a loaded machine',
  r'mistakes? of (?:its|the|their)': 'user error, error of its own',
  r'goes without saying|needs nothing else': 'say it positively',
  r'goes on': 'continues',
  r'knows? no': 'does not support, does not search for, without',
  r'cannot be had': 'is unavailable',
  r"\w+'s doings?|its own doings?": 'counts against, is to blame',
}
BAD = re.compile('|'.join(rf'\b(?:{pattern})\b' for pattern in WORDS), re.IGNORECASE)
# The subject comes first: 'Prints medians', not 'Printed are medians'.
INVERTED = re.compile(
  r'\b(?:Printed|Measured|Reported|Recorded|Excluded|Generated|Compared|Different) '
  r'(?:is|are)\b|; printed are\b'
)
# An entry of a docstring is a noun phrase with its article, or has a verb.
ENTRY = re.compile(
  r'^\s+\*{0,2}[\w*`]+(?:, [\w*`]+)*: '
  r'(?:of|at once|between|beyond which|by which|up to which)\b',
  re.IGNORECASE,
)
# So is a summary: 'Of one run.' is none.
SUMMARY = re.compile(r'Of\b')
# Names in code that had a private meaning, and what they are called now.
NAMES = {
  **{'seat': 'llm', 'Seat': 'LLMClient', 'SeatConfig': 'LLMConfig'},
  **{'twin': 'canary', 'twins': 'canaries', 'told': 'statement', 'rooms': 'packages'},
}


@functools.cache
def prose(path: pathlib.Path) -> list[tuple[int, str]]:
  """(line, text) of each line of docstrings and comments, or of a page."""
  text = path.read_text()
  if path.suffix == '.md':
    return list(enumerate(re.sub(r'`[^`\n]*`', '', text).splitlines(), 1))
  found = []
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, DOCUMENTED):
      if ast.get_docstring(node, clean=False) is not None:
        first = node.body[0]
        found += enumerate(first.value.value.splitlines(), first.lineno)
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      found.append((token.start[0], token.string))
  return found


def continued(path: pathlib.Path) -> Iterator[tuple[int, str, int]]:
  """(line, text with that of the next line, where this begins) of each line."""
  lines = dict(prose(path))
  for line, text in lines.items():
    text = re.sub(r'`[^`]*`', '', text).rstrip()
    yield line, f'{text} {lines.get(line + 1, "").lstrip(" #")}', len(text)


def test_no_word_stops_a_reader():
  """Each of `WORDS` has a standard term beside it, also across lines."""
  found = []
  for path in CODE + PAGES:
    for line, text, end in continued(path):
      match = BAD.search(text)
      if match and match.start() < end:
        (better,) = {b for p, b in WORDS.items() if re.fullmatch(p, match[0], re.I)}
        found.append(f'{path.relative_to(ROOT)}:{line}: {match[0]!r}: {better}')
  assert not found, '\n'.join(found)


def test_subjects_come_first():
  """`Printed are medians` makes a reader look for its subject."""
  found = [
    f'{path.relative_to(ROOT)}:{line}: {match[0]}'
    for path in CODE + PAGES
    for line, text, end in continued(path)
    if (match := INVERTED.search(text)) and match.start() < end
  ]
  assert not found, '\n'.join(found)


def test_entries_say_what_they_are():
  """`tolerance: of |h|` is a riddle; `tolerance: largest |h| that counts` is none."""
  found = [
    f'{path.relative_to(ROOT)}:{line}: {text.strip()}'
    for path in CODE
    for line, text in prose(path)
    if ENTRY.match(text)
  ]
  assert not found, '\n'.join(found)


def test_summaries_say_what_they_are():
  """The name of what a docstring describes is not its grammatical subject."""
  found = []
  for path in CODE:
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, DOCUMENTED) and SUMMARY.match(ast.get_docstring(node) or ''):
        found.append(f'{path.relative_to(ROOT)}:{node.body[0].lineno}')
  assert not found, '\n'.join(found)


def test_names_are_standard():
  """No name has a private meaning; strings may have the words."""
  found = []
  for path in CODE:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    names = [(t.start[0], t.string) for t in tokens if t.type == tokenize.NAME]
    for line, name in [(0, path.stem), *names]:
      if name in NAMES:
        found.append(f'{path.relative_to(ROOT)}:{line}: {name}: {NAMES[name]}')
  assert not found, '\n'.join(found)


def test_the_check_finds_them():
  """Words and entries of each kind, and nothing else."""
  assert BAD.search('the workbook is told') and not BAD.search('the total')
  assert ENTRY.match('    tolerance: of |h(λ)|.') and ENTRY.match('  k, v: of layers')
  assert not ENTRY.match('    tolerance: largest |h(λ)| that counts as solved')
  assert ENTRY.match('  connections: at once.')
  assert INVERTED.search('Printed are medians') and not INVERTED.search('is printed')
  assert BAD.search("is the app's doing") and not BAD.search('what it is doing')
