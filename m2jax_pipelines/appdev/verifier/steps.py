"""Runs the steps of a criterion in a page, by roles, labels and test ids.

A step is [operation, target, values…]; a target is an object with

    role, name      an ARIA role and the exact accessible name
    label           a form control's label
    testid          data-testid
    within          a target that contains it
    has             a target that it contains, with its exact `text`

A reading must become the expected value within `EXPECT_S`, stay it, and be visible at
its place (`seen`). It stays if it is unchanged `STABLE_S` later (`WATCH_S` if something
else was read first) and before the next action. Alternating readings fail: a value that
reappears, or more than `MAX_VALUES` values.
"""

import asyncio
import re
import time

import browser
import seen

EXPECT_S, STABLE_S, WATCH_S, POLL_S = 3.0, 0.2, 1.2, 0.05
MAX_VALUES, MAX_CHANGES = 3, 1  # of a reading; of yes or no
# Of form controls, which a label names.
_CONTROLS = (
  'textbox searchbox spinbutton combobox listbox checkbox radio slider'.split()
)
_EXPECTATIONS = ('text', 'texts', 'value', 'checked', 'enabled', 'attribute', 'count')
ACTION_MS = 10_000
MAX_SHOWN_CHARS = 200


class Unmet(Exception):
  """A step failed; the message is the evidence."""


def said(target):
  """A target in words."""
  if target is None:
    return 'the page'
  words = ' '.join(str(target[k]) for k in ('role', 'testid') if k in target)
  if 'label' in target:
    words = f'field {target["label"]!r}'
  if 'name' in target:
    words += f' {target["name"]!r}'
  if 'has' in target:
    words += f' of {target["has"]["text"]!r}'
  return words + (f' in {said(target["within"])}' if 'within' in target else '')


def locate(page, target):
  """The locator of a target."""
  base = locate(page, target['within']) if 'within' in target else page
  if 'role' in target:
    name = {'name': target['name'], 'exact': True} if 'name' in target else {}
    found = base.get_by_role(target['role'], **name)
  elif 'label' in target:
    # The text of a label around a select has its options, its accessible name has not.
    found = base.get_by_label(target['label'], exact=True)
    for role in _CONTROLS:
      found = found.or_(base.get_by_role(role, name=target['label'], exact=True))
  else:
    found = base.get_by_test_id(target['testid'])
  if 'has' in target:
    whole = re.compile(r'^\s*' + re.escape(target['has']['text']) + r'\s*$')
    found = found.filter(has=locate(page, target['has']).filter(has_text=whole))
  return found


def plain(text):
  """Text with single spaces."""
  return ' '.join(str(text).split())


def _is_of_the_page(error):
  ours = type(error).__module__.partition('.')[0]
  return ours == 'playwright' or isinstance(error, browser.Unreadable)


class Readings:
  """What was read in turn; values that were read only once in passing do not count."""

  def __init__(self):
    self._values, self._last = [], None

  @property
  def late(self):
    """Whether something else was read before the last value."""
    return len(self._values) > 1

  def add(self, value, *, stays=False):
    """Raises Unmet if values alternate."""
    again, self._last = value == self._last, value
    if not (again or stays) or (self._values and self._values[-1] == value):
      return
    back = value in self._values
    self._values.append(value)
    few = MAX_CHANGES + 1 if isinstance(value, bool) else MAX_VALUES
    if back or len(self._values) > few:
      shown = ', then '.join(map(repr, self._values))
      raise Unmet(f'it changes by itself: found {shown}'[:MAX_SHOWN_CHARS])


class Runner:
  """Runs steps in one page; `evidence` has a line for each."""

  def __init__(self, page, scripts):
    self._page, self._meter = page, browser.Meter(page, scripts)
    self._eye, self._held = seen.Eye(self._meter), []
    self.evidence = []

  async def run(self, steps):
    """Raises Unmet at the first step that fails."""
    for operation, target, *values in steps:
      line = ' '.join([operation, said(target), *map(repr, values)])
      try:
        if operation not in _EXPECTATIONS:
          await self._still()
        await getattr(self, f'_{operation}')(target, *values)
      except Unmet as error:
        raise Unmet(f'{line}: {error}') from None
      except Exception as error:
        if not _is_of_the_page(error):
          raise
        raise Unmet(f'{line}: {self._why(error)}') from error
      self.evidence.append(plain(line)[:MAX_SHOWN_CHARS])
    await self._still()

  def _why(self, error):
    if self._page.is_closed():
      return 'the page was closed'
    lines = [line.strip(' -') for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines[1:] if 'intercepts' in line] or lines[1:][-1:]
    return plain(' / '.join(lines[:1] + telling[:1]))[:MAX_SHOWN_CHARS]

  # Actions --------------------------------------------------------------------------

  async def _fill(self, target, value):
    found = locate(self._page, target)
    await found.fill('', timeout=ACTION_MS)
    if value:
      await found.press_sequentially(value, timeout=ACTION_MS)

  async def _click(self, target):
    await locate(self._page, target).click(timeout=ACTION_MS)

  async def _select(self, target, label):
    await locate(self._page, target).select_option(label=label, timeout=ACTION_MS)

  async def _check(self, target, on=True):
    await locate(self._page, target).set_checked(on, timeout=ACTION_MS)

  async def _press(self, target, key):
    await locate(self._page, target).press(key, timeout=ACTION_MS)

  async def _reload(self, _):
    await self._page.reload(wait_until='load', timeout=browser.LOAD_S * 1000)

  async def _clock(self, _, milliseconds):
    await self._page.clock.run_for(milliseconds)

  # Expectations ---------------------------------------------------------------------

  async def _still(self):
    """What was expected since the last action must still be there."""
    held, self._held = self._held, []
    for read, wanted in held:
      if (again := await read()) != wanted:
        raise Unmet(f'{wanted!r} changes by itself, then {again!r}'[:MAX_SHOWN_CHARS])

  async def _expect(self, read, wanted, look=None):
    """Polls `read` until it gives `wanted`; it must stay, and `look` must say ''."""
    readings = await self._until(read, wanted)
    end = time.monotonic() + (WATCH_S if readings.late else STABLE_S)
    wrong = await look() if look else ''
    while True:
      left = end - time.monotonic()
      await asyncio.sleep(min(max(left, 0), STABLE_S))
      again = await read()
      if again != wanted:
        raise Unmet(f'it changes by itself, then {again!r}'[:MAX_SHOWN_CHARS])
      if left <= STABLE_S:
        break
    if wrong and (wrong := await look()):  # it may have been about to appear
      raise Unmet(wrong)
    self._held.append((read, wanted))

  async def _until(self, read, wanted):
    """The readings, of which the last is `wanted`."""
    readings, end, found = Readings(), time.monotonic() + EXPECT_S, None
    while True:
      try:
        found = await read()
      except Exception as error:
        if time.monotonic() > end:
          raise
        found = f'({type(error).__name__})'
      else:
        readings.add(found, stays=found == wanted)
      if found == wanted:
        return readings
      if time.monotonic() > end:
        raise Unmet(f'found {found!r}'[:MAX_SHOWN_CHARS])
      await asyncio.sleep(POLL_S)

  async def _text(self, target, wanted):
    found = locate(self._page, target)

    async def read():
      return plain(await found.inner_text(timeout=1000))

    async def look():
      return await self._eye.look([await found.bounding_box(timeout=1000)], [wanted])

    await self._expect(read, wanted, look)

  async def _texts(self, target, wanted):
    async def visible():
      every = await locate(self._page, target).all()
      return [one for one in every if await one.is_visible()]

    async def read():
      return [plain(await one.inner_text(timeout=1000)) for one in await visible()]

    async def look():
      boxes = [await one.bounding_box(timeout=1000) for one in await visible()]
      if len(boxes) != len(wanted):
        return f'there are {len(boxes)} texts'
      return await self._eye.look(boxes, wanted)

    await self._expect(read, wanted, look)

  async def _value(self, target, wanted):
    found = locate(self._page, target)
    await self._expect(lambda: found.input_value(timeout=1000), wanted)

  async def _checked(self, target, wanted):
    found = locate(self._page, target)
    await self._expect(lambda: found.is_checked(timeout=1000), wanted)

  async def _enabled(self, target, wanted):
    found = locate(self._page, target)
    await self._expect(lambda: found.is_enabled(timeout=1000), wanted)

  async def _attribute(self, target, name, wanted):
    found = locate(self._page, target)
    await self._expect(lambda: found.get_attribute(name, timeout=1000), wanted)

  async def _count(self, target, wanted):
    async def read():
      every = await locate(self._page, target).all()
      return sum([await one.is_visible() for one in every])

    await self._expect(read, wanted)
