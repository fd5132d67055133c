r"""Checks admitted Cowork tasks by verifiers that share no code with the pipelines.

python -m benchmarks.second_verifier_cowork --dataset=workdir/deep_search --tasks=50

Deep search: from instruction.md and the library's text alone, by brute force over all
passages instead of BM25, the answer and its evidence are derived again. Spreadsheets:
the cells of the workbook's XML are read without openpyxl, the solution's formulas are
evaluated by a small translator to Python instead of an engine, for every hidden case.
Slides: see `second_verifier_slides`.
Prints disagreements; exits with 1 if a task disagrees. docs/pipelines_cowork.md.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import pathlib
import re
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
import zipfile

from benchmarks.second_verifier_slides import slides
from m2jax.observe.printable import printable

_REPLACED = {'something', 'some', 'number', 'name'}


def _words(text: str) -> set[str]:
  return set(re.findall(r'[a-z]{3,}', text.lower())) - _REPLACED


class _Library:
  """The passages of an archive."""

  def __init__(self, archive: pathlib.Path):
    with tarfile.open(archive) as tar:
      data = tar.extractfile('./library/passages.jsonl').read().decode()
    self.rows = {r['id']: r for r in map(json.loads, data.splitlines())}
    self.words = {i: _words(r['text']) for i, r in self.rows.items()}

  def of_clue(self, clue: str) -> list[str]:
    """All passages that have the most words of a clue."""
    wanted = _words(clue)
    scores = {i: len(wanted & have) for i, have in self.words.items()}
    best = max(scores.values())
    return [i for i, score in scores.items() if score == best]


def deep_search(path: pathlib.Path, libraries: dict) -> str:
  """'' if the task's answer and evidence are those derived here, or what differs."""
  archive = path / 'environment' / 'workspace.tar.gz'
  key = archive.stat().st_ino
  if key not in libraries:
    libraries[key] = _Library(archive)
  library = libraries[key]
  text = (path / 'instruction.md').read_text().partition('\nTools, ')[0]
  expected = json.loads((path / 'tests' / 'expected.json').read_text())
  clues = re.findall(r'replaced\): "(.*)"$', text, re.M)
  way = []
  for clue in clues:
    found = library.of_clue(clue)
    # Passages with the same words: the one of the evidence must be among them.
    named = [one for one in found if one in expected['evidence']]
    if len(named) != 1 or len(found) > 3:
      return f'{len(found)} passages fit the clue {clue[:40]!r}'
    way += named
  if len(clues) == 2:
    both = [
      i for i in library.rows[way[0]]['links'] if i in library.rows[way[1]]['links']
    ]
    if len(both) != 1:
      return f'{len(both)} common links'
    way += both
  for word in re.findall(r'only one that mentions "(\w+)"', text):
    targets = [library.rows[i] for i in library.rows[way[-1]]['links']]
    hits = [t['id'] for t in targets if word in f'{t["title"]} {t["text"]}'.lower()]
    if len(hits) != 1:
      return f'{len(hits)} linked passages mention {word}'
    way += hits
  if sorted(way) != sorted(expected['evidence']):
    return f'evidence {way}, not {expected["evidence"]}'
  title = library.rows[way[-1]]['title']
  return '' if title in expected['answers'] else f'answer {title!r}'


_NS = '{http://schemas.openxmlformats.org/spreadsheetml/2006/main}'


def _cells(data: bytes) -> dict[str, object]:
  """The cells of a workbook's XML: 'Sheet!A1' → number or text."""
  cells = {}
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    strings = []
    if 'xl/sharedStrings.xml' in archive.namelist():
      root = ElementTree.fromstring(archive.read('xl/sharedStrings.xml'))
      strings = [''.join(t.itertext()) for t in root]
    book = ElementTree.fromstring(archive.read('xl/workbook.xml'))
    names = [sheet.get('name') for sheet in book.iter(f'{_NS}sheet')]
    for number, name in enumerate(names, 1):
      root = ElementTree.fromstring(archive.read(f'xl/worksheets/sheet{number}.xml'))
      for cell in root.iter(f'{_NS}c'):
        value, text = cell.find(f'{_NS}v'), cell.find(f'{_NS}is')
        place = f'{name}!{cell.get("r")}'
        if text is not None:
          cells[place] = ''.join(text.itertext())
        elif value is not None:
          shared = cell.get('t') == 's'
          cells[place] = strings[int(value.text)] if shared else float(value.text)
  return cells


class _Evaluator:
  """Evaluates the formulas of a plan over cells by translating them to Python."""

  _REFERENCE = re.compile(
    r'"[^"]*"|(?:(\w+)!)?\$?([A-Z]{1,2})\$?(\d+)(?::\$?([A-Z]{1,2})\$?(\d+))?(?![\w(])'
  )

  def __init__(self, cells, plan):
    self.cells, self.plan, self.known = cells, plan, {}

  def cell(self, place: str):
    if place in self.plan:
      if place not in self.known:
        self.known[place] = self._evaluate(self.plan[place], place.split('!')[0])
      return self.known[place]
    return self.cells.get(place)

  def area(self, sheet, left, top, right, bottom):
    columns = range(ord(left), ord(right) + 1)
    rows = range(top, bottom + 1)
    return _Array(self.cell(f'{sheet}!{chr(c)}{r}') for r in rows for c in columns)

  def _evaluate(self, formula: str, sheet: str):
    def reference(match):
      if match.group().startswith('"'):
        return match.group()
      own, left, top, right, bottom = match.groups()
      if right is None:
        return f'cell({f"{own or sheet}!{left}{top}"!r})'
      return f'area({own or sheet!r},{left!r},{top},{right!r},{bottom})'

    code = self._REFERENCE.sub(reference, formula[1:])
    code = (
      re.sub(r'(?<![<>=])=(?!=)', '==', code).replace('>==', '>=').replace('&', '+')
    )
    code = re.sub(r'\bIF\(', 'IF_(', code)
    names = {**_FUNCTIONS, 'cell': self.cell, 'area': self.area}
    return eval(code, {'__builtins__': {}}, names)  # the pipeline's own formulas


class _Array(tuple):
  """A range; operators work by element, as in SUMPRODUCT."""

  def __eq__(self, other):
    return _Array(float(x == other) for x in self)

  __hash__ = None

  def __mul__(self, other):
    return _Array(x * y for x, y in zip(self, other, strict=True))


class _Text(str):
  """Text whose sum with a number is text: ">"&B1."""

  def __add__(self, other):
    return _Text(f'{self}{other}')


def _irr(flows):
  rate = 0.1
  for _ in range(100):  # Newton
    value = sum(f / (1 + rate) ** k for k, f in enumerate(flows))
    slope = sum(-k * f / (1 + rate) ** (k + 1) for k, f in enumerate(flows))
    rate -= value / slope
  return rate


def _mean(values):
  values = list(values)
  return math.fsum(values) / len(values)


def _pmt(rate, periods, present):
  return -present * rate / -math.expm1(-periods * math.log1p(rate))


def _fv(rate, periods, payment, present):
  growth = (1 + rate) ** periods
  return -(present * growth + payment * (growth - 1) / rate)


_FUNCTIONS = {
  'SUM': math.fsum,
  'SUMPRODUCT': math.fsum,
  'SUMIFS': lambda s, a, x: math.fsum(v for v, k in zip(s, a, strict=True) if k == x),
  'AVERAGEIFS': lambda s, a, x: _mean(v for v, k in zip(s, a, strict=True) if k == x),
  'COUNTIF': lambda a, x: sum(v > float(x[1:]) for v in a),
  'IF_': lambda condition, yes, no: yes if condition else no,
  'INDEX': lambda a, i: a[i - 1],
  'MATCH': lambda x, a, _: list(a).index(x) + 1,
  'MAX': max,
  'NPV': lambda r, a: math.fsum(v / (1 + r) ** k for k, v in enumerate(a, 1)),
  'IRR': _irr,
  'PMT': _pmt,
  'FV': _fv,
}


def spreadsheets(path: pathlib.Path, _) -> str:
  """'' if the solution's formulas give the expected values in all cases."""
  cells = _cells((path / 'environment' / 'overlay' / 'book.xlsx').read_bytes())
  plan = json.loads((path / 'solution' / 'plan.json').read_text())
  spec = json.loads((path / 'tests' / 'cases.json').read_text())
  plan = {k: re.sub(r'"([<>=]+)"&', r'T("\1")&', v) for k, v in plan.items()}
  _FUNCTIONS['T'] = _Text
  for number, case in enumerate(spec['cases']):
    found = _Evaluator({**cells, **case['inputs']}, plan)
    for place, value in case['values'].items():
      ours = found.cell(place)
      equal = (
        ours == value
        if isinstance(value, str)
        else math.isclose(ours, value, rel_tol=1e-6, abs_tol=1e-6)
      )
      if not equal:
        return f'case {number}: {place} is {ours}, not {value}'
  return ''


VERIFIERS = {
  'deep_search': deep_search,
  'spreadsheets': spreadsheets,
  'slides': slides,
}


def main(argv=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--dataset', type=pathlib.Path, required=True)
  parser.add_argument('--tasks', type=int, default=50)
  parser.add_argument('--json', action='store_true')
  options = parser.parse_args(argv)
  paths = sorted(p for p in options.dataset.glob('tasks/[!.]*/[!.]*') if p.is_dir())
  paths = paths[:: max(1, len(paths) // options.tasks)][: options.tasks]
  shared, rows = {}, []
  for path in paths:
    pipeline = path.name.split('-')[0]
    rows.append((path.name, pipeline, VERIFIERS[pipeline](path, shared)))
  wrong = [row for row in rows if row[2]]
  if options.json:
    print(json.dumps({'tasks': len(rows), 'disagree': len(wrong)}))
  else:
    for name, _, reason in wrong:
      print(printable(f'{name}: {reason}'))
    print(f'{len(rows)} tasks checked, {len(wrong)} disagree')
  return 1 if wrong or not rows else 0


if __name__ == '__main__':
  sys.exit(main())
