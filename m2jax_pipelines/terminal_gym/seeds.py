"""Seeds: real questions and answers about a terminal, from documentation of Debian.

Stage 0 and 1 of the report (docs/facts/m2-and-forge.md): questions with answers, rules,
attributes, four tiers of which the two upper ones are kept. Instead of Stack Overflow:
Perl's and Debian's FAQs, Python's FAQ, EXAMPLES of manual pages, and nodes of the GNU
manuals. Packages are read where they are installed, or else unpacked into the dataset;
nothing of their texts is stored in a task.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from m2jax_pipelines import installed
from m2jax_pipelines.terminal_gym.drawn import Family

TOOLS = frozenset(
  'awk gawk basename cat chmod cmp comm cp csplit cut date diff dirname find grep gzip '
  'head join ln ls md5sum mkdir mv paste perl readlink rm sed sha256sum sort split '
  'stat tail tar tee touch tr uniq wc xargs zcat'.split()
)
_MOST = 5  # seeds of a family
_MIN_CHARS, _MAX_CHARS, _MODERATE_CHARS = 80, 8000, 4000
_INTERACTIVE = re.compile(
  r'password|keyboard|window|socket|network|browser|e-?mail|kernel|\bGUI\b|\bCGI\b|'
  r'mouse|compile|thread',
  re.IGNORECASE,
)
_STATE = re.compile(
  r'\b(file|line|field|column|sort|count|list|director|permission|link|archive|date|'
  r'time|renam|delet|remov|replac|cop|compar|duplicat|word|checksum|digest)\w*',
  re.IGNORECASE,
)
Item = tuple[str, str]  # title, text


@dataclasses.dataclass(frozen=True)
class Seed:
  """One question with its answer.

  Attributes:
    id: document and number in it.
    title, text: the question's title and text.
    commands: lines of the text that begin with a tool.
    source: the package.
    tier: 'A' to 'D'; a tier less for each attribute that is missing.
  """

  id: str
  title: str
  text: str
  commands: tuple[str, ...]
  source: installed.Source
  tier: str

  def facts(self) -> dict:
    """What a task records: where the seed is, not its text."""
    digest = hashlib.sha256(self.text.encode()).hexdigest()
    about = {'id': self.id, 'title': self.title, 'tier': self.tier}
    return {**about, 'text_sha256': digest, **self.source.facts()}


def attributes(title: str, text: str) -> dict[str, bool]:
  """The labels of a question."""
  return {
    'scriptable': bool(commands(text)),
    'terminal': not _INTERACTIVE.search(title + ' ' + text),
    'verifiable': len(_STATE.findall(text)) >= 2,
    'moderate': len(text) <= _MODERATE_CHARS,
  }


def commands(text: str) -> tuple[str, ...]:
  """Lines of a text that are commands: indented or after a prompt, a tool first."""
  found = []
  for line in text.splitlines():
    stripped = line.strip().removeprefix('$ ').removeprefix('% ').strip('‘’')
    first = stripped.split(' ')[0]
    if first in TOOLS and ' ' in stripped and line[:1] in (' ', '\t', '$', '%'):
      found.append(stripped)
  return tuple(found)


def matching(family: Family, seeds: Sequence[Seed]) -> list[Seed]:
  """The seeds that are most about a family, at most `_MOST`, best first.

  All patterns must match. Seeds are ranked by matches in the title, then by matches per
  length.
  """
  patterns = [re.compile(pattern, re.IGNORECASE) for pattern in family.seeds]
  ranked = []
  for seed in seeds:
    hits = [len(pattern.findall(seed.text)) for pattern in patterns]
    title = sum(bool(pattern.search(seed.title)) for pattern in patterns)
    if all(n or p.search(seed.title) for n, p in zip(hits, patterns, strict=True)):
      ranked.append((-title, -sum(hits) / len(seed.text), seed.id, seed))
  return [seed for *_, seed in sorted(ranked, key=lambda item: item[:3])[:_MOST]]


@dataclasses.dataclass(frozen=True)
class Document:
  """A document of a package: name, where it is, and how it is read."""

  name: str
  package: str
  path: str
  read: Callable[[Path], Iterator[Item]]


def load(document: Document, directory: Path) -> tuple[list[Seed], dict]:
  """The kept seeds of a document, and counts of what the rules did.

  Raises:
    SourceMissing: the package is unavailable.
  """
  path, source = installed.debian(document.package, document.path, directory)
  kept, counts = [], dict.fromkeys(('items', 'length', 'A', 'B', 'C', 'D'), 0)
  for number, (title, text) in enumerate(document.read(path)):
    counts['items'] += 1
    if not _MIN_CHARS <= len(text) <= _MAX_CHARS:
      counts['length'] += 1
      continue
    tier = 'ABCD'[min(3, list(attributes(title, text).values()).count(False))]
    counts[tier] += 1
    if tier in 'AB':
      own = f'{document.name}/{number}'
      kept.append(Seed(own, title, text, commands(text), source, tier))
  return kept, {**counts, 'package': source.facts()}


def pod(path: Path) -> Iterator[Item]:
  """Questions of a Perl FAQ directory."""
  for file in sorted(path.rglob('perlfaq?.pod')):
    for part in re.split(r'^=head2 ', file.read_text('utf-8', 'replace'), flags=re.M)[
      1:
    ]:
      title, _, text = part.partition('\n')
      text = re.split(r'^=(?:head1|cut)', text, flags=re.M)[0]
      yield re.sub(r'[A-Z]<+ ?(.*?) ?>+', r'\1', title), text


def rst(path: Path) -> Iterator[Item]:
  """Questions of Python's FAQ."""
  for file in sorted(path.glob('*.rst.txt')):
    parts = re.split(r'^(\S.*)\n(?:-{4,}|={4,})\n', file.read_text('utf-8'), flags=re.M)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def numbered(path: Path) -> Iterator[Item]:
  """Questions of Debian's FAQ, as text: '8.1. Title'."""
  text = gzip.decompress(path.read_bytes()).decode('utf-8', 'replace')
  parts = re.split(r'^(\d+\.\d+\.[ \xa0]+\S.*)$', text, flags=re.M)
  yield from zip(parts[1::2], parts[2::2], strict=True)


def manual(path: Path) -> Iterator[Item]:
  """The parts of the EXAMPLES section of a manual page."""
  text = gzip.decompress(path.read_bytes()).decode('utf-8', 'replace')
  found = re.search(r'^\.SH "?EXAMPLES?"?.*?\n(.*?)(?=^\.SH|\Z)', text, re.M | re.S)
  if not found:
    return
  for part in re.split(r'^\.(?:SS|PP|P|IP|TP).*\n', found.group(1), flags=re.M):
    plain = re.sub(r'\\f[A-Z]|\\&|\\,|\\/', '', part)
    plain = plain.replace('\\-', '-').replace('\\(aq', "'").replace('\\e', '\\')
    # In the source a command is a line of its own, after a macro for fonts.
    plain = re.sub(r'^\.(?:B|BI|BR|I|EX|nf)[ \t]+', '  ', plain, flags=re.M)
    plain = re.sub(r'^\..*\n', '', plain, flags=re.M)
    plain = re.sub(r'^(?=\$ )', '  ', plain, flags=re.M)
    title = next((line.strip() for line in plain.splitlines() if line.strip()), '')
    yield title[:100], plain


def info(path: Path) -> Iterator[Item]:
  """The nodes of a GNU manual; `path` is its first file."""
  files = sorted(path.parent.glob(path.name.replace('.info.gz', '.info*.gz')))
  for file in files:
    text = gzip.decompress(file.read_bytes()).decode('utf-8', 'replace')
    for node in text.split('\x1f'):
      found = re.match(r'\s*File: [^\n]*?Node: ([^,\n]*)', node)
      if found:
        yield found.group(1), node.partition('\n\n')[2]


_MAN = 'usr/share/man/man1'
DOCUMENTS = (
  Document('perlfaq', 'perl-doc', 'usr/share/perl', pod),
  Document(
    'debian-faq',
    'debian-faq',
    'usr/share/doc/debian/FAQ/debian-faq.en.txt.gz',
    numbered,
  ),
  Document(
    'python-faq', 'python3.11-doc', 'usr/share/doc/python3.11/html/_sources/faq', rst
  ),
  Document('find.1', 'findutils', f'{_MAN}/find.1.gz', manual),
  Document('xargs.1', 'findutils', f'{_MAN}/xargs.1.gz', manual),
  Document('grep.1', 'grep', f'{_MAN}/grep.1.gz', manual),
  Document('gawk.1', 'gawk', f'{_MAN}/gawk.1.gz', manual),
  Document('comm.1', 'coreutils', f'{_MAN}/comm.1.gz', manual),
  Document('date.1', 'coreutils', f'{_MAN}/date.1.gz', manual),
  Document('coreutils.info', 'coreutils', 'usr/share/info/coreutils.info.gz', info),
  Document('find.info', 'findutils', 'usr/share/info/find.info.gz', info),
  Document('sed.info', 'sed', 'usr/share/info/sed.info.gz', info),
  Document('grep.info', 'grep', 'usr/share/info/grep.info.gz', info),
  Document('diffutils.info', 'diffutils', 'usr/share/info/diffutils.info.gz', info),
)
