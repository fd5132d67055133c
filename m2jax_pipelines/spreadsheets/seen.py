"""What hides a required cell, or shows another value than it has.

`parts(data)` and `cell(book, sheet, cell)` return '' or a reason. Colours are resolved
through the theme and the palette of the workbook itself.
"""

import colorsys
import io
import re
import zipfile

from contrast import channels, ratio

MIN_CONTRAST, MIN_POINTS, MIN_HEIGHT, MIN_WIDTH, MIN_ZOOM = 2, 6, 6, 2, 40
MAX_INDENT = 5
A = '{http://schemas.openxmlformats.org/drawingml/2006/main}'
# The order of a theme's colours in cells, which is not that of the theme's file.
_THEME = 'lt1 dk1 lt2 dk2 accent1 accent2 accent3 accent4 accent5 accent6'.split()
_SYSTEM = {'window': 'FFFFFF', 'windowText': '000000'}
_DRAWN = re.compile(rb'<(?:[^\s<>/:]+:)?(?:drawing|legacyDrawing|picture)\b')
_FONT = re.compile('ding|symbol|marlett|mt extra|barcode|blank', re.I)


def parts(data):
  """What the parts of the file contain that covers cells or changes their look."""
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    for name in archive.namelist():
      text = archive.read(name)
      if _DRAWN.search(text):
        return 'it contains a drawing, a picture or a comment, which may cover a cell'
      if b'conditionalFormatting' in text:
        return 'it contains a conditional format'
  return ''


def workbook(book):
  """Settings of a workbook that change what is calculated or when."""
  settings = book.calculation
  if settings.calcMode == 'manual' or settings.fullPrecision is False:
    return 'the workbook is calculated by hand, or with rounded numbers'
  return ''


def cell(book, sheet, found):
  """Why a reader of a required cell does not see its value."""
  return _sheet(sheet) or _place(sheet, found) or _text(book, found)


def _sheet(sheet):
  if sheet.sheet_state != 'visible' or sheet.sheet_format.zeroHeight:
    return 'is hidden'
  if sheet.tables:
    return 'is on a sheet with a table, which has colours of its own'
  for view in sheet.views.sheetView:
    if view.showFormulas:
      return 'is on a sheet that shows formulas'
    if view.showZeros is False:
      return 'is on a sheet that does not show zeros'
    if any(z and z < MIN_ZOOM for z in (view.zoomScale, view.zoomScaleNormal)):
      return 'is shown too small'
    frozen = view.pane is not None and 'frozen' in (view.pane.state or '')
    if frozen and view.topLeftCell not in (None, 'A1'):
      return 'is hidden by frozen rows or columns'
  return ''


def _place(sheet, found):
  """'' if row and column are shown and large enough, or what is wrong."""
  row, size = sheet.row_dimensions[found.row], sheet.sheet_format
  height = size.defaultRowHeight if row.height is None else row.height
  widths = []
  for letter, one in sheet.column_dimensions.items():
    first, last = one.min, one.max
    if first is None or last is None:
      own = letter == found.column_letter
    else:
      own = first <= found.column <= last
    if own and one.hidden:
      return 'is hidden'
    if own and one.width is not None:
      widths.append(one.width)
  if row.hidden:
    return 'is hidden'
  if height is not None and height < MIN_HEIGHT:
    return 'is shown too small'
  width = min(widths) if widths else size.defaultColWidth
  return 'is shown too small' if width is not None and width < MIN_WIDTH else ''


def _text(book, found):
  """Font, alignment, number format, and colours."""
  import guard

  font, place = found.font, found.alignment
  if font.sz is not None and font.sz < MIN_POINTS:
    return 'is shown too small'
  if font.charset == 2 or _FONT.search(font.name or ''):
    return 'has a font of symbols'
  if font.strike:
    return 'is struck out'
  if place.horizontal == 'fill' or (place.indent or 0) > MAX_INDENT:
    return 'has an alignment that hides or repeats its value'
  if not guard.shows(found.number_format):
    return 'has a number format that does not show its value'
  ground = _ground(book, found.fill)
  colours = guard.colours(found.number_format)
  colours.add('000000' if font.color is None else _colour(book, font.color))
  if ground is None or None in colours:
    return 'has a colour that is not plain'
  if min(ratio(colour, ground) for colour in colours) < MIN_CONTRAST:
    return 'has the colour of its background'
  return ''


def _ground(book, fill):
  kind = getattr(fill, 'fill_type', None)
  if kind is None:
    return 'FFFFFF'
  return _colour(book, fill.fgColor) if kind == 'solid' else None


def _colour(book, colour):
  """RGB of a colour of a cell; None if it is of no kind that is known."""
  value = None
  if colour.type == 'rgb' and re.fullmatch('[0-9A-Fa-f]{6,8}', colour.rgb or ''):
    value = colour.rgb[-6:]
  elif colour.type == 'theme':
    value = _of_theme(book, colour.theme)
  elif colour.type == 'indexed':
    palette = book._colors
    known = {64: '000000', 65: 'FFFFFF'}
    index = colour.indexed
    value = palette[index][-6:] if 0 <= index < len(palette) else known.get(index)
  elif colour.type == 'auto':
    value = '000000'
  if value is None or not colour.tint:
    return value
  hue, light, saturation = colorsys.rgb_to_hls(*channels(value))
  tint = max(-1.0, min(1.0, colour.tint))
  light = light * (1 + tint) if tint < 0 else light * (1 - tint) + tint
  rgb = colorsys.hls_to_rgb(hue, light, saturation)
  return ''.join(f'{round(255 * c):02X}' for c in rgb)


def _of_theme(book, index):
  from openpyxl.xml.functions import fromstring

  if not book.loaded_theme or not 0 <= index < len(_THEME):
    return None
  scheme = fromstring(book.loaded_theme).findall(f'.//{A}clrScheme/{A}{_THEME[index]}')
  if len(scheme) != 1 or len(scheme[0]) != 1 or len(scheme[0][0]):
    return None
  one = scheme[0][0]
  if one.tag == A + 'srgbClr':
    value = one.get('val', '')
    return value if re.fullmatch('[0-9A-Fa-f]{6}', value) else None
  return _SYSTEM.get(one.get('val')) if one.tag == A + 'sysClr' else None
