"""What slides and charts may consist of: elements, their attributes and children.

`SLIDE` and `CHART` have what python-pptx writes for text, pictures and plain charts
(ISO/IEC 29500-1: PresentationML 19, DrawingML 21.1, charts 21.2); `wrong` names the
first thing that they do not have. A value is a pattern or the lowest and the highest
number. An attribute with '!' is required, since many attributes of charts are true by
default. Lengths are in EMU, sizes and spacing in hundredths of a point, shares in
thousandths of a percent, angles in 60,000ths of a degree.
"""

import re

NAMESPACES = {
  'http://schemas.openxmlformats.org/drawingml/2006/main': 'a:',
  'http://schemas.openxmlformats.org/drawingml/2006/chart': 'c:',
  'http://schemas.openxmlformats.org/presentationml/2006/main': 'p:',
  'http://schemas.openxmlformats.org/officeDocument/2006/relationships': 'r:',
}
FONTS = (
  'Aptos|Aptos Display|Arial|Arial Black|Arial Narrow|Avenir|Avenir Next|Bahnschrift|'
  'Baskerville|Book Antiqua|Bookman Old Style|Calibri|Calibri Light|Cambria|Candara|'
  'Carlito|Century|Century Gothic|Comic Sans MS|Consolas|Constantia|Corbel|'
  'Courier New|DejaVu Sans|DejaVu Serif|Franklin Gothic Book|Futura|Garamond|Georgia|'
  'Gill Sans MT|Helvetica|Helvetica Neue|Impact|Inter|Lato|Liberation Sans|'
  'Liberation Serif|Lucida Sans|Montserrat|Noto Sans|Noto Serif|Open Sans|'
  'Palatino Linotype|Poppins|Raleway|Roboto|Rockwell|Segoe UI|Segoe UI Light|'
  'Segoe UI Semibold|Source Sans Pro|Tahoma|Times New Roman|Trebuchet MS|Ubuntu|'
  'Verdana|[+]m[jn]-(lt|ea|cs)'
)
FORMATS = r'General|general|@|0|#|#,##0|#,##0\.0+|0\.0{1,4}|#\.#+'
ANY, FLAG, ID = '(?s:.*)', '0|1|true|false', r'-?\d{1,10}'
OFF, ON = '0|false', '1|true'
INCH, POINT = 914400, 100
_SCHEME = 'bg[12]|tx[12]|dk[12]|lt[12]|accent[1-6]|hlink|folHlink'
_LINE = (0, 6 * 12700)
_COLOURS = 'a:srgbClr a:schemeClr a:prstClr a:sysClr'
_FILLS = 'a:noFill a:solidFill'
_LEVELS = ' '.join(f'a:lvl{i}pPr' for i in range(1, 10))
_SPACING = 'a:lnSpc a:spcBef a:spcAft'
_BULLETS = 'a:buClr a:buSzPct a:buFont a:buNone a:buChar'
_FONTS = 'a:latin a:ea a:cs'
_FONT = {
  'typeface': FONTS + '|',
  **{'panose': '[0-9A-Fa-f]{20}', 'pitchFamily': ID, 'charset': '0|-?[2-9][0-9]?'},
}
_PARAGRAPH = {
  **{'marL': (0, INCH), 'marR': (0, INCH), 'indent': (-INCH // 2, INCH // 2)},
  **{'lvl': (0, 4), 'algn': 'l|ctr|r|just', 'rtl': OFF, 'defTabSz': (0, INCH)},
  **{'eaLnBrk': FLAG, 'latinLnBrk': FLAG, 'hangingPunct': FLAG},
  'fontAlgn': 'auto|base',
}
_LEVEL = {**_PARAGRAPH, 'marL': (0, 5 * INCH)}
_RUN = {
  **{'lang': ANY, 'altLang': ANY, 'dirty': FLAG, 'smtClean': FLAG, 'err': OFF},
  **{'noProof': FLAG, 'b': FLAG, 'i': FLAG, 'u': 'none|sng|dbl', 'kern': (0, 400000)},
  **{'sz': (100, 40000), 'strike': 'noStrike', 'baseline': '0', 'cap': 'none|all'},
  'spc': (-POINT, 6 * POINT),
}
_VALUE = ({'!val': (-(2**32), 2**32)}, '', '')

# Element → (attributes, children once, children any number of times).
_DRAWING = {
  'a:xfrm': ({'rot': '0', 'flipH': OFF, 'flipV': OFF}, 'a:off a:ext', ''),
  'a:off': ({'x': ID, 'y': ID}, '', ''),
  'a:ext': ({'cx': ID, 'cy': ID}, '', ''),
  'a:prstGeom': ({'prst': 'rect|roundRect'}, 'a:avLst', ''),
  'a:avLst': ({}, 'a:gd', ''),
  'a:gd': ({'name': 'adj', 'fmla': r'val \d{1,5}'}, '', ''),
  'a:noFill': ({}, '', ''),
  'a:solidFill': ({}, _COLOURS, ''),
  'a:srgbClr': ({'val': '[0-9A-Fa-f]{6}'}, 'a:lumMod a:lumOff', ''),
  'a:schemeClr': ({'val': _SCHEME}, 'a:lumMod a:lumOff', ''),
  'a:prstClr': ({'val': 'black|white'}, '', ''),
  'a:sysClr': ({'val': 'window|windowText', 'lastClr': '[0-9A-Fa-f]{6}'}, '', ''),
  'a:lumMod': ({'val': (0, 100000)}, '', ''),
  'a:lumOff': ({'val': (0, 100000)}, '', ''),
  'a:effectLst': ({}, '', ''),
  'a:ln': (
    {'w': _LINE, 'cap': 'flat|rnd|sq', 'cmpd': 'sng', 'algn': 'ctr'},
    f'{_FILLS} a:prstDash a:round a:bevel a:miter',
    '',
  ),
  'a:prstDash': ({'val': r'\w{1,20}'}, '', ''),
  'a:round': ({}, '', ''),
  'a:bevel': ({}, '', ''),
  'a:miter': ({'lim': (0, 1_000_000)}, '', ''),
  'a:lstStyle': ({}, f'a:defPPr {_LEVELS}', ''),
  'a:p': ({}, 'a:pPr a:endParaRPr', 'a:r a:br'),
  'a:r': ({}, 'a:rPr a:t', ''),
  'a:br': ({}, 'a:rPr', ''),
  'a:t': ({}, '', ''),
  'a:pPr': (_PARAGRAPH, f'{_SPACING} {_BULLETS} a:defRPr', ''),
  'a:lnSpc': ({}, 'a:spcPct a:spcPts', ''),
  'a:spcBef': ({}, 'a:spcPct a:spcPts', ''),
  'a:spcAft': ({}, 'a:spcPct a:spcPts', ''),
  'a:spcPct': ({'val': (0, 300_000)}, '', ''),
  'a:spcPts': ({'val': (0, 72 * POINT)}, '', ''),
  'a:buClr': ({}, _COLOURS, ''),
  'a:buSzPct': ({'val': (25000, 100000)}, '', ''),
  'a:buFont': (_FONT, '', ''),
  'a:buNone': ({}, '', ''),
  'a:buChar': ({'char': '[•–—*▪■◦○●›»‣►-]'}, '', ''),
  **dict.fromkeys(
    ('a:rPr', 'a:endParaRPr', 'a:defRPr'), (_RUN, f'{_FILLS} {_FONTS}', '')
  ),
  **dict.fromkeys(_FONTS.split(), (_FONT, '', '')),
  **dict.fromkeys(
    ('a:defPPr', *_LEVELS.split()),
    (_LEVEL, f'{_SPACING} {_BULLETS} a:defRPr', ''),
  ),
}
_PROPERTIES = f'a:xfrm a:prstGeom {_FILLS} a:ln a:effectLst'
_REFERENCE = ({'idx': (0, 3)}, _COLOURS, '')
SLIDE = {
  **_DRAWING,
  'p:sld': ({'show': ON, 'showMasterSp': FLAG}, 'p:cSld p:clrMapOvr', ''),
  'p:cSld': ({'name': ANY}, 'p:bg p:spTree', ''),
  'p:bg': ({}, 'p:bgPr', ''),
  'p:bgPr': ({}, f'{_FILLS} a:effectLst', ''),
  'p:clrMapOvr': ({}, 'a:masterClrMapping', ''),
  'a:masterClrMapping': ({}, '', ''),
  'p:spTree': ({}, 'p:nvGrpSpPr p:grpSpPr', 'p:sp p:pic p:graphicFrame'),
  'p:nvGrpSpPr': ({}, 'p:cNvPr p:cNvGrpSpPr p:nvPr', ''),
  'p:cNvGrpSpPr': ({}, '', ''),
  'p:grpSpPr': ({}, '', ''),
  'p:sp': ({}, 'p:nvSpPr p:spPr p:style p:txBody', ''),
  'p:nvSpPr': ({}, 'p:cNvPr p:cNvSpPr p:nvPr', ''),
  'p:cNvPr': (
    {'id': ID, 'name': ANY, 'descr': ANY, 'title': ANY, 'hidden': OFF},
    '',
    '',
  ),
  'p:cNvSpPr': ({'txBox': FLAG}, 'a:spLocks', ''),
  'a:spLocks': ({}, '', ''),
  'p:nvPr': ({}, 'p:ph', ''),
  'p:ph': (
    {
      'type': r'\w+',
      'idx': ID,
      'sz': r'\w+',
      'orient': 'horz',
      'hasCustomPrompt': FLAG,
    },
    '',
    '',
  ),
  'p:spPr': ({}, _PROPERTIES, ''),
  'p:style': ({}, 'a:lnRef a:fillRef a:effectRef a:fontRef', ''),
  'a:lnRef': _REFERENCE,
  'a:fillRef': _REFERENCE,
  'a:effectRef': _REFERENCE,
  'a:fontRef': ({'idx': 'major|minor|none'}, _COLOURS, ''),
  'p:txBody': ({}, 'a:bodyPr a:lstStyle', 'a:p'),
  'a:bodyPr': (
    {
      **{'rot': '0', 'vert': 'horz', 'wrap': 'square|none', 'numCol': '1'},
      **dict.fromkeys(('lIns', 'tIns', 'rIns', 'bIns'), (0, INCH // 2)),
      **{'anchor': 't|ctr|b', 'anchorCtr': FLAG, 'rtlCol': OFF, 'upright': OFF},
    },
    'a:normAutofit a:spAutoFit a:noAutofit',
    '',
  ),
  'a:normAutofit': (
    {'fontScale': (1000, 100000), 'lnSpcReduction': (0, 20000)},
    '',
    '',
  ),
  'a:spAutoFit': ({}, '', ''),
  'a:noAutofit': ({}, '', ''),
  'p:pic': ({}, 'p:nvPicPr p:blipFill p:spPr', ''),
  'p:nvPicPr': ({}, 'p:cNvPr p:cNvPicPr p:nvPr', ''),
  'p:cNvPicPr': ({'preferRelativeResize': FLAG}, 'a:picLocks', ''),
  'a:picLocks': ({}, '', ''),
  'p:blipFill': ({'rotWithShape': FLAG}, 'a:blip a:srcRect a:stretch', ''),
  'a:blip': ({'r:embed': ANY}, '', ''),
  'a:srcRect': (dict.fromkeys('ltrb', (0, 100000)), '', ''),
  'a:stretch': ({}, 'a:fillRect', ''),
  'a:fillRect': ({}, '', ''),
  'p:graphicFrame': ({}, 'p:nvGraphicFramePr p:xfrm a:graphic', ''),
  'p:nvGraphicFramePr': ({}, 'p:cNvPr p:cNvGraphicFramePr p:nvPr', ''),
  'p:cNvGraphicFramePr': ({}, 'a:graphicFrameLocks', ''),
  'a:graphicFrameLocks': ({}, '', ''),
  'p:xfrm': ({'rot': '0', 'flipH': OFF, 'flipV': OFF}, 'a:off a:ext', ''),
  'a:graphic': ({}, 'a:graphicData', ''),
  'a:graphicData': ({'uri': '.*/drawingml/2006/chart'}, 'c:chart', ''),
  'c:chart': ({'r:id': ANY}, '', ''),
}
_TEXT = ({}, 'a:bodyPr a:lstStyle', 'a:p')
_TICKS = ({'!val': 'none|out|in|cross'}, '', '')
_AXIS = (
  'c:axId c:scaling c:delete c:axPos c:majorGridlines c:minorGridlines c:title '
  'c:numFmt c:majorTickMark c:minorTickMark c:tickLblPos c:spPr c:txPr c:crossAx '
  'c:crosses '
)
_SHOWN = (
  'c:showLegendKey c:showVal c:showCatName c:showSerName c:showPercent '
  'c:showBubbleSize c:showLeaderLines c:numFmt c:spPr c:txPr c:dLblPos c:delete '
)
_LINED = ({}, 'c:spPr', '')
CHART = {
  **_DRAWING,
  'c:chartSpace': (
    {},
    'c:date1904 c:roundedCorners c:style c:chart c:spPr c:txPr c:externalData',
    '',
  ),
  **dict.fromkeys(
    (
      *('c:date1904', 'c:roundedCorners', 'c:delete', 'c:overlay', 'c:bubble3D'),
      *('c:showPercent', 'c:showBubbleSize', 'c:showDLblsOverMax'),
    ),
    ({'!val': OFF}, '', ''),
  ),
  **dict.fromkeys(
    (
      *('c:autoTitleDeleted', 'c:varyColors', 'c:invertIfNegative', 'c:autoUpdate'),
      *('c:plotVisOnly', 'c:smooth', 'c:showLegendKey', 'c:showVal', 'c:auto'),
      *('c:showCatName', 'c:showSerName', 'c:noMultiLvlLbl', 'c:showLeaderLines'),
    ),
    ({'!val': FLAG}, '', ''),
  ),
  'c:style': ({'!val': '2|10|18|26'}, '', ''),  # of the theme's accents in turn
  'c:chart': (
    {},
    'c:title c:autoTitleDeleted c:plotArea c:legend c:plotVisOnly c:dispBlanksAs '
    'c:showDLblsOverMax',
    '',
  ),
  'c:dispBlanksAs': ({'!val': 'gap|zero|span'}, '', ''),
  'c:title': ({}, 'c:tx c:layout c:overlay c:spPr c:txPr', ''),
  'c:layout': ({}, '', ''),
  'c:rich': _TEXT,
  'a:pPr': ({'algn': 'l|ctr|r|just', 'rtl': OFF}, 'a:defRPr', ''),
  'c:txPr': _TEXT,
  'a:bodyPr': (
    {
      **{'rot': (-5_400_000, 5_400_000), 'vert': 'horz', 'wrap': 'square|none'},
      **dict.fromkeys(('lIns', 'tIns', 'rIns', 'bIns'), (0, INCH // 2)),
      **{'anchor': 't|ctr|b', 'anchorCtr': FLAG, 'spcFirstLastPara': FLAG},
    },
    'a:spAutoFit a:noAutofit',
    '',
  ),
  'a:spAutoFit': ({}, '', ''),
  'a:noAutofit': ({}, '', ''),
  'c:plotArea': ({}, 'c:layout c:barChart c:lineChart c:catAx c:valAx c:spPr', ''),
  'c:barChart': (
    {},
    'c:barDir c:grouping c:varyColors c:dLbls c:gapWidth c:overlap',
    'c:ser c:axId',
  ),
  'c:barDir': ({'!val': 'bar|col'}, '', ''),
  'c:grouping': ({'!val': 'clustered|stacked|standard'}, '', ''),
  'c:gapWidth': ({'!val': (0, 500)}, '', ''),
  'c:overlap': ({'!val': (-100, 100)}, '', ''),
  'c:lineChart': (
    {},
    'c:grouping c:varyColors c:dLbls c:marker c:smooth',
    'c:ser c:axId',
  ),
  'c:ser': (
    {},
    'c:idx c:order c:tx c:spPr c:invertIfNegative c:marker c:dLbls c:cat c:val '
    'c:smooth',
    'c:dPt',
  ),
  'c:idx': _VALUE,
  'c:order': _VALUE,
  'c:tx': ({}, 'c:strRef c:rich', ''),
  'c:cat': ({}, 'c:strRef', ''),
  'c:val': ({}, 'c:numRef', ''),
  'c:strRef': ({}, 'c:f c:strCache', ''),
  'c:numRef': ({}, 'c:f c:numCache', ''),
  'c:strCache': ({}, 'c:ptCount', 'c:pt'),
  'c:numCache': ({}, 'c:formatCode c:ptCount', 'c:pt'),
  'c:ptCount': _VALUE,
  'c:pt': ({'idx': ID}, 'c:v', ''),
  **dict.fromkeys(('c:f', 'c:v', 'c:formatCode'), ({}, '', '')),
  'c:marker': ({'val': FLAG}, 'c:symbol c:size c:spPr', ''),
  'c:symbol': ({'!val': r'\w{1,9}'}, '', ''),
  'c:size': ({'!val': (2, 20)}, '', ''),
  'c:dPt': ({}, 'c:idx c:invertIfNegative c:marker c:bubble3D c:spPr', ''),
  'c:dLbls': ({}, _SHOWN, 'c:dLbl'),
  'c:dLbl': ({}, 'c:idx ' + _SHOWN, ''),
  'c:dLblPos': ({'!val': 'ctr|inEnd|inBase|outEnd|t|b|l|r'}, '', ''),
  'c:numFmt': ({'formatCode': FORMATS, 'sourceLinked': FLAG}, '', ''),
  'c:catAx': ({}, _AXIS + 'c:auto c:lblAlgn c:lblOffset c:noMultiLvlLbl', ''),
  'c:valAx': ({}, _AXIS + 'c:crossBetween c:majorUnit c:minorUnit', ''),
  'c:axId': _VALUE,
  'c:crossAx': _VALUE,
  'c:scaling': ({}, 'c:orientation c:max c:min', ''),
  'c:orientation': ({'!val': 'minMax|maxMin'}, '', ''),
  **dict.fromkeys(
    ('c:max', 'c:min', 'c:majorUnit', 'c:minorUnit'),
    ({'!val': r'-?\d{1,9}(\.\d{1,20})?'}, '', ''),
  ),
  'c:axPos': ({'!val': '[lrtb]'}, '', ''),
  'c:majorGridlines': _LINED,
  'c:minorGridlines': _LINED,
  'c:majorTickMark': _TICKS,
  'c:minorTickMark': _TICKS,
  'c:tickLblPos': ({'!val': 'nextTo|low|high'}, '', ''),
  'c:crosses': ({'!val': 'autoZero|min|max'}, '', ''),
  'c:crossBetween': ({'!val': 'between|midCat'}, '', ''),
  'c:lblAlgn': ({'!val': 'ctr|l|r'}, '', ''),
  'c:lblOffset': ({'!val': (0, 1000)}, '', ''),
  'c:legend': ({}, 'c:legendPos c:layout c:overlay c:spPr c:txPr', ''),
  'c:legendPos': ({'!val': 'b|l|r|t|tr'}, '', ''),
  'c:spPr': ({}, f'{_FILLS} a:ln a:effectLst', ''),
  'c:externalData': ({'r:id': ANY}, 'c:autoUpdate', ''),
}
_MIN_LINE = {'a:spcPts': 10 * POINT, 'a:spcPct': 80_000}
_CHOICES = tuple(
  frozenset(one.split())
  for one in (
    *(_FILLS, _COLOURS, 'a:buNone a:buChar', 'a:spcPct a:spcPts', 'c:strRef c:rich'),
    *('a:normAutofit a:spAutoFit a:noAutofit', 'c:barChart c:lineChart'),
  )
)
_TEXTS = ('a:t', 'c:f', 'c:v', 'c:formatCode')


def name(tag):
  """A tag with the usual prefix of its namespace."""
  space, _, local = tag.rpartition('}')
  return NAMESPACES.get(space[1:], '') + local


def wrong(root, kinds):
  """'' or the first thing in an XML tree that its list does not have."""
  for element in root.iter():
    if not isinstance(element.tag, str):
      return 'a comment or processing instruction is not allowed'
    own = name(element.tag)
    attributes, once, often = kinds[own]
    reason = _attributes(element, own, attributes)
    reason = reason or _children(element, own, once.split(), often.split())
    if reason:
      return reason
    if own not in _TEXTS and (element.text or '').strip():
      return f'text in {own} is not allowed'
    if (element.tail or '').strip():
      return f'text after {own} is not allowed'
    if own == 'c:formatCode' and not re.fullmatch(FORMATS, element.text or ''):
      return f'{own} {element.text!r:.60} is not allowed'
  return ''


def _attributes(element, own, allowed):
  for attribute in allowed:
    if attribute[0] == '!' and element.get(attribute[1:]) is None:
      return f'{own} without {attribute[1:]} is not allowed'
  for key, value in element.attrib.items():
    attribute = name(key)
    bounds = allowed.get(attribute, allowed.get('!' + attribute))
    if bounds is None and own.endswith('Locks') and attribute.startswith('no'):
      bounds = FLAG
    if own in _MIN_LINE and name(element.getparent().tag) == 'a:lnSpc':
      bounds = _MIN_LINE[own], bounds[1]
    if bounds is None or not _within(value, bounds):
      return f'{own} {attribute}="{value[:40]}" is not allowed'
  return ''


def _within(value, bounds):
  if isinstance(bounds, str):
    return re.fullmatch(bounds, value) is not None
  whole = re.fullmatch(r'-?\d{1,10}', value)
  return whole is not None and bounds[0] <= int(value) <= bounds[1]


def _children(element, own, once, often):
  found = [name(child.tag) for child in element if isinstance(child.tag, str)]
  for child in found:
    if child not in once and child not in often:
      return f'{child} in {own} is not allowed'
    if child in once and found.count(child) > 1:
      return f'more than one {child} in {own} is not allowed'
    for choice in _CHOICES:
      if child in choice and len(choice.intersection(found)) > 1:
        return f'{" and ".join(sorted(choice & set(found)))} in {own} are not allowed'
  return ''
