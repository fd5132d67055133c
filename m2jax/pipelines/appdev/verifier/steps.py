"""Runs the steps of a criterion in a page, by roles, labels and test ids.

A step is [operation, target, values…]; a target is an object with

    role, name      an ARIA role and the exact accessible name
    label           a form control's label
    testid          data-testid
    within          a target that contains it
    has             a target that it contains, with its exact `text`

What is read must become as expected within `EXPECT_S`, must still be so `STABLE_S`
later, so that a page cannot show one answer after another, and must be what is seen at
its place: `visual.seen`.
"""

import asyncio
import re
import time

import browser
import visual

EXPECT_S, STABLE_S, POLL_S = 3.0, 0.2, 0.05
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
    found = base.get_by_label(target['label'], exact=True)
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


class Runner:
  """Runs steps in one page; `evidence` has a line for each."""

  def __init__(self, page, script):
    self._page, self._meter = page, browser.Meter(page, script)
    self.evidence = []

  async def run(self, steps):
    """Raises Unmet at the first step that fails."""
    for operation, target, *values in steps:
      line = ' '.join([operation, said(target), *map(repr, values)])
      try:
        await getattr(self, f'_{operation}')(target, *values)
      except Unmet as error:
        raise Unmet(f'{line}: {error}') from None
      except Exception as error:
        if not _is_of_the_page(error):
          raise
        raise Unmet(f'{line}: {self._why(error)}') from error
      self.evidence.append(plain(line)[:MAX_SHOWN_CHARS])

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

  async def _expect(self, read, wanted):
    """Polls `read` until it gives `wanted`; it must stay."""
    end, found = time.monotonic() + EXPECT_S, None
    while True:
      try:
        found = await read()
      except Exception as error:
        if time.monotonic() > end:
          raise
        found = f'({type(error).__name__})'
      if found == wanted:
        break
      if time.monotonic() > end:
        raise Unmet(f'found {found!r}'[:MAX_SHOWN_CHARS])
      await asyncio.sleep(POLL_S)
    await asyncio.sleep(STABLE_S)
    again = await read()
    if again != wanted:
      raise Unmet(f'it changes by itself, then {again!r}'[:MAX_SHOWN_CHARS])

  async def _text(self, target, wanted):
    found = locate(self._page, target)

    async def read():
      return plain(await found.inner_text(timeout=1000))

    await self._expect(read, wanted)
    await self._seen([found], [wanted])

  async def _texts(self, target, wanted):
    async def visible():
      every = await locate(self._page, target).all()
      return [one for one in every if await one.is_visible()]

    async def read():
      return [plain(await one.inner_text(timeout=1000)) for one in await visible()]

    await self._expect(read, wanted)
    await self._seen(await visible(), wanted)

  async def _seen(self, found, wanted):
    there = await self._meter.measure()
    for one, text in zip(found, wanted, strict=True):
      box = await one.bounding_box(timeout=1000)
      if text and (reason := visual.seen(box, text, there)):
        raise Unmet(f'{text!r} is {reason}')

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
