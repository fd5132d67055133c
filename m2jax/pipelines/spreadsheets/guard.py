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
_CELL = re.compile(rb'<(?:\w+:)?c\b[^>]*?\br\s*=\s*["\']([A-Za-z]+)(\d+)["\']')
_ROW = re.compile(rb'<(?:\w+:)?row\b[^>]*?\br\s*=\s*["\'](\d+)["\']')
_SHEET = re.compile(rb'<(?:\w+:)?sheet\b[^>]*?\bname\s*=\s*["\']([^"\']*)')
_REFERENCE = re.compile(rb'<(?:\w+:)?(?:c|row)\b[^>]*&')
_BINARY = ('.png', '.jpg', '.jpeg', '.gif', '.emf', '.wmf', '.bin', '.xlsx')


def column(letters):
  """1 for A."""
  value = 0
  for letter in letters.upper():
    value = value * 26 + letter - 64
  return value


def shows(number_format):
  """Whether all sections of a number format show the value itself, and no other digits.

  A comma after the last digit would divide it by a thousand.
  """
  literals = re.findall(r'"([^"]*)"|\\(.)', number_format)
  if any(c.isdigit() for pair in literals for text in pair for c in text):
    return False
  bare = re.sub(r'"[^"]*"|\\.|_.|\*.|\[[^\]]*\]', '', number_format)
  if bare.casefold() == 'general':
    return True
  if re.search(r'[0#?] *,+(?![0#?,])', bare):
    return False
  return all(re.search('[0#?@]|general', s, re.I) for s in bare.split(';'))


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
