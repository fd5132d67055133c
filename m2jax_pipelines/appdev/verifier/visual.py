"""Visual proxies: what can be measured of a page's looks, not a judgement of taste.

    contrast   WCAG 2.2, 1.4.3: text to what is behind it, 4.5, or 3 if it is large
    overflow   nothing is wider than the window, at two widths
    overlap    no text is on top of another
    size       no text below `MIN_PX`
    targets    WCAG 2.2, 2.5.8: controls of at least 24 × 24 pixels
    names      WCAG 2.2, 2.5.3: a control's accessible name has its visible words
    pixels     the screenshot is not blank

A page's measures are those of measure.js.
"""

import base64
import io
import re

MIN_PX, MIN_TARGET_PX = 12.0, 24.0
CONTRAST, LARGE_CONTRAST = 4.5, 3.0
LUMINANCE = (0.2126, 0.7152, 0.0722)  # parts of red, green and blue
LARGE_PX, LARGE_BOLD_PX = 24.0, 18.66
MAX_OVERLAP, SLACK_PX = 0.1, 1.0
MIN_DEVIATION, MAX_ONE_COLOUR = 2.0, 0.9995  # of grey levels; of the pixels
PROXIES = {
  'contrast': 'text stands out from its background (WCAG 1.4.3)',
  'overflow': 'nothing is wider than the window',
  'overlap': 'no text is on top of another',
  'size': f'no text is smaller than {MIN_PX:g} pixels',
  'targets': f'controls are at least {MIN_TARGET_PX:g} pixels in size (WCAG 2.5.8)',
  'names': 'the accessible names of controls have their visible words (WCAG 2.5.3)',
  'pixels': 'the page is not blank',
}


def linear(value):
  """A channel of 0…255 in linear RGB, 0 to 1."""
  c = value / 255
  return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4


def luminance(rgb):
  """Relative luminance (WCAG 2.2) of 0…255 values."""
  return sum(part * linear(value) for part, value in zip(LUMINANCE, rgb, strict=False))


def contrast(text):
  """Contrast ratio of a text, 1…21; 0 if it cannot be measured."""
  color, back = text['color'], text['back']
  if color is None or back is None:
    return 0.0
  alpha = color[3] * text['opacity']
  front = [c * alpha + b * (1 - alpha) for c, b in zip(color, back, strict=False)]
  high, low = sorted((luminance(front), luminance(back)), reverse=True)
  return (high + 0.05) / (low + 0.05)


def _overlap(one, other):
  """Common area of two boxes, as a share of the smaller one."""
  width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
  height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
  if width <= 0 or height <= 0:
    return 0.0
  return width * height / max(min(one[2] * one[3], other[2] * other[3]), 1e-9)


def _words(text):
  return ' '.join(text.lower().split())


def _layout(page):
  """(proxy, what is wrong) of one window's measures."""
  texts = [t for t in page['texts'] if t['visible']]  # not those for screen readers
  for text in texts:
    shown = repr(text['text'][:40])
    ratio = contrast(text)
    large = text['size'] >= (LARGE_BOLD_PX if text['bold'] else LARGE_PX)
    if not text['disabled'] and ratio < (LARGE_CONTRAST if large else CONTRAST):
      yield 'contrast', f'{shown} has a ratio of {ratio:.2f}'
    if text['size'] < MIN_PX:
      yield 'size', f'{shown} has {text["size"]:g} pixels'
    x, width = text['box'][0], text['box'][2]
    if x < -SLACK_PX or x + width > page['width'] + SLACK_PX:
      yield 'overflow', f'{shown} is outside of {page["width"]} pixels'
  if page['scroll'] > page['width'] + SLACK_PX:
    yield 'overflow', f'{page["scroll"]} pixels wide in a window of {page["width"]}'
  for number, text in enumerate(texts):
    for other in texts[:number]:
      if _overlap(text['box'], other['box']) > MAX_OVERLAP:
        yield 'overlap', f'{text["text"][:40]!r} and {other["text"][:40]!r}'
  for control in page['controls']:
    *_, width, height = control['box']
    shown = repr((control['text'] or control['label'] or control['tag'])[:40])
    if min(width, height) < MIN_TARGET_PX - SLACK_PX:
      yield 'targets', f'{shown} has {width:.0f} × {height:.0f} pixels'
    if control['tag'] != 'select' and control['label']:
      text = control['text']
      is_icon = len(text) <= 1 or not re.search(r'\w', text)  # as × or 🗑
      if not is_icon and _words(text) not in _words(control['label']):
        yield 'names', f'{text[:40]!r} is named {control["label"][:40]!r}'


def pixels(png):
  """'' if a screenshot shows something, or what it is."""
  from PIL import Image, ImageStat

  with Image.open(io.BytesIO(png)) as image:
    grey = image.convert('L')
  deviation = ImageStat.Stat(grey).stddev[0]
  share = max(grey.histogram()) / (grey.width * grey.height)
  if deviation < MIN_DEVIATION or share > MAX_ONE_COLOUR:
    return f'deviation {deviation:.1f}, {share:.2%} of the pixels are alike'
  return ''


def judge(pages, png):
  """[(proxy, passed, evidence)] of the measures at each width and a screenshot."""
  wrong = {name: [] for name in PROXIES}
  for page in pages:
    for name, what in _layout(page):
      wrong[name].append(what)
    if not page['texts']:
      wrong['pixels'].append('no text is seen')
  if reason := pixels(png):
    wrong['pixels'].append(reason)
  widths = ' and '.join(f'{page["width"]}' for page in pages)
  count = sum(len(page['texts']) for page in pages)
  fine = f'{count} texts at widths of {widths} pixels'
  return [(name, not bad, '; '.join(bad[:3]) or fine) for name, bad in wrong.items()]


def encoded(png):
  """A screenshot for the evidence."""
  return base64.b64encode(png).decode()
