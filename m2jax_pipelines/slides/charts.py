"""What a chart shows: its data in plain columns, bars or a line, on axes from 0.

`allowed` has refused everything that these functions do not know. Colours that a chart
does not name are those of the theme. Each function returns '' or what is wrong.
"""

import io
import re

import look
from contrast import ratio
from fit import EMU_PER_POINT
from look import A, C, colour, fill

MIN_SHARE, MIN_CONTRAST, MAX_AXIS = 0.2, 1.2, 3  # of the slide; of a series; of values
MIN_POINTS, MAX_SIZE, MAX_STEPS = 10.0, 4, 50  # of unstated size; times the least
MIN_LINE, MAX_TEXT, MAX_LINES = 6350, 80, 3  # EMU; characters; of a title or name
MIN_PLOT, TITLE_SIZE, TITLE_LINE = 0.3, 1.2, 1.5  # as renderers lay charts out
_ACCENTS = tuple(f'accent{i}' for i in range(1, 7))
_INSIDE = ('ctr', 'inEnd', 'inBase')


def wrong(slide, shape, deck, wanted, least):
  """A chart shows its data: large, on plain axes, with no text that contradicts it."""
  root, values = shape.chart._chartSpace, wanted['values']
  if shape.width * shape.height < MIN_SHARE * deck.slide_width * deck.slide_height:
    return 'the chart is small'
  for series in root.iter(C + 'ser'):
    for tag, count in (('tx', 1), ('cat', len(values)), ('val', len(values))):
      if not _complete(series.find(C + tag), count, tag == 'tx'):
        return f'the points of the chart ({tag}) are not {count}, each once'
  if not all(_drawn(slide, root, s) for n in ('ser', 'dPt') for s in root.iter(C + n)):
    return 'the series of the chart is not drawn'
  return (
    _scale(root, max(values))
    or _axes(root)
    or _words(root, wanted['categories'])
    or _sizes(root, least)
    or _room(shape, root)
    or _inks(slide, root)
  )


def _complete(reference, count, optional):
  """Whether a cache has each point once."""
  if reference is None:
    return optional
  points = sorted(one.get('idx') for one in reference.iter(C + 'pt'))
  counts = [one.get('val') for one in reference.iter(C + 'ptCount')]
  return counts == [str(count)] and points == sorted(str(i) for i in range(count))


def _scale(root, most):
  """Axes begin at 0 and end not far above the highest value."""
  for one in root.iter(C + 'scaling'):
    low, high = (one.find(C + tag) for tag in ('min', 'max'))
    if low is not None and float(low.get('val')) != 0:
      return 'an axis of the chart does not begin at 0'
    if high is not None and float(high.get('val')) < most:
      return 'an axis of the chart ends below a value'
    if high is not None and float(high.get('val')) > MAX_AXIS * most:
      return 'an axis of the chart ends above three times the highest value'
    if one.getparent().tag == C + 'catAx' and (low, high) != (None, None):
      return 'the axis of categories has ends'
  for tag in ('majorUnit', 'minorUnit'):
    for one in root.iter(C + tag):
      if not most / MAX_STEPS <= float(one.get('val')) <= most:
        return f'the {tag} of an axis does not suit the values'
  return ''


def _axes(root):
  """Axes are one of each kind, not reversed, and begin where the other is 0.

  Categories of horizontal bars may run downwards, which is the order of reading.
  """
  downwards = root.find(f'.//{C}barDir[@val="bar"]') is not None
  for tag in ('catAx', 'valAx'):
    axes = list(root.iter(C + tag))
    if len(axes) != 1:
      return f'the chart has {len(axes)} axes {tag}'
    if axes[0].find(f'{C}scaling/{C}orientation[@val="maxMin"]') is not None:
      if tag == 'valAx' or not downwards:
        return 'an axis of the chart is reversed'
    if tag == 'catAx' and axes[0].find(f'{C}crosses[@val="max"]') is not None:
      return 'an axis of the chart is reversed'
    for needed in ('delete', 'tickLblPos'):
      if axes[0].find(C + needed) is None:
        return f'an axis of the chart has no {needed}'
  plot, *axes = (
    [one.get('val') for one in root.iterfind(f'.//{C}{tag}')]
    for tag in ('ser/../' + C + 'axId', 'catAx/' + C + 'axId', 'valAx/' + C + 'axId')
  )
  crossed = [root.find(f'.//{C}{t}/{C}crossAx') for t in ('valAx', 'catAx')]
  if plot != axes[0] + axes[1] or plot != [
    None if one is None else one.get('val') for one in crossed
  ]:
    return 'the axes of the chart are not those of its plot'
  return ''


def _words(root, names):
  """Titles and names in a chart state nothing that its data could contradict."""
  texts = _paragraphs(root)
  for one in root.iter(C + 'tx'):
    texts += [v.text or '' for v in one.iter(C + 'v')]
  said = '\n'.join(texts)
  if any(c.isnumeric() for c in said):
    return 'a title or name of the chart has a number'
  if reason := look.strange(said):
    return f'a title or name of the chart: {reason}'
  if max(map(len, texts), default=0) > MAX_TEXT or any(
    sum(1 for _ in one.iter(A + 'p', A + 'br')) > MAX_LINES
    for one in root.iter(C + 'rich')
  ):
    return 'a title or name of the chart is long'
  name = look.says(said, names)
  return f'a title or name of the chart says {name}' if name else ''


def _sizes(root, least):
  """Text of the chart is neither small nor so large that it takes the plot's place."""
  default = root.find(f'{C}txPr/{A}p/{A}pPr/{A}defRPr')
  stated = [int(one.get('sz')) / 100 for one in root.iter(A + '*') if one.get('sz')]
  if default is None or default.get('sz') is None:
    stated.append(MIN_POINTS)  # a renderer's own
  for points in stated:
    if not least <= points <= MAX_SIZE * least:
      return f'the chart has text of {points:g} points, not {least:g} or more'
  return ''


def _room(shape, root):
  """Titles, labels and the legend leave the plot its part of the chart."""
  width, height = (side / EMU_PER_POINT for side in (shape.width, shape.height))
  default = _points(root.find(C + 'txPr'), MIN_POINTS)
  taken = 0.0
  for tag in ('title', 'catAx', 'valAx', 'legend'):
    for one in root.iter(C + tag):
      size = _points(one.find(C + 'txPr'), default)
      if tag == 'title':
        size = _points(one.find(C + 'tx'), size * TITLE_SIZE)
        for text in _paragraphs(one) or ['']:
          taken += size * TITLE_LINE * max(1, -(-len(text) * size // (2 * width)))
      else:
        taken += size * TITLE_LINE
      if tag == 'legend':
        names = [v.text or '' for v in root.iterfind(f'.//{C}ser/{C}tx//{C}v')]
        if max(map(len, names), default=0) * size / 2 > width / 3:
          return 'the legend of the chart is too long for it'
  if taken > (1 - MIN_PLOT) * min(width, height):
    return 'the chart is too small for its titles, labels and legend'
  return ''


def _points(text, default):
  """The largest size in a text of the chart."""
  sizes = [] if text is None else [o.get('sz') for o in text.iter(A + '*')]
  return max((int(size) / 100 for size in sizes if size), default=default)


def _paragraphs(one):
  return [''.join(t.text or '' for t in p.iter(A + 't')) for p in one.iter(A + 'p')]


def _grounds(slide, root):
  """RGB behind the chart and behind its plot; None if it is not plain."""
  found = look.background(slide)
  for path in (f'{C}spPr', f'{C}chart/{C}plotArea/{C}spPr'):
    own = fill(root.find(path))
    if own is not None and own.tag != A + 'noFill':
      found = own
    yield 'FFFFFF' if found is None else colour(slide, found)


def _painted(slide, root, one):
  """RGB of what a series or point is drawn with; [None] if it is not plain."""
  properties, line = one.find(C + 'spPr'), root.find(f'.//{C}lineChart') is not None
  if line and properties is not None:
    properties = properties.find(A + 'ln')
    if properties is not None and int(properties.get('w', MIN_LINE)) < MIN_LINE:
      return [None]
  own = fill(properties)
  if own is not None:
    return [colour(slide, own)]
  if one.tag == C + 'dPt':
    return []
  varied = root.find(f'.//{C}varyColors')
  alike = line or (varied is not None and varied.get('val') in ('0', 'false'))
  return [look.scheme(slide, name) for name in _ACCENTS[: 1 if alike else None]]


def _drawn(slide, root, one):
  """Whether a series or point has plain colours that are not the ground's."""
  *_, ground = _grounds(slide, root)
  return ground is not None and all(
    rgb is not None and ratio(rgb, ground) >= MIN_CONTRAST
    for rgb in _painted(slide, root, one)
  )


def _inks(slide, root):
  """All text of the chart can be read where it is."""
  outer, plot = _grounds(slide, root)
  default = fill(root.find(f'{C}txPr/{A}p/{A}pPr/{A}defRPr'))
  series = next(root.iter(C + 'ser'))
  for tag in ('title', 'catAx', 'valAx', 'legend', 'dLbls', 'dLbl'):
    for one in root.iter(C + tag):
      own = None if tag.endswith('Ax') else fill(one.find(C + 'spPr'))
      behind = [plot if tag.startswith('dLbl') else outer]
      if own is not None and own.tag != A + 'noFill':
        behind = [colour(slide, own)]
      elif tag.startswith('dLbl') and _inside(root, one):
        points = [series, *series.iter(C + 'dPt')]
        behind = [rgb for point in points for rgb in _painted(slide, root, point)]
      for ink in _fills(one, default):
        rgb = look.scheme(slide, 'tx1') if ink is None else colour(slide, ink)
        if rgb is None or any(
          b is None or ratio(rgb, b) < look.MIN_CONTRAST for b in behind
        ):
          return f'text of the chart ({tag}) cannot be read on its background'
  return ''


def _fills(one, default):
  """Fills of the text of a part of a chart; None for the theme's colour of text."""
  base = fill(one.find(f'{C}txPr/{A}p/{A}pPr/{A}defRPr'))
  found = []
  for paragraph in one.iterfind(f'{C}tx/{C}rich/{A}p'):
    own = fill(paragraph.find(f'{A}pPr/{A}defRPr'))
    for run in paragraph.findall(A + 'r'):
      chain = (fill(run.find(A + 'rPr')), own, base, default)
      found.append(next((f for f in chain if f is not None), None))
  return found or [default if base is None else base]


def _inside(root, labels):
  """Whether labels are within the bars."""
  place = labels.find(C + 'dLblPos')
  if place is None and labels.tag == C + 'dLbl':
    place = labels.getparent().find(C + 'dLblPos')
  if root.find(f'.//{C}barChart') is None:
    return False
  stacked = root.find(f'.//{C}grouping[@val="stacked"]') is not None
  return stacked if place is None else place.get('val') in _INSIDE


def source(found):
  """(categories, values) of the workbook that a chart refers to; a text if none."""
  import guard
  import openpyxl

  part = found.part.chart_workbook.xlsx_part
  if part is None:
    return 'the chart has no workbook'
  if reason := guard.check(part.blob):
    return f'the workbook of the chart is refused: {reason}'
  book = openpyxl.load_workbook(io.BytesIO(part.blob))
  cells = (cell for sheet in book.worksheets for row in sheet.rows for cell in row)
  if any(cell.data_type == 'f' for cell in cells):
    return 'the workbook of the chart has a formula'
  series = next(found._chartSpace.iter(C + 'ser'))
  columns = []
  for tag in ('cat', 'val'):
    formulas = [f.text or '' for f in series.findall(f'{C}{tag}/*/{C}f')]
    sheet, _, area = (formulas or [''])[0].rpartition('!')
    sheet = sheet.strip("'")
    area = area.replace('$', '')
    if sheet not in book.sheetnames or not re.fullmatch(r'[A-Z]+\d+:[A-Z]+\d+', area):
      return 'the chart refers to no cells'
    columns.append([cell.value for row in book[sheet][area] for cell in row])
  return columns[0], columns[1]
