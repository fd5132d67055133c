"""Rewrites formulas that the package `formulas` misreads or reads slowly; same meaning.

It drops a pair of signs, as in `--(A1:A9="x")`, which makes numbers of truth values, so
signs get parentheses: `-(-(A1:A9="x"))`. It reads each of the million cells of a whole
column, so columns are cut one row after the last used one: the extra row exposes
formulas that are wrong about empty cells. It does not parse a space between a function
and `(`.
"""

import re

LAST_ROW, LAST_COLUMN = 1 << 20, 1 << 14
_WORD = re.compile(r'[A-Za-z][A-Za-z.]*')
_RANGE = re.compile(r'(.*!)?\$?([A-Za-z]{1,3})?\$?(\d+)?:\$?([A-Za-z]{1,3})?\$?(\d+)?')


def tokens(formula):
  """Tokens of a formula, in which functions are those of Excel, with no space.

  Raises:
    TokenizerError, IndexError: it is no formula.
  """
  from openpyxl.formula import Tokenizer

  items, found = Tokenizer(formula).items, []
  ends = []  # for each parenthesis: whether a function's name was before it
  for item in items:
    if item.type == 'PAREN' and item.subtype == 'OPEN':
      blank = bool(found) and found[-1].type == 'WHITE-SPACE'
      word = found[-2] if blank and len(found) > 1 else None
      ends.append(
        word is not None and word.type == 'OPERAND' and _WORD.fullmatch(word.value)
      )
      if ends[-1]:
        del found[-2:]
        item.type, item.value = 'FUNC', f'{word.value}('
    elif item.type == 'PAREN' and ends.pop():
      item.type = 'FUNC'
    found.append(item)
  return found


def area(reference):
  """The number of cells of a range within a sheet; 0 for whole rows and columns."""
  match = _RANGE.fullmatch(reference)
  if match is None or None in match.groups()[1:]:
    return 0
  _, left, top, right, bottom = match.groups()
  if int(bottom) >= LAST_ROW:
    return 0
  return (abs(_number(right) - _number(left)) + 1) * (abs(int(bottom) - int(top)) + 1)


def formula(text, rows, columns):
  """A formula with the same value for a workbook of this size."""
  return '=' + _Writer(tokens(text), rows, columns).all()


def workbook(book):
  """Rewrites the formulas of an openpyxl workbook; returns whether any changed."""
  rows = max(sheet.max_row for sheet in book.worksheets) + 1
  columns = max(sheet.max_column for sheet in book.worksheets) + 1
  changed = False
  for sheet in book.worksheets:
    for row in sheet.iter_rows():
      for cell in row:
        if cell.data_type == 'f' and isinstance(cell.value, str):
          value = formula(cell.value, rows, columns)
          changed |= value != cell.value
          cell.value = value
  return changed


class _Writer:
  """Writes tokens as text."""

  def __init__(self, items, rows, columns):
    self._items, self._rows, self._columns, self._at = items, rows, columns, 0

  def all(self):
    """The tokens up to the end, or to one that closes what was opened before."""
    found = []
    while self._at < len(self._items) and self._items[self._at].subtype != 'CLOSE':
      found.append(self._next())
    return ''.join(found)

  def _next(self):
    item = self._items[self._at]
    self._at += 1
    if item.subtype == 'OPEN':
      inner = self.all()
      close = self._items[self._at].value if self._at < len(self._items) else ''
      self._at += 1
      return f'{item.value}{inner}{close}'
    if item.type == 'OPERATOR-PREFIX' and item.value in '+-':
      return self._signed(item.value)
    if item.type == 'OPERAND' and item.subtype == 'RANGE':
      return clip(item.value, self._rows, self._columns)
    return item.value

  def _signed(self, sign):
    while self._at < len(self._items) and self._items[self._at].type == 'WHITE-SPACE':
      self._at += 1
    if self._at == len(self._items):
      return sign
    again = self._items[self._at].type == 'OPERATOR-PREFIX'
    rest = self._next()
    return f'{sign}({rest})' if again else f'{sign}{rest}'


def clip(reference, rows, columns):
  """A reference whose whole columns and rows end after the last that is used."""
  match = _RANGE.fullmatch(reference)
  if match is None:
    return reference
  sheet, left, top, right, bottom = match.groups()
  if (left is None) != (right is None) or (top is None) != (bottom is None):
    return reference
  if left is None and top is None:
    return reference
  whole_columns = top is None or int(bottom) >= LAST_ROW
  whole_rows = left is None or _number(right) >= LAST_COLUMN
  if not whole_columns and not whole_rows:
    return reference
  if whole_columns:
    top, bottom = top or '1', str(max(rows, int(top or 1)))
  if whole_rows:
    left = left or 'A'
    right = _letters(max(columns, _number(left)))
  return f'{sheet or ""}${left}${top}:${right}${bottom}'


def _number(letters):
  value = 0
  for letter in letters.upper():
    value = value * 26 + ord(letter) - 64
  return value


def _letters(number):
  text = ''
  while number:
    number, rest = divmod(number - 1, 26)
    text = chr(65 + rest) + text
  return text
