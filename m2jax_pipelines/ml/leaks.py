"""Searches every readable file for test rows: of a public copy, of the task, or labels.

The program runs in a sandbox as the agent would:

    python3 leaks.py NEEDLES.json ROOT…

It reads all regular files below ROOT, also in gzip, bzip2, xz and zip (wheels, .npz),
and pixels of images. A needle is a sequence of values, found as numbers of a text in
any of the usual formats and with any separators, as words, or as an array in memory
(.npy, pickle, SQLite) of any usual type; programs (ELF) are searched for arrays only.
Formats that cannot be opened here (Parquet, Arrow, 7z, zstd) are counted. Prints JSON:
hits, files, bytes, unopened.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import stat
import struct
import sys
import zipfile

import numpy as np

_CHUNK, _OVERLAP = 16 << 20, 64 << 10
_MAX_UNPACKED = 1 << 30
_DEPTH = 4  # of archives in archives
_TYPES = ('<f8', '>f8', '<f4', '<i8', '<i4', '<i2', 'u1')
_UNOPENED = (b'PAR1', b'ARROW1', b'7z\xbc\xaf', b'\x28\xb5\x2f\xfd', b'FEA1')
_IMAGES = (b'\x89PNG', b'\xff\xd8\xff', b'GIF8', b'II*\0', b'MM\0*', b'BM')
_SKIPPED = ('/proc', '/sys', '/dev')
_ZEROS = re.compile(rb'(?:(\.[0-9]*?[1-9])|\.)0*(?= )')  # after the decimal point


def _translation(kept, lower=False):
  table = bytearray(b' ' * 256)
  for one in range(256):
    letter = chr(one).isalpha() and one < 128
    if one in kept:
      table[one] = one + 32 * (lower and 65 <= one <= 90)
    elif letter and not lower:
      table[one] = ord('x')
  table[ord('E')] = table[ord('e')]
  return bytes(table)


_NUMBERS = _translation(b'0123456789.+-e')
_WORDS = _translation(bytes(range(48, 58)) + bytes(range(65, 91)) + bytes(
  range(97, 123)) + bytes(range(128, 256)), lower=True)  # fmt: skip


def numbers(data):
  """The numbers of a text, without zeros at their ends, separated by spaces."""
  tokens = [one for one in data.translate(_NUMBERS).split() if b'x' not in one]
  text = b' ' + b' '.join(tokens) + b' '
  return _ZEROS.sub(rb'\1', text) if b'.' in text else text


def words(data):
  """The words of a text in lower case, separated by spaces."""
  return b' ' + b' '.join(data.translate(_WORDS).split()) + b' '


def texts_of(values):
  """The forms in which a text has a sequence of numbers, as `numbers` gives them."""
  forms = (
    ' '.join(repr(float(v)) for v in values),
    ' '.join(f'{v:.18e}' for v in values),
  )
  return {numbers(form.encode()) for form in forms}


def arrays_of(values):
  """The forms in which memory or a file has a sequence of numbers."""
  found = {b''.join(b'G' + struct.pack('>d', v) for v in values)}  # of pickle
  for kind in _TYPES:
    with np.errstate(invalid='ignore'):
      array = np.asarray(values, float).astype(kind)
    if kind[1] == 'f' or np.array_equal(array.astype(float), values):
      found.add(array.tobytes())
  return found if len(set(values)) > 1 else set()


class Search:
  """What was found so far.

  Args:
    needles: (name, sequence of numbers or text) of each needle.
  """

  def __init__(self, needles):
    self.hits, self.files, self.bytes, self.unopened = [], 0, 0, []
    self._numbers, self._words, self._arrays = {}, {}, {}
    for name, value in needles:
      if isinstance(value, str):
        apart = ' '.join(re.sub(r'\W', '', value))  # UTF-16 and UTF-32
        forms, kept = [words(v.encode()) for v in (value, apart)], self._words
      else:
        forms, kept = texts_of(value), self._numbers
      kept.update({form: (set(form.split()), name) for form in forms})
      if isinstance(value, str):
        continue
      for one in arrays_of(value):
        place = _rarest(one)
        pair = one[place] << 8 | one[place + 1]
        self._arrays.setdefault(pair, []).append((one, place, name))
    self._pairs = np.zeros(1 << 16, bool)
    self._pairs[list(self._arrays)] = True

  def file(self, path):
    """Searches a file."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, 'rb') as file:
      if not stat.S_ISREG(os.fstat(fd).st_mode):
        return
      self.files += 1
      self.stream(file, path, 0)

  def stream(self, file, path, depth):
    """Searches what a file object has, and what is packed in it."""
    head = file.read(8)
    file.seek(0)
    if head.startswith(_UNOPENED):
      self.unopened.append(path)
    try:
      self._packed(file, head, path, depth)
    except (OSError, EOFError, ValueError, RuntimeError, NotImplementedError,
            lzma.LZMAError, zipfile.BadZipFile, struct.error):  # fmt: skip
      pass  # damaged, or only begins like an archive; its bytes are searched below
    file.seek(0)
    self._plain(file, path, has_text=not head.startswith(b'\x7fELF'))

  def _packed(self, file, head, path, depth):
    if head.startswith(_IMAGES):
      self._image(file, path)
    if depth == _DEPTH:
      return
    for magic, module in ((b'\x1f\x8b', gzip), (b'BZh', bz2), (b'\xfd7zXZ', lzma)):
      if head.startswith(magic):
        self._inner(module.open(file), path, depth)
    if head.startswith(b'PK'):
      with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
          with archive.open(entry) as inner:
            self._inner(inner, f'{path}!{entry.filename}', depth)

  def _inner(self, file, path, depth):
    data = file.read(_MAX_UNPACKED + 1)
    if len(data) > _MAX_UNPACKED:
      self.unopened.append(path)
    self.stream(io.BytesIO(data[:_MAX_UNPACKED]), path, depth + 1)

  def _image(self, file, path):
    try:
      from PIL import Image
    except ImportError:
      return
    try:
      grey = Image.open(file).convert('L').tobytes()
    except Exception:  # of a decoder, on any damaged image of the machine
      return
    self._plain(io.BytesIO(grey), path)

  def _plain(self, file, path, has_text=False):
    rest = b''
    while chunk := file.read(_CHUNK):
      self.bytes += len(chunk)
      data = rest + chunk
      for name in self._find(data, has_text):
        self.hits.append([name, path])
      rest = data[-_OVERLAP:]

  def _find(self, data, has_text):
    yield from self._find_arrays(data)
    if not has_text:
      return
    for text, needles in ((numbers(data), self._numbers), (words(data), self._words)):
      present = set(text.split())
      for form, (parts, name) in needles.items():
        if parts <= present and form in text:
          yield name

  def _find_arrays(self, data):
    array = np.frombuffer(data, np.uint8)
    if len(array) < 2:
      return
    pairs = array[:-1].astype(np.uint16) << 8 | array[1:]
    places = np.flatnonzero(self._pairs[pairs])
    of = pairs[places]
    for pair in np.unique(of).tolist():
      at = places[of == pair]
      for one, place, name in self._arrays[pair]:
        starts = at - place
        starts = starts[(starts >= 0) & (starts + len(one) <= len(array))]
        for offset, byte in enumerate(one):
          if not len(starts):
            break
          starts = starts[array[starts + offset] == byte]
        if len(starts):
          yield name


def _rarest(data):
  """The place of two bytes that are rare in other files: different, and not 0."""
  pairs = [(data[i], data[i + 1]) for i in range(len(data) - 1)]
  return max(range(len(pairs)), key=lambda i: (bool(pairs[i][0]) + bool(pairs[i][1]),
                                              len({*pairs[i]}), pairs[i]))  # fmt: skip


def walk(roots):
  """The paths of all entries below directories that are not directories."""
  for root in roots:
    for directory, names, files in os.walk(root):
      names[:] = [n for n in names if os.path.join(directory, n) not in _SKIPPED]
      yield from (os.path.join(directory, name) for name in files)


def main(needles, *roots):
  with open(needles, encoding='utf-8') as file:
    given = json.load(file)
  search, unread = Search(given['needles']), 0
  own = {os.path.realpath(path) for path in (needles, __file__, *given['allowed'])}
  for path in walk(roots):
    if os.path.realpath(path) in own:
      continue
    try:
      search.file(path)
    except OSError:  # a link, or not readable by the agent either
      unread += 1
  found = {'hits': search.hits, 'files': search.files, 'bytes': search.bytes}
  print(json.dumps({**found, 'unread': unread, 'unopened': search.unopened}))


if __name__ == '__main__':
  main(*sys.argv[1:])
