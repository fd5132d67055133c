"""One page of MiniWoB++ that an agent reads and acts on: lines, clicks, text, options.

An agent names elements by number and gives text; both travel to the page as data. The
page itself judges: `core.endEpisode` sets a reward, which is taken at the first action
after which the episode has ended, and no action follows.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from m2jax.tasks import task as task_lib
from m2jax_pipelines.tasks.clicks import browser as browser_lib
from m2jax_pipelines.tasks.clicks import pages

ENDED = 'The page has ended.'
NOT_TYPED = 'not typed'  # the click did not put the focus into the field
MAX_TEXT = 120  # characters of an argument
_ATTEMPTS = 20


@functools.cache
def _script() -> str:
  return (Path(__file__).parent / 'page.js').read_text(encoding='utf-8')


class Page:
  """An open page; its methods run on the browser's loop.

  Attributes:
    utterance: what the page asks for.
    first: its lines at the beginning.
    reward: MiniWoB's reward without the discount; None while the episode continues.
  """

  utterance: str
  first: list[str]
  reward: float | None = None

  def __init__(self, context: Any, page: Any):
    self._context, self._page = context, page

  @classmethod
  async def open(cls, browser: browser_lib.Browser, family: str, seed: str) -> Page:
    """Opens the page of a family with the problem of a seed.

    A seed for which the page fails to make a problem (`click-collapsible-2` without a
    link) is replaced by the next, so that a seed is always the same problem.
    """
    name = f'miniwob/{family}.html'
    context, playwrights = await browser.open(pages.root(), name)
    page = cls(context, playwrights)
    try:
      page._state = await playwrights.evaluate_handle('() => ({elements: []})')
      for attempt in range(_ATTEMPTS):
        begun = await page._do('begin', page._state, f'{seed}/{attempt}')
        if begun is not None:
          break
      else:
        raise ValueError(f'{family}: no problem for the seed {seed!r}')
      page.utterance = begun['utterance']
      page.first = page._lines = begun['lines']
    except BaseException:
      await page.close()
      raise
    return page

  async def close(self) -> None:
    await browser_lib.closed(self._context)

  async def click(self, ref: int) -> str:
    """Clicks the middle of an element; returns the lines that are new.

    Raises:
      BadCall: it cannot be clicked.
    """
    await self._press(ref)
    return await self._changes()

  async def type(self, ref: int, text: str) -> str:
    """Clicks a field and replaces its text. Raises BadCall."""
    await self._press(ref, 'field')
    if not await self._do('ready', self._state, ref):
      shown = await self._changes()
      return shown if shown == ENDED else f'{NOT_TYPED}\n{shown}'
    if text:
      await self._page.keyboard.insert_text(text)
    else:
      await self._page.keyboard.press('Delete')
    return await self._changes()

  async def select(self, ref: int, option: str) -> str:
    """Chooses an option of a list. Raises BadCall."""
    _checked(ref, await self._do('choose', self._state, ref, option))
    return await self._changes()

  async def judge(self) -> float | None:
    """The reward so far; None if the episode has not ended."""
    if self.reward is None:
      self.reward = await self._do('reward')
    return self.reward

  async def _do(self, name: str, *arguments: Any) -> Any:
    argument = arguments[0] if len(arguments) == 1 else list(arguments)
    return await self._page.evaluate(_script(), [name, argument])

  async def _press(self, ref: int, kind: str = '') -> None:
    """Clicks an element of a kind, if one is given. Raises BadCall."""
    place = _checked(ref, await self._do('locate', self._state, ref, kind))
    await self._page.mouse.click(place['x'], place['y'])

  async def _changes(self) -> str:
    """The lines that the last ones did not have, and the references that are gone."""
    seen = await self._do('look', self._state)
    if seen['reward'] is not None:
      self.reward = seen['reward']
      return ENDED
    before, self._lines = self._lines, seen['lines']
    new = [line for line in self._lines if line not in before]
    now = {_ref(line) for line in self._lines}
    gone = [_ref(line) for line in before if _ref(line) not in now]
    if gone:
      new.append(f'gone: {" ".join(gone)}')
    return '\n'.join(new) or 'no change'


def _checked(ref: int, result: dict[str, Any]) -> dict[str, Any]:
  if 'error' in result:
    raise task_lib.BadCall(f'[{ref}] {result["error"]}')
  return result


def _ref(line: str) -> str:
  """'[3]' of a line; '' of plain text."""
  return line.partition(' ')[0] if line.startswith('[') else ''
