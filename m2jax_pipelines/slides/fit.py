"""Where the text of a deck is: in which order, and whether it fits its shape.

Widths are estimated by three classes of characters, and lines are broken between words.
"""

import look
from look import A, P

LINE_HEIGHT, EMU_PER_POINT = 1.2, 12700
MARGINS = {'lIns': 91440, 'rIns': 91440, 'tIns': 45720, 'bIns': 45720}
_NARROW, _NARROW_WIDTH = set("iIjlftr.,:;'!|()[] -"), 0.3  # of the font size
_WIDE, _WIDE_WIDTH, _WIDTH = set('mwMW@%—…'), 0.9, 0.5
_CAPITAL_WIDTH = 0.65


def in_order(shapes):
  """Shapes as they are read: in rows from above, each from the left."""
  rows = []
  for shape in sorted(shapes, key=lambda s: (s.top, s.left)):
    if rows and shape.top + shape.height / 2 < rows[-1][0].top + rows[-1][0].height:
      rows[-1].append(shape)
    else:
      rows.append([shape])
  return [shape for row in rows for shape in sorted(row, key=lambda s: s.left)]


def _body(shape, attribute, default):
  """An attribute of the text's body, as inherited."""
  one = shape
  while one is not None:
    body = one._element.find(f'{P}txBody/{A}bodyPr')
    if body is not None and body.get(attribute) is not None:
      return body.get(attribute)
    one = getattr(one, '_base_placeholder', None) if one.is_placeholder else None
  return default


def wrong(shape):
  """'' or why not all of a shape's text can be seen in it."""
  if _body(shape, 'vert', 'horz') != 'horz':
    return f'the text of {shape.name} is rotated'
  height = sum(_extra(shape, side) for side in ('tIns', 'bIns'))
  width = shape.width / EMU_PER_POINT - sum(_extra(shape, s) for s in ('lIns', 'rIns'))
  wraps = _body(shape, 'wrap', 'square') != 'none'
  for runs, properties in look.paragraphs(shape):
    left, right, indent = (
      int(_first(properties, one) or 0) for one in ('marL', 'marR', 'indent')
    )
    if shape.left + left + indent < 0:
      return f'the text of {shape.name} begins outside of the slide'
    room = max(1.0, width - (left + right) / EMU_PER_POINT)
    count, tallest, needs = 0, 0.0, 0.0
    share, least = _spacing(properties, 'lnSpc') or (1.0, 0.0)
    for line in _broken(runs):
      count = _lines(line, room)
      if count > 1 and not wraps:
        return f'the text of {shape.name} overflows its width'
      tallest = max(size for _, size, _ in line)
      needs += count * max(least, share * LINE_HEIGHT * tallest)
    for side in ('spcBef', 'spcAft'):
      part, points = _spacing(properties, side) or (0.0, 0.0)
      needs += points + part * tallest
    height += needs
  if height > shape.height / EMU_PER_POINT:
    return f'the text of {shape.name} overflows'
  return ''


def _extra(shape, side):
  """Points of an inset above the usual one, which the estimate allows for."""
  usual = MARGINS[side]
  return max(0, int(_body(shape, side, usual)) - usual) / EMU_PER_POINT


def _broken(runs):
  """Runs of each line of a paragraph, by its line breaks."""
  lines = [[]]
  for text, size, chain in runs:
    if text == '\v':
      lines[-1].append(('', size, chain))
      lines.append([])
    elif text or not lines[-1]:
      lines[-1].append((text, size, chain))
  return lines


def _lines(runs, room):
  """The number of lines of a width that runs of text need."""
  count, used, word = 1, 0.0, 0.0
  for text, size, chain in runs:
    spaced = max(0.0, int(_first(chain, 'spc') or 0) / 100)
    for c in text.upper() if _first(chain, 'cap') == 'all' else text:
      width = size * _width(c) + spaced
      if c.isspace():
        used, word = used + word + width, 0.0
        continue
      if used and used + word + width > room:
        count, used = count + 1, 0.0
      word += width
      if word > room:
        count, word = count + 1, width
  return count


def _width(c):
  if c in _WIDE:
    return _WIDE_WIDTH
  if c in _NARROW:
    return _NARROW_WIDTH
  return _CAPITAL_WIDTH if c.isupper() else _WIDTH


def _first(properties, attribute):
  return next((p.get(attribute) for p in properties if p.get(attribute)), None)


def _spacing(properties, tag):
  """(share of the text's size, points) of the first of such settings, or None."""
  found = (one.find(f'{A}{tag}') for one in properties)
  one = next((f for f in found if f is not None), None)
  if one is None or not len(one):
    return None
  value = int(one[0].get('val', '0'))
  return (value / 100000, 0.0) if one[0].tag == A + 'spcPct' else (0.0, value / 100)
