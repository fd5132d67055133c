"""What the text of a deck shows: its characters, sizes and colours.

Sizes and colours come from the run, its shape, the placeholder of the layout and of the
master, the shape's reference to the theme, and the master's styles, in this order
(ISO/IEC 29500-1, 21.1.2.4). Text must be on a plain colour with a contrast of at least
`MIN_CONTRAST` (WCAG 2.1's ratio). `parts` has refused decks with anything that these
functions do not know. Each check returns '' or what is wrong.
"""

import colorsys
import re
import unicodedata

from contrast import channels, linear, ratio

A = '{http://schemas.openxmlformats.org/drawingml/2006/main}'
C = '{http://schemas.openxmlformats.org/drawingml/2006/chart}'
P = '{http://schemas.openxmlformats.org/presentationml/2006/main}'
IGNORED = {P + name for name in ('nvGrpSpPr', 'grpSpPr')}
FILLS = ('noFill', 'solidFill')
TITLES = ('title', 'ctrTitle')
SHOWN = (*TITLES, 'subTitle', 'body', 'obj', 'dt', 'ftr', 'sldNum')
MIN_CONTRAST, DEFAULT_POINTS = 2.0, 18.0
_PRESET = {'black': '000000', 'white': 'FFFFFF'}
_STRANGE = re.compile(
  '[^ -^`-~\n\v\xa0\xa3\xb0\xb7\xc0-\xd6\xd8-\xf6\xf8-\xff–—‘’“”•…€]'
)


def strange(text):
  """A character that is neither of Latin-1's letters nor common punctuation."""
  found = _STRANGE.search(text)
  return f'the character {ascii(found[0])} is not allowed' if found else ''


def says(text, names):
  """The first name that is a word of a text or a part of one."""
  plain = unicodedata.normalize('NFKD', text.casefold())
  letters = ''.join(c for c in plain if not unicodedata.combining(c))
  words = re.findall('[a-z]+', letters)
  return next((n for n in names if any(n.casefold() in w for w in words)), '')


def placeholders(slide):
  """A slide has one title, and placeholders that its layout has."""
  kinds = [_mark(one) for one in slide.shapes._spTree.iter(P + 'ph')]
  if sum(kind in TITLES for kind, _ in kinds) != 1:
    return 'there is not exactly one title'
  layout = {_mark(one) for one in slide.slide_layout.shapes._spTree.iter(P + 'ph')}
  others = [kind for kind in kinds if kind not in layout]
  if others:
    return f'its layout has no placeholder {others[0]}'
  for one in slide.placeholders:
    kind = _mark(one._element.find(f'.//{P}ph'))[0]
    if one.has_text_frame and one.text_frame.text.strip() and kind not in SHOWN:
      return f'text in a placeholder for another content ({kind}) is not shown'
  return ''


def _mark(placeholder):
  return placeholder.get('type', 'obj'), placeholder.get('idx', '0')


def plain(slide):
  """A slide of text alone: no picture or chart says more."""
  tree, ground = slide.shapes._spTree, background(slide)
  if {element.tag for element in tree} - IGNORED != {P + 'sp'}:
    return 'it shows more than text'
  if ground is not None and colour(slide, ground) is None:
    return 'the background is not one colour'
  return ''


def _styles(shape, level):
  """Paragraph properties that apply to a shape's text, most special first."""
  path, one = f'{A}lvl{level + 1}pPr', shape
  while one is not None:
    body = one._element.find(P + 'txBody')
    found = None if body is None else body.find(f'{A}lstStyle/{path}')
    if found is not None:
      yield found
    one = getattr(one, '_base_placeholder', None) if one.is_placeholder else None
  reference = shape._element.find(f'{P}style/{A}fontRef')
  if reference is not None:
    yield reference
  master = shape.part.slide_layout.slide_master._element
  kind = 'otherStyle'
  if shape.is_placeholder:
    mark = shape._element.find(f'.//{P}ph').get('type', 'obj')
    kind = 'titleStyle' if mark in TITLES else 'bodyStyle'
  found = master.find(f'{P}txStyles/{P}{kind}/{path}')
  if found is not None:
    yield found


def paragraphs(shape):
  """(runs, paragraph properties) of each paragraph, the most special first.

  A run is (text, points, run properties); a line break is a run of '\\v', and the end
  of a paragraph one of ''.
  """
  body = shape._element.find(P + 'txBody')
  scale = body.find(f'{A}bodyPr/{A}normAutofit')
  share = 1.0 if scale is None else int(scale.get('fontScale', '100000')) / 100000
  for paragraph in body.findall(A + 'p'):
    own, found = paragraph.find(A + 'pPr'), []
    styles = list(_styles(shape, 0 if own is None else int(own.get('lvl', 0))))
    inherited = [
      one if one.tag == A + 'fontRef' else one.find(A + 'defRPr') for one in styles
    ]
    texts = {A + 'r': None, A + 'br': '\v', A + 'endParaRPr': ''}
    last = paragraph.find(A + 'endParaRPr')
    for run in (*paragraph, *([paragraph] if last is None else [])):
      text = texts.get(run.tag, '')
      if run.tag == A + 'pPr':
        continue
      properties = run if run.tag == A + 'endParaRPr' else run.find(A + 'rPr')
      chain = [p for p in (properties, *inherited) if p is not None]
      size = next((p.get('sz') for p in chain if p.get('sz')), None)
      points = DEFAULT_POINTS if size is None else int(size) / 100
      text = run.findtext(A + 't') or '' if text is None else text
      found.append((text, points * share, chain))
    yield found, [one for one in (own, *styles) if one is not None]


def contrast(slide, shape):
  """Text and what is behind it differ."""
  behind = fill(shape._element.find(P + 'spPr'))
  reference = shape._element.find(f'{P}style/{A}fillRef')
  if behind is None and reference is not None and reference.get('idx') != '0':
    return f'{shape.name} needs a plain colour of its own behind its text'
  if behind is None or behind.tag == A + 'noFill':
    behind = background(slide)
  ground = colour(slide, behind) if behind is not None else 'FFFFFF'
  if ground is None:
    return 'text is not on a plain colour'
  for text, _, chain in (run for runs, _ in paragraphs(shape) for run in runs):
    if not text.strip():
      continue
    own = next((f for f in map(fill, chain) if f is not None), None)
    ink = '000000' if own is None else colour(slide, own)
    if ink is None or ratio(ink, ground) < MIN_CONTRAST:
      return f'{text.strip()[:30]!r} cannot be read on its background'
  return ''


def fill(properties):
  """The fill of run or shape properties, None if there is none."""
  if properties is not None and properties.tag == A + 'fontRef':
    return properties if len(properties) else None
  names = () if properties is None else FILLS
  return next((f for n in names if (f := properties.find(A + n)) is not None), None)


def background(slide):
  layout = slide.slide_layout
  for one in (slide, layout, layout.slide_master):
    ground = one._element.find(f'{P}cSld/{P}bg')
    if ground is not None:
      own = ground.find(P + 'bgPr')
      return ground.find(P + 'bgRef') if own is None else fill(own)
  return None


def colour(slide, found):
  """RGB of a plain, opaque fill; None if it is not one."""
  if found.tag == A + 'noFill' or not len(found):
    return None
  one = found[0]
  changes = {e.tag.rpartition('}')[2]: int(e.get('val', '0')) / 100000 for e in one}
  kind = one.tag.rpartition('}')[2]
  named = {'srgbClr': one.get('val'), 'sysClr': one.get('lastClr')}
  named['prstClr'] = _PRESET.get(one.get('val'))
  rgb = scheme(slide, one.get('val')) if kind == 'schemeClr' else named.get(kind)
  if rgb is None or set(changes) - {'lumMod', 'lumOff', 'tint'}:
    return None
  rgb = _tinted(rgb, changes.pop('tint', 1.0))
  return _brighter(rgb, **changes) if changes else rgb


def _tinted(rgb, share):
  """A colour mixed with white in linear RGB (ISO/IEC 29500-1, 20.1.2.3.34)."""
  if share == 1:
    return rgb
  mixed = [share * c + 1 - share for c in linear(rgb)]
  back = [
    12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in mixed
  ]
  return ''.join(f'{round(255 * c):02X}' for c in back)


def _brighter(rgb, lumMod=1.0, lumOff=0.0):  # noqa: N803  (names of the format)
  """A colour whose HSL luminance is scaled and moved (ISO/IEC 29500-1, 20.1.2.3)."""
  hue, light, saturation = colorsys.rgb_to_hls(*channels(rgb))
  light = min(1.0, max(0.0, light * lumMod + lumOff))
  back = colorsys.hls_to_rgb(hue, light, saturation)
  return ''.join(f'{round(255 * c):02X}' for c in back)


def scheme(slide, name):
  """RGB of a colour of the theme."""
  from lxml import etree

  master = slide.slide_layout.slide_master
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
