"""Refuses hostile workbooks before a parser sees them. Standard library only.

`check(data)` returns '' or why the bytes of an .xlsx file are refused: archive bombs,
macros, embedded and external content, XML entities, huge dimensions. `shows` is what
the number formats of cells are judged by.
"""

import io
import re
import zipfile

MAX_FILE_BYTES = 2 << 20
MAX_PARTS = 200
MAX_PART_BYTES = 8 << 20
MAX_TOTAL_BYTES = 16 << 20
MAX_RATIO = 200  # of a part above 64 KiB
MAX_ROW, MAX_COLUMN, MAX_CELLS, MAX_SHEETS = 5000, 100, 50_000, 20
_FORBIDDEN = (
  ('vbaproject', 'macros'),
  ('xl/externallinks/', 'links to other workbooks'),
  ('xl/activex/', 'ActiveX controls'),
  ('xl/embeddings/', 'embedded objects'),
  ('xl/connections', 'data connections'),
  ('xl/querytables/', 'data connections'),
  ('xl/macrosheets/', 'macros'),
  ('customxml/', 'custom XML'),
)
_CELL = re.compile(rb'<(?:[^\s<>/:]+:)?c\b[^>]*?\br\s*=\s*["\']([A-Za-z]+)(\d+)["\']')
_ROW = re.compile(rb'<(?:[^\s<>/:]+:)?row\b[^>]*?\br\s*=\s*["\'](\d+)["\']')
_SHEET = re.compile(rb'<(?:[^\s<>/:]+:)?sheet\b[^>]*?\bname\s*=\s*["\']([^"\']*)')
_REFERENCE = re.compile(rb'<(?:[^\s<>/:]+:)?(?:c|row)\b[^>]*&')
_MONEY = (
  r'(?:[$€£¥₹]|USD|EUR|GBP|JPY|CHF|CAD|AUD|NZD|CNY|INR|SEK|NOK|DKK|PLN|CZK|kr|zł)'
)
_COLOURS = {'black': '000000', 'blue': '0000FF', 'red': 'FF0000'}
_FORMAT = re.compile(  # the tokens of a number format's section
  r'(?P<colour>\[(?:black|blue|red)\])'
  rf'|(?P<money>\[\${_MONEY}?(?:-[0-9A-F]{{3,4}})?\]|" ?{_MONEY} ?"|[$€£¥])'
  r'|(?P<space>_\D|\* |\\? |" +")'
  r'|(?P<sign>\\?[-()]|"-")'
  r'|(?P<number>general|[#?0](?:[#?0,]*[#?0])?(?:\.[#?0]+)?(?:E[+-]0+)?)'
  r'|(?P<percent>%)|(?P<text>@)',
  re.IGNORECASE,
)
# openpyxl's name of the format 44, which lacks the semicolons.
_SHIPPED = (r'_("$"* #,##0.00_)_("$"* \(#,##0.00\)_("$"* "-"??_)_(@_)',)
_BINARY = ('.png', '.jpg', '.jpeg', '.gif', '.emf', '.wmf', '.bin', '.xlsx')


def column(letters):
  """1 for A."""
  value = 0
  for letter in letters.upper():
    value = value * 26 + letter - 64
  return value


def shows(number_format):
  """Whether a number format shows the value itself, and no word or digit but its own.

  Every section must be of a small grammar: one number in digits, with a currency, a
  percent sign and spaces. Negative numbers have a minus or parentheses, others do not;
  zero may be a dash, as accountants write it; text is shown as it is.
  """
  if number_format in _SHIPPED:
    return True
  sections = number_format.split(';')
  if len(sections) == 1:
    return _section(sections[0], 'positive') or _section(sections[0], 'text')
  kinds = ('positive', 'negative', 'zero', 'text')
  return len(sections) <= len(kinds) and all(map(_section, sections, kinds))


def colours(number_format):
  """The colours, as RGB, that a format that `shows` a value may give to it."""
  names = re.findall(r'\[(\w+)\]', number_format.casefold())
  return {_COLOURS[name] for name in names if name in _COLOURS}


def _section(text, kind):
  """Whether a section of a number format is in the grammar."""
  place, found = 0, {}
  while place < len(text):
    token = _FORMAT.match(text, place)
    if token is None:
      return False
    place = token.end()
    found.setdefault(token.lastgroup, []).append(token.group().strip('"\\'))
  if kind == 'text':
    return found.pop('text', []) == ['@'] and not set(found) - {'space'}
  number, sign = found.get('number', []), ''.join(found.get('sign', []))
  if 'text' in found or len(found.get('percent', [])) > 1:
    return False
  if kind == 'zero' and sign == '-':
    return not set(''.join(number)) - {'?'} and 'percent' not in found
  signs = ('-', '()') if kind == 'negative' else ('',)
  general = [n.casefold() for n in number] == ['general'] and 'percent' not in found
  return sign in signs and (general or (len(number) == 1 and '0' in number[0]))


def check(data):
  """'' if the workbook can be read, or the reason why it is refused."""
  if len(data) > MAX_FILE_BYTES:
    return f'the file has more than {MAX_FILE_BYTES} bytes'
  try:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
      return _archive(archive)
  except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError):
    return 'the file is no readable zip archive'
  except (ValueError, OverflowError):
    return 'the zip archive is malformed'


def _archive(archive):
  parts = archive.infolist()
  names = [part.filename.lower() for part in parts]
  if len(parts) > MAX_PARTS:
    return f'more than {MAX_PARTS} parts'
  if len(set(names)) != len(names):
    return 'two parts have one name'
  if sum(part.file_size for part in parts) > MAX_TOTAL_BYTES:
    return f'more than {MAX_TOTAL_BYTES} bytes when unpacked'
  for name in names:
    if name.startswith('/') or '..' in name.split('/') or '\\' in name:
      return 'a part is outside of the archive'
    for pattern, what in _FORBIDDEN:
      if pattern in name:
        return f'it contains {what}'
  if sum(name.startswith('xl/worksheets/sheet') for name in names) > MAX_SHEETS:
    return f'more than {MAX_SHEETS} sheets'
  cells = 0
  for part in parts:
    reason, count = _part(archive, part)
    cells += count
    if reason:
      return reason
    if cells > MAX_CELLS:
      return f'more than {MAX_CELLS} cells'
  return ''


def _part(archive, part):
  if part.flag_bits & 1:
    return 'it is encrypted', 0
  if part.file_size > max(65536, MAX_RATIO * part.compress_size):
    return 'a part is compressed more than usual', 0
  with archive.open(part) as file:
    data = file.read(MAX_PART_BYTES + 1)  # whatever the header says
  if len(data) > MAX_PART_BYTES:
    return f'a part has more than {MAX_PART_BYTES} bytes', 0
  name = part.filename.lower()
  if name.endswith(_BINARY):  # a parser follows relationships, not names
    start = data[:64].lstrip(b'\0\xef\xbb\xbf\xfe\xff \t\r\n')
    return ('a part of XML has another name', 0) if start[:1] == b'<' else ('', 0)
  if b'\0' in data or data[:2] in (b'\xff\xfe', b'\xfe\xff'):
    return 'a part is not UTF-8', 0
  encoding = re.match(rb'\s*(?:\xef\xbb\xbf)?<\?xml[^>]*encoding=["\']([\w.-]+)', data)
  if encoding and encoding.group(1).lower() not in (b'utf-8', b'us-ascii'):
    return 'a part is not UTF-8', 0
  if b'<!DOCTYPE' in data or b'<!ENTITY' in data:
    return 'a part defines XML entities', 0
  if name.endswith('.rels') and b'&#' in data:
    return 'a relationship is written in character references', 0
  if re.search(rb'TargetMode\s*=\s*["\']External', data):
    return 'it refers to something outside of the workbook', 0
  if b'macroEnabled' in data:
    return 'it contains macros', 0
  found = _CELL.findall(data)
  rows = [int(row[:9]) for row in _ROW.findall(data)] + [int(r[:9]) for _, r in found]
  if max(rows, default=0) > MAX_ROW:
    return f'a row beyond {MAX_ROW}', 0
  if any(len(c) > 3 or column(c) > MAX_COLUMN for c, _ in found):
    return f'a column beyond {MAX_COLUMN}', 0
  if name == 'xl/workbook.xml':  # one sheet to an engine
    sheets = [n.decode('utf-8', 'replace').casefold() for n in _SHEET.findall(data)]
    if len(set(sheets)) != len(sheets):
      return 'names of sheets differ by case only', 0
  if name.startswith('xl/worksheets/'):
    if _REFERENCE.search(data):
      return 'a place of a cell is written in character references', 0
    if len(set(found)) != len(found):
      return 'two cells have one place', 0
  return '', len(found)
