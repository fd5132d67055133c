"""Draws the specs of click tasks, and the tasks: tools over a page."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from m2jax import sandbox
from m2jax.checks import require
from m2jax.tasks import task as task_lib
from m2jax_pipelines.tasks.clicks import browser
from m2jax_pipelines.tasks.clicks.page import ENDED, MAX_TEXT, Page
from m2jax_pipelines.tasks.clicks.pages import FAMILIES, HELD_OUT, root

SPLITS = ('train', 'dev', 'held_out')


def _tool(name: str, description: str, **others: str) -> Mapping[str, Any]:
  types = {'ref': 'integer', **others}
  return {
    'type': 'function',
    'function': {
      'name': name,
      'description': description,
      'parameters': {
        'type': 'object',
        'properties': {key: {'type': value} for key, value in types.items()},
        'required': list(types),
      },
    },
  }


TOOLS = (
  _tool('click', 'Click [ref].'),
  _tool('type', 'Replace the text of a field.', text='string'),
  _tool('select', 'Choose an option of a list.', option='string'),
)
_ARGUMENTS = {
  tool['function']['name']: tuple(tool['function']['parameters']['properties'])
  for tool in TOOLS
}


@dataclasses.dataclass(frozen=True)
class ClicksConfig(task_lib.TasksConfig):
  """Distribution of the click tasks.

  Attributes:
    weights: as in `TasksConfig`, of families that are not held out; empty: all of
      them are equally frequent. The split held_out has the held-out families too if
      this is empty.
    spare_calls: tool calls allowed beyond what the family's longest solution needs.
  """

  kind: str = 'clicks'
  spare_calls: int = 2

  def __post_init__(self):
    super().__post_init__()
    known = set(self.weights) <= set(FAMILIES) - set(HELD_OUT)
    require(self, known, 'weights', f'of {sorted(set(FAMILIES) - set(HELD_OUT))}')
    positive = not self.weights or min(self.weights.values()) >= 0 < sum(
      self.weights.values()
    )
    require(self, positive, 'weights', 'none below 0 and some above')
    require(self, 0 <= self.spare_calls <= 16, 'spare_calls', '0-16')


@dataclasses.dataclass(frozen=True)
class ClicksEnvironment(task_lib.Environment):
  """An environment with a page."""

  page: Page | None = None


@dataclasses.dataclass(frozen=True)
class ClicksTask:
  """A `tasks.Task` over a page of MiniWoB++.

  Attributes:
    seed: seed of the page's problem.
    partial_credit: factor on a reward between 0 and 1, of a page that gives such.
  """

  spec: str
  family: str
  split: str
  seed: str
  max_tool_calls: int
  baseline_calls: int
  partial_credit: float = 0.0
  tools: Sequence[Mapping[str, Any]] = TOOLS

  @functools.cached_property
  def instruction(self) -> str:
    """What the page asks for, and its lines. Opens the page if none has been open.

    Raises:
      BrowserError, SandboxUnavailable: the page cannot be opened.
    """

    async def first() -> str:
      page = await Page.open(shared, self.family, self.seed)
      await page.close()
      return _instruction(page)

    root()
    shared = browser.shared()
    return shared.start(first()).result()

  @contextlib.asynccontextmanager
  async def open(
    self, *, backend: str, limits: sandbox.Limits
  ) -> AsyncIterator[ClicksEnvironment]:
    """Opens the page, in the process's browser. See `tasks.Task.open`."""
    del backend, limits  # no command of the agent's runs
    root()
    shared = browser.shared()
    page = await browser.run(Page.open(shared, self.family, self.seed))
    self.__dict__.setdefault('instruction', _instruction(page))

    async def execute(name: str, arguments: Mapping[str, Any]) -> str:
      ref, text = _checked(name, arguments)
      if page.reward is not None:
        raise task_lib.BadCall(f'{ENDED} Answer.')
      call = getattr(page, name)
      return await browser.run(call(ref) if text is None else call(ref, text))

    try:
      yield ClicksEnvironment(execute, page=page)
    finally:
      closing = asyncio.ensure_future(browser.run(page.close()))
      await asyncio.shield(closing)

  async def verify(self, environment: ClicksEnvironment, answer: str) -> float:
    """MiniWoB's reward if it is 1; the answer does not matter.

    A smaller reward, which pages give for results that are right in part, counts with
    `partial_credit`; one below 0, and a page that has not ended, count 0.
    """
    reward = await browser.run(environment.page.judge())
    if reward is None or reward <= 0:
      return 0.0
    return 1.0 if reward >= 1 else self.partial_credit * reward


def _instruction(page: Page) -> str:
  return '\n'.join([page.utterance, *page.first])


def _checked(name: str, arguments: Mapping[str, Any]) -> tuple[int, str | None]:
  """(ref, text) of a call; a text for tools that take one. Raises BadCall."""
  if name not in _ARGUMENTS:
    raise task_lib.BadCall(f'no tool {name[:20]!r}; use {", ".join(_ARGUMENTS)}')
  if set(arguments) != set(_ARGUMENTS[name]):
    raise task_lib.BadCall(f'{name} takes {", ".join(_ARGUMENTS[name])}')
  ref = arguments['ref']
  if isinstance(ref, str) and ref.isascii() and ref.isdecimal() and len(ref) < 5:
    ref = int(ref)
  if type(ref) is not int or not 0 < ref < 10_000:
    raise task_lib.BadCall('ref must be the number of a line')
  if name == 'click':
    return ref, None
  text = arguments[_ARGUMENTS[name][1]]
  if not isinstance(text, str) or len(text) > MAX_TEXT or not _plain(text):
    raise task_lib.BadCall(
      f'{_ARGUMENTS[name][1]} must be one line of at most {MAX_TEXT} characters'
    )
  return ref, text


def _plain(text: str) -> bool:
  """Whether a text has no control characters and no lone surrogates."""
  return all(c == ' ' or (c.isprintable() and not c.isspace()) for c in text)


def families(config: ClicksConfig) -> Mapping[str, float]:
  """Relative frequency of each family that is not held out; equal without weights."""
  names = [name for name in FAMILIES if name not in HELD_OUT]
  return dict(config.weights) or dict.fromkeys(names, 1.0)


_DEFAULT = ClicksConfig()


def spec(
  split: str,
  index: int,
  seed: int = 0,
  config: ClicksConfig = _DEFAULT,
  family: str | None = None,
) -> str:
  """Returns the spec of the index-th task of a stream; see `tasks.spec`.

  Raises:
    ValueError: unknown split or family, a family that is held out, or a negative index.
  """
  if split not in SPLITS:
    raise ValueError(f'unknown split {split!r}: expected one of {SPLITS}')
  if index < 0:
    raise ValueError(f'task index is {index}: expected 0 or more')
  weights = families(config)
  if split == 'held_out' and not config.weights:
    weights = {**weights, **dict.fromkeys(HELD_OUT, 1.0)}
  if family is None:
    names = sorted(weights)
    rng = random.Random(f'family/{split}/{seed}/{index}')
    family = rng.choices(names, [weights[name] for name in names])[0]
  _check(split, family)
  changes = config.changes()
  name = f'clicks/{split}/{family}/{seed}/{index}'
  return f'{name}?{changes}' if changes else name


def _check(split: str, family: str) -> None:
  if family not in FAMILIES:
    raise ValueError(f'unknown family {family!r}: expected one of {sorted(FAMILIES)}')
  if family in HELD_OUT and split != 'held_out':
    raise ValueError(f'family {family!r} is held out: none of the split {split!r}')


@functools.lru_cache(maxsize=4096)
def make(spec: str) -> ClicksTask:
  """Returns the task that a spec names.

  Raises:
    ValueError: `spec` does not come from `clicks.spec`.
  """
  name, _, changes = spec.partition('?')
  parts = name.split('/')
  if len(parts) != 5 or parts[0] != 'clicks' or parts[1] not in SPLITS:
    raise ValueError(
      f'{spec!r} is no click task: expected clicks/SPLIT/FAMILY/SEED/INDEX'
    )
  _check(parts[1], parts[2])
  try:
    config = ClicksConfig(**json.loads(changes or '{}'))
  except TypeError as error:
    raise ValueError(f'{spec!r}: unknown settings: {error}') from error
  split, family = parts[1:3]
  return ClicksTask(
    spec=spec,
    family=family,
    split=split,
    seed=name,  # not with the settings: they do not change the page
    max_tool_calls=FAMILIES[family].most + config.spare_calls,
    baseline_calls=FAMILIES[family].calls,
    partial_credit=config.partial_credit,
  )
