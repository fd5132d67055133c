"""The scripted teacher: solves every page from the lines that an agent sees.

Its thought names what it looks for and the number it found, and it makes no mistakes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from m2jax.tasks import demonstrations
from m2jax.tasks import task as task_lib
from m2jax.tasks.demonstrations import Lesson, Turn
from m2jax_pipelines.tasks.clicks.page import ENDED, NOT_TYPED
from m2jax_pipelines.tasks.clicks.task import ClicksTask

_LINE = re.compile(r'\[(\d+)\] (\w+) ?(.*)')


@dataclasses.dataclass(frozen=True)
class TeacherConfig(demonstrations.TeacherConfig):
  """A teacher without mistakes."""

  kind: str = 'clicks'


class Line(NamedTuple):
  """A line of a page; plain text has the reference 0 and no kind.

  Attributes:
    rest: its name, then ' = ' and its value if it has one.
  """

  ref: int
  kind: str
  rest: str

  @property
  def name(self) -> str:
    return self.rest.removesuffix(' (disabled)').partition(' =')[0]


class Seen:
  """What the teacher has seen of a page.

  Attributes:
    ask: what the page asks for.
    lines: lines of the whole page, in order at the beginning; new ones at the end.
  """

  def __init__(self, instruction: str):
    self.ask, *lines = instruction.split('\n')
    self.lines = [_parse(line) for line in lines]

  def asked(self, pattern: str) -> list[str]:
    """The groups of a pattern in what is asked for."""
    found = re.search(pattern, self.ask)
    if found is None:
      raise ValueError(f'the teacher does not understand {self.ask!r}')
    return list(found.groups())

  def update(self, shown: str) -> None:
    """Takes in an observation: new lines, and what is gone."""
    for text in shown.split('\n'):
      gone = {int(ref) for ref in re.findall(r'\[(\d+)\]', text)}
      new = _parse(text)
      if text.startswith('gone: '):
        self.lines = [line for line in self.lines if line.ref not in gone]
      elif new.ref in (known := [line.ref for line in self.lines]) and new.ref:
        self.lines[known.index(new.ref)] = new
      else:
        self.lines.append(new)

  def all(self, *kinds: str) -> list[Line]:
    return [line for line in self.lines if line.kind in kinds]

  def find(self, kind: str, name: str | None = None) -> int:
    """Reference of the first line of a kind, with a name; 0 if there is none."""
    for line in self.all(kind):
      if name is None or line.name == name:
        return line.ref
    return 0


def _parse(text: str) -> Line:
  found = _LINE.fullmatch(text)
  return Line(int(found[1]), found[2], found[3]) if found else Line(0, '', text)


Steps = Iterator[Turn]


def _click(name: str, ref: int) -> Turn:
  return Turn(f'{name} is {ref}', 'click', {'ref': ref})


def _type(name: str, ref: int, text: str) -> Turn:
  return Turn(f'{name} is {ref}', 'type', {'ref': ref, 'text': text})


def _press(seen: Seen, name: str = 'Submit') -> Turn:
  return _click(name, seen.find('button', name))


def _named(kind: str, pattern: str) -> Callable[[Seen], Steps]:
  """Clicks the one element of a kind that is asked for by name."""

  def steps(seen: Seen) -> Steps:
    [name] = seen.asked(pattern)
    yield _click(name, seen.find(kind, {'x': 'Close'}.get(name, name)))

  return steps


def _first(kind: str) -> Callable[[Seen], Steps]:
  """Clicks the only element of a kind."""

  def steps(seen: Seen) -> Steps:
    yield _click(kind, seen.find(kind))

  return steps


def _sequence(seen: Seen) -> Steps:
  for name in seen.asked(r'button (\w+), then click button (\w+)'):
    yield _press(seen, name)


def _checked(seen: Seen) -> Steps:
  """Boxes or options, then Submit."""
  [names] = seen.asked(r'Select (.*) and click Submit')
  for name in names.split(', ') if names != 'nothing' else ():
    yield _click(name, seen.find('checkbox', name) or seen.find('radio', name))
  yield _press(seen)


def _chosen(seen: Seen) -> Steps:
  [asked] = seen.asked(r'Select (.*) from the (?:scroll )?list')
  [line] = seen.all('list')
  options = line.name.split(' | ')
  for name in [asked] if asked in options else asked.split(', '):
    yield Turn(f'list is {line.ref}', 'select', {'ref': line.ref, 'option': name})
  yield _press(seen)


def _behind(kind: str) -> Callable[[Seen], Steps]:
  """Opens tabs or sections until the link that is asked for is there."""

  def steps(seen: Seen) -> Steps:
    [name] = seen.asked(r'link "(.*)"')
    for line in seen.all(kind):
      if seen.find('link', name):
        break
      if not line.rest.endswith(' = on'):
        yield Turn(f'no {name}', 'click', {'ref': line.ref})
    yield _click(name, seen.find('link', name))

  return steps


def _section(seen: Seen) -> Steps:
  yield _click('section', seen.find('tab'))
  yield _press(seen)


def _widget(seen: Seen) -> Steps:
  [kind] = seen.asked(r'"(\w+)" widget')
  yield _click(kind, seen.find(kind))


def _nth(seen: Seen) -> Steps:
  [number] = seen.asked(r'(\d)\w\w input')
  yield _click(f'text {number}', seen.all('text')[int(number) - 1].ref)


def _text(pattern: str) -> Callable[[Seen], Steps]:
  """Types what is asked for into every field, then Submit."""

  def steps(seen: Seen) -> Steps:
    text, *case = seen.asked(pattern)
    text = {'upper': text.upper(), 'lower': text.lower()}.get(*case or [''], text)
    for line in seen.all('text'):
      yield _type(line.name or 'text', line.ref, text)
    yield _press(seen)

  return steps


def _login(seen: Seen) -> Steps:
  button = seen.all('button')[0]
  texts = seen.asked(r'username "(.*)" and the password "(.*)" into')
  for line, text in zip(seen.all('text'), texts, strict=True):
    yield _type(line.name, line.ref, text)
    if any(line.rest == NOT_TYPED for line in seen.lines[-8:]):
      seen.lines = [line for line in seen.lines if line.rest != NOT_TYPED]
      yield _press(seen, 'Cancel')
      yield _type(line.name, line.ref, text)
  yield _click(button.name, button.ref)


def _orderings(seen: Seen) -> Steps:
  pattern = r'for (.*) movies directed by (.*) from year (\d+)'
  texts = dict(zip(('Genre', 'Director', 'Year'), seen.asked(pattern), strict=True))
  for name, text in texts.items():
    yield _type(name, seen.find('text', name), text)
  yield _press(seen)


def _tree(seen: Seen) -> Steps:
  """Opens folders, depth first, until the name is there."""
  [name] = seen.asked(r'named "(.*)"')
  opened: set[int] = set()
  while not (ref := seen.find('file', name) or seen.find('folder', name)):
    [*closed] = [line for line in seen.all('folder') if line.ref not in opened]
    opened.add(closed[0].ref)
    yield Turn(f'no {name}', 'click', {'ref': closed[0].ref})
  yield _click(name, ref)


def _parity(seen: Seen) -> Steps:
  for before, line, after in zip(
    seen.lines, seen.lines[1:], seen.lines[2:], strict=False
  ):
    if before.name == 'Odd' and after.name == 'Even':
      odd = int(line.rest) % 2
      ref = before.ref if odd else after.ref
      yield Turn(f'{line.rest} is {"odd" if odd else "even"}', 'click', {'ref': ref})
  yield _press(seen)


def _table(seen: Seen) -> Mapping[str, str]:
  rows = [line.rest.split(' | ') for line in seen.lines if ' | ' in line.rest]
  return dict(rows)


def _read(seen: Seen) -> Steps:
  [key] = seen.asked(r'value of (.*) into')
  text = _table(seen)[key]
  yield Turn(f'{key}: {text}', 'type', {'ref': seen.find('text'), 'text': text})
  yield _press(seen)


def _read_two(seen: Seen) -> Steps:
  table = _table(seen)
  for line in seen.all('text'):
    key = line.name.removesuffix(':')
    arguments = {'ref': line.ref, 'text': table[key]}
    yield Turn(f'{key}: {table[key]}', 'type', arguments)
  yield _press(seen)


def _sum(seen: Seen) -> Steps:
  [problem] = [line.rest for line in seen.lines if line.rest.endswith(' =')]
  a, operator, b = problem.removesuffix(' =').split(' ')
  a, b = int(a), int(b)
  result = {'+': a + b, '-': a - b, 'x': a * b}[operator]
  thought = f'{problem} {result}'
  yield Turn(thought, 'type', {'ref': seen.find('text'), 'text': str(result)})
  yield _press(seen)


_ENTER = r'Enter "(.*)" into'
SOLUTIONS: Mapping[str, Callable[[Seen], Steps]] = {
  'choose-list': _chosen,
  'click-button': _named('button', r'the "(.*)" button'),
  'click-button-sequence': _sequence,
  'click-checkboxes': _checked,
  'click-checkboxes-large': _checked,
  'click-collapsible': _section,
  'click-collapsible-2': _behind('tab'),
  'click-dialog': _named('button', r'clicking the "(.*)"'),
  'click-dialog-2': _named('button', r'labeled "(.*)"'),
  'click-link': _named('link', r'link "(.*)"'),
  'click-option': _checked,
  'click-scroll-list': _chosen,
  'click-tab': _named('tab', r'on (Tab #\d)'),
  'click-tab-2': _behind('tab'),
  'click-test': _first('button'),
  'click-test-2': _named('button', r'button (\w+)'),
  'click-widget': _widget,
  'enter-password': _text(r'password "(.*)" into'),
  'enter-text': _text(_ENTER),
  'enter-text-2': _text(r'Type "(.*)" in all (\w+) case'),
  'enter-text-dynamic': _text(_ENTER),
  'focus-text': _first('text'),
  'focus-text-2': _nth,
  'login-user': _login,
  'login-user-popup': _login,
  'multi-orderings': _orderings,
  'navigate-tree': _tree,
  'odd-or-even': _parity,
  'read-table': _read,
  'read-table-2': _read_two,
  'simple-arithmetic': _sum,
}


def lesson(task: ClicksTask, teacher: TeacherConfig, mistakes: list[Any]) -> Lesson:
  """The teacher's turns; see `demonstrations.lesson`."""
  del teacher, mistakes
  seen = Seen(task.instruction)
  for turn in SOLUTIONS[task.family](seen):
    shown = yield turn
    if shown == ENDED:
      break
    seen.update(shown)
  return Turn('ended', content='done')


async def demonstrate(
  task: ClicksTask, environment: task_lib.Environment, teacher: TeacherConfig
) -> demonstrations.Demonstration:
  """A demonstration whose calls are really executed."""
  return await demonstrations.perform(task, environment, lesson(task, teacher, []))
