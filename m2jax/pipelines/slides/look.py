"""What a deck shows: sizes and colours of text as inherited, and a chart that is seen.

Sizes and colours come from the run, its shape, the placeholder of the layout and of the
master, and the master's styles, in this order (ISO/IEC 29500-1, 21.1.2.4). Text must be
on a plain colour with a contrast of at least `MIN_CONTRAST` (WCAG 2.1's ratio), a chart
is drawn in such colours, and text is where its shape is (`settings`). What cannot be
checked is not allowed: animations, tables, rotated shapes, layouts that show more than
placeholders. Each function returns '' or what is wrong.
"""

import colorsys
import io
import re

A = '{http://schemas.openxmlformats.org/drawingml/2006/main}'
C = '{http://schemas.openxmlformats.org/drawingml/2006/chart}'
P = '{http://schemas.openxmlformats.org/presentationml/2006/main}'
ALLOWED = {P + name for name in ('sp', 'pic', 'cxnSp', 'graphicFrame')}
IGNORED = {P + name for name in ('nvGrpSpPr', 'grpSpPr', 'extLst')}
FILLS = ('noFill', 'solidFill', 'gradFill', 'blipFill', 'pattFill', 'grpFill')
TITLES = ('title', 'ctrTitle')
MIN_CONTRAST, MIN_CHART_SHARE, DEFAULT_POINTS = 2.0, 0.2, 18.0
MIN_PLOT_SHARE, MIN_SERIES_CONTRAST = 0.3, 1.2
_PRESET = {'black': '000000', 'white': 'FFFFFF'}


def allowed(slide):
  """Elements of a slide that the other checks can judge."""
  import settings

  tree = slide.shapes._spTree
  if slide._element.find(P + 'timing') is not None:
    return 'animations are not allowed'
  for element in tree:
    if element.tag in IGNORED:
      continue
    name = element.tag.rpartition('}')[2]
    if element.tag not in ALLOWED:
      return f'{name} is not allowed'
    if name == 'graphicFrame' and element.find(f'.//{C}chart') is None:
      return 'of frames, only charts are allowed'
    if any(one.get('hidden') in ('1', 'true') for one in element.iter(P + 'cNvPr')):
      return 'a shape is hidden'
    for frame in (*element.iter(A + 'xfrm'), *element.iter(P + 'xfrm')):
      if frame.get('rot', '0') != '0' or frame.get('flipV') in ('1', 'true'):
        return 'a shape is rotated'
  kinds = [one.get('type') for one in tree.iter(P + 'ph')]
  if sum(kind in TITLES for kind in kinds) != 1:
    return 'there is not exactly one title'
  layout = slide.slide_layout
  for one in (layout, layout.slide_master):
    for element in one.shapes._spTree:
      if element.tag not in IGNORED and element.find(f'*/{P}nvPr/{P}ph') is None:
        return 'the layout shows more than placeholders'
  return settings.moved(slide)


def plain(slide):
  """A slide of text alone: no picture or chart says more."""
  tree, ground = slide.shapes._spTree, _background(slide)
  kinds = {element.tag for element in tree} - IGNORED
  if kinds != {P + 'sp'} or next(tree.iter(A + 'blip'), None) is not None:
    return 'it shows more than text'
  if ground is not None and _colour(slide, ground) is None:
    return 'the background is not one colour'
  return ''


def _styles(shape, level):
  """Run properties that apply to a shape's text, most special first."""
  path, one = f'{A}lvl{level + 1}pPr/{A}defRPr', shape
  while one is not None:
    body = one._element.find(P + 'txBody')
    found = None if body is None else body.find(f'{A}lstStyle/{path}')
    if found is not None:
      yield found
    one = getattr(one, '_base_placeholder', None) if one.is_placeholder else None
  master = shape.part.slide_layout.slide_master._element
  kind = 'otherStyle'
  if shape.is_placeholder:
    mark = shape._element.find(f'.//{P}ph').get('type', 'obj')
    kind = 'titleStyle' if mark in TITLES else 'bodyStyle'
  found = master.find(f'{P}txStyles/{P}{kind}/{path}')
  if found is not None:
    yield found


def runs(shape):
  """(text, points, run properties) of each run or field, by paragraph."""
  body = shape._element.find(P + 'txBody')
  scale = body.find(f'{A}bodyPr/{A}normAutofit')
  share = 1.0 if scale is None else _share(scale.get('fontScale', '100000'))
  for paragraph in body.findall(A + 'p'):
    own, found = paragraph.find(A + 'pPr'), []
    styles = list(_styles(shape, 0 if own is None else int(own.get('lvl', 0))))
    for run in paragraph:
      if run.tag not in (A + 'r', A + 'fld'):
        continue
      chain = [p for p in (run.find(A + 'rPr'), *styles) if p is not None]
      size = next((p.get('sz') for p in chain if p.get('sz')), None)
      points = DEFAULT_POINTS if size is None else int(size) / 100
      found.append((run.findtext(A + 't') or '', points * share, chain))
    yield found


def _share(text):
  return float(text[:-1]) / 100 if text.endswith('%') else int(text) / 100000


def wraps(shape):
  """Whether the lines of a shape's text are broken at its width."""
  body = shape._element.find(f'{P}txBody/{A}bodyPr')
  return body is None or body.get('wrap', 'square') != 'none'


def contrast(slide, shape):
  """Text and what is behind it differ."""
  behind = _fill(shape._element.find(P + 'spPr'))
  if behind is None or behind.tag == A + 'noFill':
    behind = _background(slide)
  ground = _colour(slide, behind) if behind is not None else 'FFFFFF'
  if ground is None:
    return 'text is not on a plain colour'
  for text, _, chain in (run for paragraph in runs(shape) for run in paragraph):
    if not text.strip():
      continue
    fill = next((f for f in map(_fill, chain) if f is not None), None)
    colour = '000000' if fill is None else _colour(slide, fill)
    if colour is None or _ratio(colour, ground) < MIN_CONTRAST:
      return f'{text.strip()[:30]!r} cannot be read on its background'
  return ''


def _fill(properties):
  """The fill of run or shape properties, None if there is none."""
  names = () if properties is None else FILLS
  return next((f for n in names if (f := properties.find(A + n)) is not None), None)


def _background(slide):
  layout = slide.slide_layout
  for one in (slide, layout, layout.slide_master):
    ground = one._element.find(f'{P}cSld/{P}bg')
    if ground is not None:
      plain = ground.find(P + 'bgPr')
      return ground.find(P + 'bgRef') if plain is None else _fill(plain)
  return None


def _colour(slide, fill):
  """RGB of a plain, opaque fill; None if it is not one."""
  if fill.tag not in (A + 'solidFill', P + 'bgRef') or not len(fill):
    return None
  one = fill[0]
  changes = {e.tag.rpartition('}')[2]: _share(e.get('val', '0')) for e in one}
  if changes.pop('alpha', 1.0) < 0.5 or set(changes) - {'lumMod', 'lumOff'}:
    return None
  name = one.tag.rpartition('}')[2]
  named = {'srgbClr': one.get('val'), 'sysClr': one.get('lastClr')}
  named['prstClr'] = _PRESET.get(one.get('val'))
  found = _scheme(slide, one) if name == 'schemeClr' else named.get(name)
  return found if found is None or not changes else _brighter(found, **changes)


def _brighter(colour, lumMod=1.0, lumOff=0.0):  # noqa: N803  (names of the format)
  """A colour whose HSL luminance is scaled and moved (ISO/IEC 29500-1, 20.1.2.3)."""
  hue, light, saturation = colorsys.rgb_to_hls(*_parts(colour))
  light = min(1.0, max(0.0, light * lumMod + lumOff))
  rgb = colorsys.hls_to_rgb(hue, light, saturation)
  return ''.join(f'{round(255 * c):02X}' for c in rgb)


def _scheme(slide, one):
  from lxml import etree

  master = slide.slide_layout.slide_master
  name = one.get('val')
  name = master._element.find(P + 'clrMap').get(name, name)
  parts = [r.target_part for r in master.part.rels.values() if not r.is_external]
  theme = next((p for p in parts if p.content_type.endswith('theme+xml')), None)
  parser = etree.XMLParser(resolve_entities=False, no_network=True)
  root = None if theme is None else etree.fromstring(theme.blob, parser)
  found = None if root is None else root.find(f'.//{A}clrScheme/{A}{name}')
  if found is None or not len(found):
    return None
  return (
    found[0].get('val') if found[0].tag == A + 'srgbClr' else found[0].get('lastClr')
  )


def _ratio(one, other):
  """WCAG's contrast of two colours, 1 to 21."""
  light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
  return (light + 0.05) / (dark + 0.05)


def _luminance(colour):
  linear = [
    c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _parts(colour)
  ]
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _parts(colour):
  return [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]


def chart(slide, shape, deck, values):
  """A chart shows its data: large, on plain axes, with no text that says others."""
  import guard

  root = shape.chart._chartSpace
  if (
    shape.width * shape.height < MIN_CHART_SHARE * deck.slide_width * deck.slide_height
  ):
    return 'the chart is small'
  for one in root.iterfind(f'{C}chart/{C}plotArea/{C}layout/{C}manualLayout/*'):
    size = one.tag in (C + 'w', C + 'h') and float(one.get('val', '0'))
    if size is not False and size < MIN_PLOT_SHARE:
      return 'the chart is small'
  if not all(_drawn(slide, root, s) for n in ('ser', 'dPt') for s in root.iter(C + n)):
    return 'the series of the chart is not drawn'
  formats = [one.get('formatCode', '') for one in root.iter(C + 'numFmt')]
  formats += [one.text or '' for one in root.iter(C + 'formatCode')]
  replaced = any(one.find(C + 'tx') is not None for one in root.iter(C + 'dLbl'))
  if replaced or not all(map(guard.shows, formats)):
    return 'labels of the chart are not its values'
  for one in root.iter(C + 'scaling'):
    low, high = one.find(C + 'min'), one.find(C + 'max')
    if low is not None and float(low.get('val')) > min(values):
      return 'an axis of the chart begins above a value'
    if high is not None and float(high.get('val')) < max(values):
      return 'an axis of the chart ends below a value'
  return _axes(root) or _words(root)


def _axes(root):
  """Axes are linear, begin at their lower end and are labelled in units of one.

  Categories of horizontal bars may run downwards, which is the order of reading.
  """
  downwards = root.find(f'.//{C}barDir[@val="bar"]') is not None
  for axis in (one.getparent() for one in root.iter(C + 'scaling')):
    kind, values = axis.tag, axis.tag == C + 'valAx'
    if axis.find(f'{C}scaling/{C}logBase') is not None:
      return 'an axis of the chart is logarithmic'
    if axis.find(f'{C}scaling/{C}orientation[@val="maxMin"]') is not None:
      if values or not downwards:
        return 'an axis of the chart is reversed'
    if axis.find(C + 'dispUnits') is not None:
      return 'an axis of the chart has other units'
    if kind not in (C + 'catAx', C + 'dateAx', C + 'valAx'):
      return 'an axis of the chart is of no kind that is allowed'
    ends = axis.find(C + 'crossesAt'), axis.find(f'{C}crosses[@val="max"]')
    if not values and any(one is not None for one in ends):
      return 'an axis of the chart is reversed'
  return ''


def _words(root):
  """Titles and names in a chart state nothing that its data could contradict."""
  if root.find(f'.//{C}userShapes') is not None:
    return 'shapes are drawn on the chart'
  texts = [one.text or '' for one in root.iter(A + 't', C + 'name')]
  for one in root.iter(C + 'tx'):
    texts += [v.text or '' for v in one.iter(C + 'v')]
  said = ' '.join(texts).casefold()
  if any(c.isnumeric() for c in said):
    return 'a title or name of the chart has a number'
  words = ' '.join(['', *re.findall(r'\w+', said), ''])
  for one in root.iterfind(f'.//{C}cat//{C}v'):
    if f' {(one.text or "").casefold()} ' in words:
      return f'a title or name of the chart says {one.text[:60]}'
  return ''


def _drawn(slide, root, series):
  """Whether a series or a point of it has a plain colour that is not the ground's."""
  properties = series.find(C + 'spPr')
  if properties is None:
    return True
  fills = [_fill(properties)]
  kind = series.getparent()
  if C + 'barChart' not in (kind.tag, kind.getparent().tag):  # its line is the data
    fills.append(_fill(properties.find(A + 'ln')))
  grounds = [root.find(f'{C}chart/{C}plotArea/{C}spPr'), root.find(C + 'spPr')]
  grounds = [
    f for g in grounds if (f := _fill(g)) is not None and f.tag != A + 'noFill'
  ]
  ground = (grounds or [_background(slide)])[0]
  behind = 'FFFFFF' if ground is None else _colour(slide, ground)
  colours = [_colour(slide, fill) for fill in fills if fill is not None]
  return behind is not None and all(
    one is not None and _ratio(one, behind) >= MIN_SERIES_CONTRAST for one in colours
  )


def source(found):
  """(categories, values) of the workbook that a chart refers to; a text if none."""
  import guard
  import openpyxl

  part = found.part.chart_workbook.xlsx_part
  if part is None:
    return 'the chart has no workbook'
  if reason := guard.check(part.blob):
    return f'the workbook of the chart is refused: {reason}'
  book = openpyxl.load_workbook(io.BytesIO(part.blob), data_only=True)
  series = next(found._chartSpace.iter(C + 'ser'))
  columns = []
  for tag in ('cat', 'val'):
    formulas = [f.text or '' for f in series.findall(f'{C}{tag}/*/{C}f')]
    sheet, _, area = (formulas or [''])[0].rpartition('!')
    sheet = sheet.strip("'")
    if sheet not in book.sheetnames or ':' not in area:
      return 'the chart refers to no cells'
    cells = book[sheet][area.replace('$', '')]
    columns.append([cell.value for row in cells for cell in row])
  return columns[0], columns[1]
