"""One page of MiniWoB++ that an agent reads and acts on: lines, clicks, text, options.

An agent names elements by number and gives text; both travel to the page as data. The
page itself judges: `core.endEpisode` sets a reward, which is taken at the first action
after which the episode has ended, and no action follows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2jax.tasks import task as task_lib
from m2jax.tasks.clicks import browser as browser_lib
from m2jax.tasks.clicks import families

ENDED = 'The page has ended.'
MAX_TEXT = 120  # characters of an argument
_ATTEMPTS = 20


@functools.cache
def _script() -> Mapping[str, str]:
  """The functions of page.js, by name."""
  text = (Path(__file__).parent / 'page.js').read_text(encoding='utf-8')
  names = ('start', 'ended', 'utterance', 'view', 'locate', 'kind', 'ready', 'choose')
  return {name: f'(argument) => {text.rstrip()}.{name}(argument)' for name in names}


class Page:
  """An open page; its methods run on the browser's loop.

  Attributes:
    utterance: what the page asks for.
    first: its lines at the beginning.
    reward: MiniWoB's reward without the discount; None while the episode goes on.
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
    context, playwrights = await browser.open(families.root(), name)
    page = cls(context, playwrights)
    try:
      page._state = await playwrights.evaluate_handle('() => ({elements: []})')
      for attempt in range(_ATTEMPTS):
        if await page._do('start', f'{seed}/{attempt}'):
          break
      else:
        raise ValueError(f'{family}: no problem for the seed {seed!r}')
      page.utterance = await page._do('utterance')
      page.first = page._lines = await page._do('view', page._state)
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
    place = await self._do('locate', [self._state, ref])
    if 'error' in place:
      raise task_lib.BadCall(f'[{ref}] {place["error"]}')
    await self._page.mouse.click(place['x'], place['y'])
    return await self._changes()

  async def type(self, ref: int, text: str) -> str:
    """Clicks a field and replaces its text. Raises BadCall."""
    if await self._do('kind', [self._state, ref]) != 'field':
      raise task_lib.BadCall(f'[{ref}] is no text field')
    shown = await self.click(ref)
    if self.reward is not None:
      return shown
    if not await self._do('ready', [self._state, ref]):
      return f'not typed\n{shown}'
    if text:
      await self._page.keyboard.insert_text(text)
    else:
      await self._page.keyboard.press('Delete')
    return _joined(shown, await self._changes())

  async def select(self, ref: int, option: str) -> str:
    """Chooses an option of a list. Raises BadCall."""
    if await self._do('kind', [self._state, ref]) != 'list':
      raise task_lib.BadCall(f'[{ref}] is no list')
    if not await self._do('choose', [self._state, ref, option]):
      raise task_lib.BadCall(f'[{ref}] has no such option')
    return await self._changes()

  async def judge(self) -> float | None:
    """The reward so far; None if the episode has not ended."""
    if self.reward is None:
      done, reward = await self._do('ended')
      self.reward = float(reward) if done else None
    return self.reward

  async def _do(self, name: str, argument: Any = None) -> Any:
    return await self._page.evaluate(_script()[name], argument)

  async def _changes(self) -> str:
    """The lines that the last ones did not have, and the references that are gone."""
    if await self.judge() is not None:
      return ENDED
    before, self._lines = self._lines, await self._do('view', self._state)
    new = [line for line in self._lines if line not in before]
    now = {_ref(line) for line in self._lines}
    gone = [_ref(line) for line in before if _ref(line) not in now]
    if gone:
      new.append(f'gone: {" ".join(gone)}')
    return '\n'.join(new)


def _ref(line: str) -> str:
  """'[3]' of a line; '' of plain text."""
  return line.partition(' ')[0] if line.startswith('[') else ''


def _joined(*shown: str) -> str:
  """Observations of one call; the last state of a reference."""
  if shown[-1] == ENDED:
    return ENDED
  return '\n'.join(dict.fromkeys(filter(None, '\n'.join(shown).split('\n'))))
