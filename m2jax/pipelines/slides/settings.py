"""Settings of text that move it out of its shape, or make it unreadable.

Attributes of DrawingML (ISO/IEC 29500-1, 21.1.2) of a slide, its layout and its master:
rotation, insets, indents, spacing, strikes. Each has bounds that ordinary decks keep,
and is checked wherever it is, also where no text inherits it. Lengths are in EMU,
spacing in hundredths of a point, shares in thousandths of a percent.
"""

import re

A = '{http://schemas.openxmlformats.org/drawingml/2006/main}'
_INCH, _POINT = 914400, 100
_LEVEL = re.compile(r'lvl[2-9]pPr')
_INSETS = ('lIns', 'tIns', 'rIns', 'bIns')
# Kind of element → attribute → lowest and highest value.
_BOUNDS = {
  'bodyPr': {'rot': (0, 0), **dict.fromkeys(_INSETS, (0, _INCH // 2))},
  'pPr': {
    **{'marL': (0, _INCH), 'marR': (0, _INCH), 'indent': (-_INCH // 2, _INCH // 2)},
    'lvl': (0, 4),
  },
  'level': {
    **{'marL': (0, 5 * _INCH), 'marR': (0, _INCH)},
    'indent': (-_INCH // 2, _INCH // 2),
  },
  'rPr': {'spc': (-_POINT, 6 * _POINT), 'baseline': (0, 0)},
  'spcPts': {'val': (0, 72 * _POINT)},
  'spcPct': {'val': (0, 300_000)},
}
_WORDS = {
  'bodyPr': {'vert': ('horz',)},
  'rPr': {'strike': ('noStrike',)},
  'prstTxWarp': {'prst': ('textNoShape',)},
}
_SAME = {'lvl1pPr': 'pPr', 'defRPr': 'rPr', 'endParaRPr': 'rPr'}
_MIN_LINE = {'spcPts': 10 * _POINT, 'spcPct': 80_000}


def moved(slide):
  """'' or the first setting that is out of bounds."""
  layout = slide.slide_layout
  for part in (slide, layout, layout.slide_master):
    for element in part._element.iter(A + '*'):
      if reason := _wrong(element):
        return f'text is moved or changed: {reason}'
  return ''


def _wrong(element):
  name = element.tag.rpartition('}')[2]
  kind = 'level' if _LEVEL.fullmatch(name) else _SAME.get(name, name)
  if kind == 'scene3d':
    return name
  for attribute, (low, high) in _BOUNDS.get(kind, {}).items():
    value = element.get(attribute)
    if value is None:
      continue
    if element.getparent().tag == A + 'lnSpc':
      low = _MIN_LINE[name]
    if not re.fullmatch(r'-?\d{1,9}', value) or not low <= int(value) <= high:
      return f'{name} {attribute}={value[:20]}'
  for attribute, words in _WORDS.get(kind, {}).items():
    if element.get(attribute, words[0]) not in words:
      return f'{name} {attribute}={element.get(attribute)[:20]}'
  return ''
