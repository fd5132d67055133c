"""Judges deck.pptx: its slides, its layout, and a chart that equals the data.

spec.json has the titles in order, texts that a slide must contain in their order, names
that it must not contain, and the chart. Rules of layout: everything within the slide,
nothing on top of something else, text of at least `MIN_POINTS` that fits its box by an
estimate of its width. `guard` refuses hostile files, and `parts` decks with anything
but what is known to be harmless; `look`, `fit` and `charts` judge what a reader sees.
"""

import io
import json
import os
import re
import sys
import sysconfig

TESTS = os.environ.get('M2JAX_TESTS', os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, TESTS)  # isolated, Python does not

import charts  # noqa: E402
import fit  # noqa: E402
import look  # noqa: E402

DECK = 'deck.pptx'
MIN_POINTS = 12.0  # on a slide whose shorter side is `SIDE`
MAX_OVERLAP = 0.01  # of the smaller shape
_OPENING, _CLOSING = '("\'“‘', '.,:;)"\'”’!'
INCH, SIDE, MIN_SIDE, MAX_SIDE = 914400, 7.5, 4.0, 25.0  # in inches


class Wrong(Exception):
  """The deck fails; the message is the reason."""


def load(data):
  """The presentation of bytes. Raises Wrong."""
  import guard
  import parts
  import pptx

  if reason := guard.check(data):
    raise Wrong(f'refused: {reason}')
  try:
    reason = parts.check(data)
  except Exception as error:
    reason = f'not a presentation: {type(error).__name__}'
  if reason:
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
    if reason := look.placeholders(slide):
      raise Wrong(f'slide {number}: {reason}')
    title = slide.shapes.title
    found = '' if title is None else ' '.join(title.text_frame.text.split())
    if found.casefold() != wanted['title'].casefold() or look.strange(found):
      raise Wrong(f'slide {number}: the title is {found[:60]!r}')
    if wanted['texts']:
      if reason := look.plain(slide):
        raise Wrong(f'slide {number}: {reason}')
      shapes = fit.in_order(s for s in slide.shapes if s.has_text_frame)
      _check_facts(number, '\n'.join(s.text_frame.text for s in shapes), wanted)


def _check_facts(number, text, wanted):
  """Raises Wrong unless a text has the facts in their order, and no others."""
  if reason := look.strange(text):
    raise Wrong(f'slide {number}: {reason}')
  text = re.sub(r'(?<=\d),(?=\d{3}(?!\d))', '', text)
  words = [word.lstrip(_OPENING).rstrip(_CLOSING) for word in text.split()]
  place = -1
  for fact in wanted['texts']:
    if fact not in words[place + 1 :]:
      raise Wrong(f'slide {number} does not say {fact} in its place')
    place = words.index(fact, place + 1)
  if set(re.findall(r'\d+', text)) - set(wanted['texts']):
    raise Wrong(f'slide {number} says other numbers')
  if name := look.says(text, wanted['others']):
    raise Wrong(f'slide {number} says {name}')


def check_layout(deck):
  """Raises Wrong if a rule of layout is broken."""
  least = least_points(deck)
  for number, slide in enumerate(deck.slides, 1):
    shapes = list(slide.shapes)
    boxes = []
    for shape in shapes:
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
        _check_text(number, shape, least)
        if reason := look.contrast(slide, shape):
          raise Wrong(f'slide {number}: {reason}')


def _overlap(one, other):
  """Common area of two boxes, as a share of the smaller one."""
  width = min(one[0] + one[2], other[0] + other[2]) - max(one[0], other[0])
  height = min(one[1] + one[3], other[1] + other[3]) - max(one[1], other[1])
  if width <= 0 or height <= 0:
    return 0.0
  return width * height / min(one[2] * one[3], other[2] * other[3])


def least_points(deck):
  """The smallest size of text, by the size of the slides. Raises Wrong if unusual."""
  sides = deck.slide_width / INCH, deck.slide_height / INCH
  if min(sides) < MIN_SIDE or max(sides) > MAX_SIDE:
    raise Wrong(f'the size of the slides is {sides[0]:.4g} by {sides[1]:.4g} inches')
  return MIN_POINTS * max(1.0, min(sides) / SIDE)


def _check_text(number, shape, least):
  """Raises Wrong if text is small, or does not fit into its box."""
  if not shape.text_frame.text.strip():
    return
  sizes = [s for runs, _ in look.paragraphs(shape) for t, s, _ in runs if t.strip()]
  if min(sizes) < least:
    raise Wrong(
      f'slide {number}: {shape.name} has text of {min(sizes):g} points, not {least:g}'
    )
  if reason := fit.wrong(shape):
    raise Wrong(f'slide {number}: {reason}')


def check_chart(deck, chart):
  """Raises Wrong unless the one chart of its slide has exactly the data."""
  slide = deck.slides[chart['slide'] - 1]
  shapes = [shape for shape in slide.shapes if shape.has_chart]
  if len(shapes) != 1:
    raise Wrong(f'slide {chart["slide"]} has {len(shapes)} charts')
  found = shapes[0].chart
  plots = list(found.plots)
  series = [one for plot in plots for one in plot.series]
  if len(plots) != 1 or len(series) != 1:
    raise Wrong('the chart is not one series')
  if [str(c) for c in plots[0].categories] != chart['categories']:
    raise Wrong('the categories of the chart differ from the data')
  if not _same(list(series[0].values), chart['values']):
    raise Wrong('the values of the chart differ from the data')
  source = charts.source(found)
  if isinstance(source, str):
    raise Wrong(source)
  if source[0] != chart['categories'] or not _same(source[1], chart['values']):
    raise Wrong('the workbook of the chart differs from the data')
  if reason := charts.wrong(slide, shapes[0], deck, chart, least_points(deck)):
    raise Wrong(reason)


def _same(values, wanted):
  return len(values) == len(wanted) and all(
    isinstance(v, int | float) and abs(v - w) <= 1e-9 * max(1, abs(w))
    for v, w in zip(values, wanted, strict=True)
  )


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
  sys.path.insert(0, os.environ.get('M2JAX_SITE') or sysconfig.get_path('purelib'))
  with open(os.path.join(TESTS, 'spec.json'), encoding='utf-8') as file:
    spec = json.load(file)
  import pptx  # noqa: F401  What fails from here on counts against the deck.

  print('m2jax: ready', flush=True)
  tree, data = os.environ.get('M2JAX_TREE', '/workspace'), None
  path = os.path.join(tree, DECK)
  if os.path.isfile(path) and not os.path.islink(path):
    with open(path, 'rb') as file:
      data = file.read((2 << 20) + 1)
  reward, reason = judge(data, spec)
  logs = os.environ.get('M2JAX_LOGS', '/logs/verifier')
  with open(os.path.join(logs, 'details.json'), 'w', encoding='utf-8') as file:
    json.dump({'reason': reason}, file)
  with open(os.path.join(logs, 'reward.txt'), 'w', encoding='utf-8') as file:
    file.write(str(reward))


if __name__ == '__main__':
  main()
