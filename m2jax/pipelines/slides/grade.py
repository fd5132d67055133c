"""Judges deck.pptx: its slides, its layout, and a chart that equals the data.

spec.json has the titles in order, texts that a slide must contain, and the chart. Rules
of layout: everything within the slide, nothing on top of something else, text of at
least `MIN_POINTS` that fits its box by an estimate of its width. The file is refused
first by `guard`.
"""

import io
import json
import os
import sys

TESTS = os.environ.get('M2JAX_TESTS', os.path.dirname(os.path.abspath(__file__)))
DECK = 'deck.pptx'
MIN_POINTS, DEFAULT_POINTS = 12.0, {True: 44.0, False: 18.0}  # of titles, of others
CHAR_WIDTH, LINE_HEIGHT = 0.5, 1.2  # of the font size
MAX_OVERLAP = 0.01  # of the smaller shape
EMU_PER_POINT = 12700


class Wrong(Exception):
  """The deck fails; the message is the reason."""


def load(data):
  """The presentation of bytes. Raises Wrong."""
  import guard
  import pptx

  if reason := guard.check(data):
    raise Wrong(f'refused: {reason}')
  try:
    return pptx.Presentation(io.BytesIO(data))
  except Exception as error:
    raise Wrong(f'refused: not a presentation: {type(error).__name__}') from None


def check_slides(deck, spec):
  """Raises Wrong unless titles and texts are those of the spec."""
  slides = list(deck.slides)
  if len(slides) != len(spec['slides']):
    raise Wrong(f'{len(slides)} slides, not {len(spec["slides"])}')
  for number, (slide, wanted) in enumerate(zip(slides, spec['slides'], strict=True), 1):
    if slide._element.get('show') in ('0', 'false'):
      raise Wrong(f'slide {number} is hidden')
    title = slide.shapes.title
    found = '' if title is None else ' '.join(title.text_frame.text.split())
    if found.casefold() != wanted['title'].casefold():
      raise Wrong(f'slide {number}: the title is {found[:60]!r}')
    texts = [s.text_frame.text for s in slide.shapes if s.has_text_frame]
    words = ' '.join(texts).replace(',', '').split()
    for text in wanted['texts']:
      if text not in [word.strip('.:;()') for word in words]:
        raise Wrong(f'slide {number} does not say {text}')


def check_layout(deck):
  """Raises Wrong if a rule of layout is broken."""
  for number, slide in enumerate(deck.slides, 1):
    shapes = list(slide.shapes)
    boxes = []
    for shape in shapes:
      if shape.shape_type is not None and int(shape.shape_type) == 6:
        raise Wrong(f'slide {number}: grouped shapes are not allowed')
      place = shape.left, shape.top, shape.width, shape.height
      if None in place or shape.width <= 0 or shape.height <= 0:
        raise Wrong(f'slide {number}: {shape.name} has no place')
      if (
        min(shape.left, shape.top) < 0
        or shape.left + shape.width > deck.slide_width
        or shape.top + shape.height > deck.slide_height
      ):
        raise Wrong(f'slide {number}: {shape.name} is not within the slide')
      for name, box in boxes:
        if _overlap(box, place) > MAX_OVERLAP:
          raise Wrong(f'slide {number}: {shape.name} is on top of {name}')
      boxes.append((shape.name, place))
      if shape.has_text_frame:
        _check_text(number, shape, shape == slide.shapes.title)


def _overlap(one, other):
  """Common area of two boxes, as a share of the smaller one."""
  width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
  height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
  if width <= 0 or height <= 0:
    return 0.0
  return width * height / min(one[2] * one[3], other[2] * other[3])


def _check_text(number, shape, is_title):
  """Raises Wrong if text is small, or more than its box has room for."""
  needed = 0.0
  for paragraph in shape.text_frame.paragraphs:
    sizes = [run.font.size or paragraph.font.size for run in paragraph.runs]
    points = [DEFAULT_POINTS[is_title] if s is None else s.pt for s in sizes]
    if paragraph.text.strip() and min(points, default=MIN_POINTS) < MIN_POINTS:
      raise Wrong(f'slide {number}: {shape.name} has text of {min(points):g} points')
    size = max(points, default=MIN_POINTS)
    width = shape.width / EMU_PER_POINT
    lines = max(1, -(-len(paragraph.text) * CHAR_WIDTH * size // width))
    needed += lines * LINE_HEIGHT * size
  if needed > shape.height / EMU_PER_POINT:
    raise Wrong(f'slide {number}: the text of {shape.name} overflows')


def check_chart(deck, chart):
  """Raises Wrong unless the one chart of its slide has exactly the data."""
  slide = deck.slides[chart['slide'] - 1]
  found = [shape.chart for shape in slide.shapes if shape.has_chart]
  if len(found) != 1:
    raise Wrong(f'slide {chart["slide"]} has {len(found)} charts')
  plots = list(found[0].plots)
  series = [one for plot in plots for one in plot.series]
  if len(plots) != 1 or len(series) != 1:
    raise Wrong('the chart is not one series')
  if [str(c) for c in plots[0].categories] != chart['categories']:
    raise Wrong('the categories of the chart differ from the data')
  values = list(series[0].values)
  same = len(values) == len(chart['values']) and all(
    v is not None and abs(v - w) <= 1e-9 * max(1, abs(w))
    for v, w in zip(values, chart['values'], strict=True)
  )
  if not same:
    raise Wrong('the values of the chart differ from the data')


def judge(data, spec):
  """Returns (reward, reason) for the bytes of a deck, None if absent."""
  if data is None:
    return 0, f'no {DECK}'
  try:
    deck = load(data)
    check_slides(deck, spec)
    check_layout(deck)
    check_chart(deck, spec['chart'])
  except Wrong as error:
    return 0, str(error)
  except Exception as error:
    return 0, f'the deck cannot be read: {type(error).__name__}: {error}'[:300]
  return 1, ''


def main():
  sys.path[:0] = [p for p in (os.environ.get('M2JAX_SITE'), TESTS) if p]
  with open(os.path.join(TESTS, 'spec.json'), encoding='utf-8') as file:
    spec = json.load(file)
  import pptx  # noqa: F401  What fails from here on is the deck's doing.

  print('m2jax: ready', flush=True)
  path, data = os.path.join(os.environ['M2JAX_TREE'], DECK), None
  if os.path.isfile(path) and not os.path.islink(path):
    with open(path, 'rb') as file:
      data = file.read((2 << 20) + 1)
  reward, reason = judge(data, spec)
  logs = os.environ.get('M2JAX_LOGS', '/logs/verifier')
  with open(os.path.join(logs, 'reward.json'), 'w', encoding='utf-8') as file:
    json.dump({'reason': reason}, file)
  with open(os.path.join(logs, 'reward.txt'), 'w', encoding='utf-8') as file:
    file.write(str(reward))


if __name__ == '__main__':
  main()
