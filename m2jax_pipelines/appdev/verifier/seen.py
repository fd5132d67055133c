"""Whether a person sees a text where it is: by pixels.

A part of the window is captured three times: as it is, with the text's fill
transparent, and as it is again. A character is seen if enough pixels of its box differ
between the first two captures, with enough contrast, and not between the first and the
last. Masks, clips, filters, covers, strokes and colours need no rules of their own.
What pixels cannot show is rejected by style in seen.js: generated text, fonts of the
page, masked characters, and text that is turned or reflected. The characters must be in
reading order.
"""

import base64
import io

import visual

MIN_SEEN_CONTRAST, MIN_SEEN_PX = 1.5, 8.0
MIN_INK, MIN_INK_PIXELS = 0.03, 2  # share of a letter's box; of any other character
MIN_LEVEL = 12  # difference of a colour channel that is looked at
MAX_CLIP_PX = 4000


# For every pixel, hence by table.
_RED, _GREEN, _BLUE = (
  [part * visual.linear(value) for value in range(256)] for part in visual.LUMINANCE
)


def _luminance(rgb):
  return _RED[rgb[0]] + _GREEN[rgb[1]] + _BLUE[rgb[2]]


class Shots:
  """Three screenshots of a part of the window: with the text, without, and with."""

  def __init__(self, pngs, left, top):
    from PIL import Image, ImageChops

    images = [Image.open(io.BytesIO(png)).convert('RGB') for png in pngs]
    self._with, self._without, last = images
    self._left, self._top = left, top
    self._same = ImageChops.difference(self._with, last)
    self._changed = ImageChops.difference(self._with, self._without)

  def ink(self, box):
    """Pixels of a box that are of the text."""
    x, y, width, height = box
    area = (
      max(round(x - self._left), 0),
      max(round(y - self._top), 0),
      min(round(x + width - self._left), self._with.width),
      min(round(y + height - self._top), self._with.height),
    )
    if area[0] >= area[2] or area[1] >= area[3]:
      return 0
    parts = (self._with, self._without, self._changed, self._same)
    rows = zip(*(part.crop(area).getdata() for part in parts), strict=True)
    count = 0
    for one, other, changed, moved in rows:
      if max(changed) >= MIN_LEVEL and max(moved) < MIN_LEVEL:
        low, high = sorted((_luminance(one), _luminance(other)))
        count += (high + 0.05) / (low + 0.05) >= MIN_SEEN_CONTRAST
    return count


def _ordered(chars):
  """Whether characters go from left to right and lines downwards."""
  last = None
  for char, x, y, width, height in chars:
    if width <= 0:
      continue
    if char.isalnum():
      if last:
        before_x, before_y, before_height = last
        newline = y >= before_y + before_height / 2
        if not newline and (x < before_x + height / 20 or y < before_y - height):
          return False
      last = x, y, height
  return True


def reading(texts, shots):
  """(the characters that are seen, what is wrong with them) of a group's texts."""
  chars, wrong = '', ''
  for text in texts:
    for char, x, y, width, height in text:
      needed = MIN_INK * width * height if char.isalnum() else 0
      if shots.ink((x, y, width, height)) >= max(needed, MIN_INK_PIXELS):
        chars += char
    heights = [height for *_, height in text]
    widths = sum(width for *_, width, _ in text)
    if text and (min(heights) < MIN_SEEN_PX or widths < 0.1 * sum(heights)):
      wrong = 'tiny'
  if not _ordered([char for text in texts for char in text]):
    wrong = 'not in reading order'
  return chars, wrong


def _wrong(wanted, texts, shots):
  """'' if a text is seen in a group, or why not."""
  seen, wrong = reading(texts, shots) if shots else ('', '')
  if not wrong and _letters(seen) == _letters(wanted):
    return ''
  wrong = f', {wrong}' if wrong else ''
  return f'{wanted!r} is in the page, but what is seen there is {seen!r}{wrong}'


def _letters(text):
  return ''.join(text.split()).casefold()


class Eye:
  """Looks at texts of a page."""

  def __init__(self, meter):
    self._meter = meter

  async def look(self, boxes, wanted):
    """'' if `wanted` are what is seen in the boxes, or why not."""
    looked = [(b, w) for b, w in zip(boxes, wanted, strict=True) if w]
    if not looked:
      return ''
    if any(box is None for box, _ in looked):
      return 'in the page, but without a box'
    handle = await self._meter.handle('seen.js')
    denied = await self._meter.call(handle, 'find', [box for box, _ in looked])
    for (_, text), why in zip(looked, denied, strict=True):
      if why:
        return f'{text!r} is in the page, but {why}'
    pending = list(range(len(looked)))
    while pending:
      there = await self._meter.call(handle, 'place', pending[0])
      now = [i for i in pending if i == pending[0] or _inside(there, i)]
      shots = await self._shots(handle, there, now)
      if there['moved']:
        await self._meter.call(handle, 'restore')
      for i in now:
        if wrong := _wrong(looked[i][1], there['groups'][i], shots):
          return wrong
      pending = [i for i in pending if i not in now]
    return ''

  async def _shots(self, handle, there, now):
    chars = [c for i in now for text in there['groups'][i] for c in text]
    if not chars:
      return None
    left = max(int(min(x for _, x, *_ in chars)) - 1, 0)
    top = max(int(min(y for _, _, y, *_ in chars)) - 1, 0)
    right = min(int(max(x + w for _, x, _, w, _ in chars)) + 2, there['width'])
    bottom = min(int(max(y + h for _, _, y, _, h in chars)) + 2, there['height'])
    if left >= right or top >= bottom or right - left > MAX_CLIP_PX:
      return None
    x, y = there['scrolled']  # a clip is relative to the document
    clip = {'x': left + x, 'y': top + y, 'width': right - left, 'height': bottom - top}
    pngs = [await self._meter.shot(clip)]
    await self._meter.call(handle, 'hide')
    try:
      pngs.append(await self._meter.shot(clip))
    finally:
      await self._meter.call(handle, 'show')
    pngs.append(await self._meter.shot(clip))
    return Shots([base64.b64decode(png) for png in pngs], left, top)


def _inside(there, index):
  chars = [c for text in there['groups'][index] for c in text]
  return all(
    x >= 0 and y >= 0 and x + w <= there['width'] and y + h <= there['height']
    for _, x, y, w, h in chars
  )
