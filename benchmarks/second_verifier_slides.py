"""The part for slides of `second_verifier_cowork`: decks read from their XML.

Nothing of the pipeline and no python-pptx: `zipfile` and ElementTree. What a deck must
have is derived again from instruction.md and data.csv, and compared with the task's
spec.json. Then the task's solution makes a deck, which is edited in its XML, by edits
that break a rule and by harmless ones; the task's verifier and this one must have the
same verdict on each. ISO/IEC 29500-1: PresentationML, DrawingML, charts.
"""

from __future__ import annotations

import csv
import io
import json
import os
import pathlib
import posixpath
import random
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable

_A = '{http://schemas.openxmlformats.org/drawingml/2006/main}'
_P = '{http://schemas.openxmlformats.org/presentationml/2006/main}'
_C = '{http://schemas.openxmlformats.org/drawingml/2006/chart}'
_R = '{http://schemas.openxmlformats.org/officeDocument/2006/relationships}'
_S = '{http://schemas.openxmlformats.org/spreadsheetml/2006/main}'
_EMU_PER_POINT, _MIN_POINTS, _LINE = 12700, 12, 1.2
_NARROW, _WIDE = set("iIjlftr.,:;'!|()[] -"), set('mwMW@%')

Edit = Callable[[dict[str, bytes]], None]


class _Deck:
  """The parts of a presentation."""

  def __init__(self, data: bytes):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
      self.parts = {name: archive.read(name) for name in archive.namelist()}
    self.root = self.xml('ppt/presentation.xml')
    size = self.root.find(f'{_P}sldSz')
    self.size = int(size.get('cx')), int(size.get('cy'))
    targets = self.targets('ppt/presentation.xml')
    self.slides = [
      targets[one.get(f'{_R}id')][1] for one in self.root.iter(f'{_P}sldId')
    ]

  def xml(self, name: str) -> ElementTree.Element:
    return ElementTree.fromstring(self.parts[name])

  def targets(self, name: str) -> dict[str, tuple[str, str]]:
    """Relationship id → (last word of its type, part)."""
    folder, base = posixpath.split(name)
    rels = f'{folder}/_rels/{base}.rels'
    if rels not in self.parts:
      return {}
    found = {}
    for one in self.xml(rels):
      target = one.get('Target')
      full = target[1:] if target.startswith('/') else posixpath.join(folder, target)
      kind = one.get('Type').rpartition('/')[2]
      found[one.get('Id')] = kind, posixpath.normpath(full)
    return found

  def related(self, name: str, kind: str) -> str | None:
    return next((part for k, part in self.targets(name).values() if k == kind), None)

  def place(self, shape, part: str) -> tuple[int, int, int, int] | None:
    """(left, top, width, height), inherited by a placeholder."""
    frame = shape.find(f'{_P}xfrm')
    frame = shape.find(f'{_P}spPr/{_A}xfrm') if frame is None else frame
    if frame is not None and frame.find(f'{_A}off') is not None:
      off, ext = frame.find(f'{_A}off'), frame.find(f'{_A}ext')
      return *(int(off.get(k)) for k in 'xy'), *(int(ext.get(k)) for k in ('cx', 'cy'))
    mark = shape.find(f'.//{_P}ph')
    above = self.related(part, 'slideLayout') or self.related(part, 'slideMaster')
    if mark is None or above is None:
      return None
    for other in self.xml(above).iter(f'{_P}sp'):
      theirs = other.find(f'.//{_P}ph')
      if theirs is not None and theirs.get('type') == mark.get('type'):
        return self.place(other, above)
    return None


def _paragraphs(shape) -> list[tuple[str, list[float | None]]]:
  """(text, explicit sizes in points) of each paragraph."""
  found = []
  for one in shape.findall(f'{_P}txBody/{_A}p'):
    text, sizes = '', []
    for run in one.findall(f'{_A}r'):
      own = run.find(f'{_A}rPr')
      size = None if own is None else own.get('sz')
      sizes.append(None if size is None else int(size) / 100)
      text += run.findtext(f'{_A}t') or ''
    found.append((text, sizes))
  return found


def _height(shape, width_points: float, is_title: bool) -> float:
  """Points of height that the text needs, by words and three widths of characters."""
  total = 0.0
  for text, sizes in _paragraphs(shape):
    points = max((s or (44 if is_title else 18) for s in sizes), default=_MIN_POINTS)
    lines, used = 1, 0.0
    for word in text.split():
      width = points * sum(
        0.3 if c in _NARROW else 0.85 if c in _WIDE else 0.55 for c in word + ' '
      )
      if used and used + width > width_points:
        lines, used = lines + 1, 0.0
      used += width
      while used > width_points and len(word) > 1:
        lines, used = lines + 1, used - width_points
    total += lines * _LINE * points
  return total


def _chart(deck: _Deck, part: str) -> tuple[list[str], list[float]] | str:
  """Categories and values in the chart's cache, or why they are not one series."""
  series = deck.xml(part).findall(f'.//{_C}ser')
  if len(series) != 1:
    return f'{len(series)} series'
  columns = []
  for tag in ('cat', 'val'):
    points = series[0].findall(f'{_C}{tag}//{_C}pt')
    points.sort(key=lambda p: int(p.get('idx')))
    columns.append([p.findtext(f'{_C}v') for p in points])
  book = deck.related(part, 'package')
  source = _book(deck.parts[book]) if book else {}
  for tag, cached in zip(('cat', 'val'), columns, strict=True):
    formula = series[0].findtext(f'{_C}{tag}//{_C}f') or ''
    match = re.fullmatch(r"'?(\w+)'?!\$([A-Z])\$(\d+):\$\2\$(\d+)", formula)
    if not match:
      return f'the source of the chart is {formula!r}'
    _, letter, first, last = match.groups()
    rows = range(int(first), int(last) + 1)
    if [str(source.get(f'{letter}{i}')) for i in rows] != [
      str(c if tag == 'cat' else float(c)) for c in cached
    ]:
      return 'the chart differs from its source'
  return columns[0], [float(v) for v in columns[1]]


def _book(data: bytes) -> dict[str, object]:
  """The cells of the first sheet of a chart's workbook."""
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    strings = []
    if 'xl/sharedStrings.xml' in archive.namelist():
      root = ElementTree.fromstring(archive.read('xl/sharedStrings.xml'))
      strings = [''.join(t.itertext()) for t in root]
    sheet = ElementTree.fromstring(archive.read('xl/worksheets/sheet1.xml'))
  cells: dict[str, object] = {}
  for cell in sheet.iter(f'{_S}c'):
    value = cell.findtext(f'{_S}v')
    if value is not None:
      shared = cell.get('t') == 's'
      cells[cell.get('r')] = strings[int(value)] if shared else float(value)
  return cells


def wrong(data: bytes, titles: list[str], rows: list[tuple[str, int]]) -> str:
  """'' if a deck is right by this reader, or why not."""
  deck = _Deck(data)
  if len(deck.slides) != len(titles):
    return f'{len(deck.slides)} slides'
  for number, (part, title) in enumerate(zip(deck.slides, titles, strict=True), 1):
    root = deck.xml(part)
    if root.get('show') in ('0', 'false'):
      return f'slide {number} is hidden'
    if reason := _slide(deck, part, root, title):
      return f'slide {number}: {reason}'
  total, (best, most) = sum(v for _, v in rows), max(rows, key=lambda row: row[1])
  said = ' '.join(t.text or '' for t in deck.xml(deck.slides[1]).iter(f'{_A}t'))
  facts = '.*?'.join(rf'(?<![\w.]){f}(?!\w|\.\d)' for f in (total, best, most))
  if not re.search(facts, said, re.S):
    return 'the summary does not state the facts'
  others = {n for n, _ in rows} - {best}
  numbers = set(re.findall(r'\d+', said)) - {str(total), str(most)}
  if numbers or any(re.search(rf'\b{re.escape(n)}\b', said) for n in others):
    return 'the summary says more than the facts'
  charts = [p for kind, p in deck.targets(deck.slides[2]).values() if kind == 'chart']
  frames = list(deck.xml(deck.slides[2]).iter(f'{_C}chart'))
  if len(charts) != 1 or len(frames) != 1:
    return f'{len(frames)} charts'
  found = _chart(deck, charts[0])
  if isinstance(found, str):
    return found
  names = [n for n, _ in rows]
  if found != (names, [float(v) for _, v in rows]):
    return 'the chart differs from data.csv'
  return _misleading(deck.parts[charts[0]].decode(), names)


def _misleading(chart: str, names: list[str]) -> str:
  """Axes and texts of a chart that say something else than its data."""
  bars = 'barDir val="bar"' in chart  # their categories may run downwards
  for kind, axis in re.findall(r'<c:(catAx|dateAx|valAx)>(.*?)</c:\1>', chart, re.S):
    if 'logBase' in axis or 'dispUnits' in axis:
      return 'the axis has another scale'
    if 'orientation val="maxMin"' in axis and (kind == 'valAx' or not bars):
      return 'the axis is reversed'
    if kind != 'valAx' and re.search(r'crossesAt|crosses val="max"', axis):
      return 'bars do not start at the axis'
  said = re.findall(r'<a:t>(.*?)</a:t>', chart, re.S)
  said += re.findall(r'<c:tx>.*?<c:v>(.*?)</c:v>.*?</c:tx>', chart, re.S)
  words = set(re.findall(r'\w+', ' '.join(said).lower()))
  if re.search(r'\d', ' '.join(said)) or words & {n.lower() for n in names}:
    return 'the chart says more than its data'
  return ''


def _slide(deck: _Deck, part: str, root, title: str) -> str:
  """Title, layout and sizes of a slide."""
  boxes: list[tuple[int, int, int, int]] = []
  titles = []
  for shape in root.find(f'{_P}cSld/{_P}spTree'):
    name = shape.tag.rpartition('}')[2]
    if name in ('nvGrpSpPr', 'grpSpPr', 'extLst'):
      continue
    if name not in ('sp', 'pic', 'graphicFrame', 'cxnSp'):
      return f'{name} is not allowed'
    mark = shape.find(f'.//{_P}ph')
    is_title = mark is not None and mark.get('type') in ('title', 'ctrTitle')
    if is_title:
      titles.append(' '.join(''.join(t for t, _ in _paragraphs(shape)).split()))
    place = deck.place(shape, part)
    if place is None or min(place) < 0 or 0 in place[2:]:
      return 'a shape has no place'
    left, top, width, height = place
    if left + width > deck.size[0] or top + height > deck.size[1]:
      return 'a shape is outside'
    for other in boxes:
      across = min(left + width, other[0] + other[2]) - max(left, other[0])
      down = min(top + height, other[1] + other[3]) - max(top, other[1])
      smaller = min(width * height, other[2] * other[3])
      if across > 0 and down > 0 and across * down > 0.01 * smaller:
        return 'two shapes overlap'
    boxes.append(place)
    sizes = [s for t, ss in _paragraphs(shape) if t.strip() for s in ss if s]
    if min(sizes, default=_MIN_POINTS) < _MIN_POINTS:
      return 'text is small'
    if _height(shape, width / _EMU_PER_POINT, is_title) > height / _EMU_PER_POINT:
      return 'text overflows'
  return '' if titles[:1] == [title] else f'the title is {titles[:1]}'


def _replaced(part: str, old: str, new: str) -> Edit:
  """An edit of the first match of a pattern in a part."""

  def edit(parts):
    text, count = re.subn(old, new, parts[part].decode(), count=1, flags=re.S)
    assert count, f'{part} has no {old}'
    parts[part] = text.encode()

  return edit


def _titled(text: str) -> str:
  """A replacement that adds the title of an axis."""
  body = f'<a:bodyPr/><a:p><a:r><a:t>{text}</a:t></a:r></a:p>'
  return rf'\1<c:title><c:tx><c:rich>{body}</c:rich></c:tx></c:title>'


def edits(parts: dict[str, bytes]) -> dict[str, tuple[bool, Edit]]:
  """Name → (whether the deck stays right, edit)."""
  slide = 'ppt/slides/slide{}.xml'.format
  chart = next(p for p in parts if re.fullmatch(r'ppt/charts/chart\d*\.xml', p))
  book = next(p for p in parts if p.startswith('ppt/embeddings/'))

  def source(parts):
    with zipfile.ZipFile(io.BytesIO(parts[book])) as archive:
      inner = {n: archive.read(n) for n in archive.namelist()}
    name = 'xl/worksheets/sheet1.xml'
    inner[name] = re.sub(rb'(r="B2"[^>]*><v>)\d+', rb'\g<1>1', inner[name])
    parts[book] = packed(inner)

  def scaled(setting):
    return r'(<c:valAx>.*?<c:scaling)/>', rf'\1><c:{setting}/></c:scaling>'

  number = r'(<c:val>.*?<c:pt idx="1">\s*<c:v>)[\d.]+'
  box = r'(name="TextBox.*?<a:off x=")\d+(" y=")\d+'
  return {
    'none': (True, lambda parts: None),
    'moved a little': (True, _replaced(slide(2), box, r'\g<1>450000\g<2>1700000')),
    'other fonts': (True, _replaced(slide(2), r'sz="2400"', 'sz="2000"')),
    'other name': (True, _replaced(slide(2), r'name="TextBox \d+"', 'name="x"')),
    'other letters': (True, _replaced(slide(2), 'Total: ', 'All together: ')),
    'value': (False, _replaced(chart, f'{number}', r'\g<1>7')),
    'category': (False, _replaced(chart, r'(<c:cat>.*?<c:v>)\w+', r'\g<1>Zzz')),
    'source': (False, source),
    'named axis': (True, _replaced(chart, '(<c:majorGridlines/>)', _titled('Count'))),
    'other axis': (False, _replaced(chart, '(<c:majorGridlines/>)', _titled('To 12'))),
    'reversed': (False, _replaced(chart, *scaled('orientation val="maxMin"'))),
    'logarithmic': (False, _replaced(chart, *scaled('logBase val="10"'))),
    'title': (False, _replaced(slide(1), r'<a:t>', '<a:t>The ')),
    'fact': (False, _replaced(slide(2), r'with \d+', 'with 1')),
    'other order': (
      False,
      _replaced(slide(2), r'Total: (\d+)(.*) with (\d+)', r'Total: \3\2 with \1'),
    ),
    'more facts': (False, _replaced(slide(2), r'(with \d+)', r'\1 or 1')),
    'outside': (False, _replaced(slide(2), box, r'\g<1>8000000\g<2>1700000')),
    'overlap': (False, _replaced(slide(2), box, r'\g<1>450000\g<2>300000')),
    'small': (False, _replaced(slide(2), r'sz="2400"', 'sz="900"')),
    'overflow': (False, _replaced(slide(2), 'Total: ', 'Total ' + 'word ' * 400)),
    'hidden': (False, _replaced(slide(1), r'<p:sld ', '<p:sld show="0" ')),
  }


def packed(parts: dict[str, bytes]) -> bytes:
  """A zip archive of parts."""
  file = io.BytesIO()
  with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
    for name, data in parts.items():
      archive.writestr(name, data)
  return file.getvalue()


_JUDGE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import grade
spec = json.load(open(sys.argv[1] + '/spec.json'))
found = [grade.judge(open(path, 'rb').read(), spec) for path in sys.argv[2:]]
print(json.dumps(found))
"""


def slides(path: pathlib.Path, _) -> str:
  """'' if both verifiers agree on a task's spec and decks, or what differs."""
  text = (path / 'instruction.md').read_text()
  titles = re.findall(r'^\d\. "([^"]*)"', text, re.M)
  data = path / 'environment' / 'overlay' / 'data.csv'
  table = list(csv.reader(io.StringIO(data.read_text())))[1:]
  rows = [(name, int(value)) for name, value in table]
  spec = json.loads((path / 'tests' / 'spec.json').read_text())
  if [one['title'] for one in spec['slides']] != titles:
    return f'titles {titles}'
  chart = {'slide': 3, 'categories': [n for n, _ in rows]}
  if spec['chart'] != {**chart, 'values': [v for _, v in rows]}:
    return f'rows {rows}'
  with tempfile.TemporaryDirectory() as place:
    pathlib.Path(place, 'data.csv').write_text(data.read_text())
    solve = [sys.executable, str((path / 'solution' / 'solve.py').resolve())]
    environment = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    subprocess.run(solve, cwd=place, check=True, env=environment)
    parts = _Deck(pathlib.Path(place, 'deck.pptx').read_bytes()).parts
    known = edits(parts)
    chosen = ['none', *random.Random(path.name).sample(list(known)[1:], 6)]
    for name in chosen:
      changed = dict(parts)
      known[name][1](changed)
      pathlib.Path(place, name).write_bytes(packed(changed))
    tests = str((path / 'tests').resolve())
    command = [sys.executable, '-I', '-c', _JUDGE, tests, *chosen]
    done = subprocess.run(command, cwd=place, check=True, capture_output=True)
    theirs = json.loads(done.stdout)
    for name, (reward, reason) in zip(chosen, theirs, strict=True):
      ours = wrong(pathlib.Path(place, name).read_bytes(), titles, rows)
      if bool(reward) == bool(ours) or known[name][0] == bool(ours):
        return f'deck "{name}": {reward} ({reason}), here {ours or "right"!r}'
  return ''
