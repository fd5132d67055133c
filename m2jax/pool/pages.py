"""Queries on a pool a page at a time, for people who look at a run (`m2jax.viewer`).

Pages are found by key, never by offset, and contain no token ids or messages. Work
items are sorted newest first, and so are evaluations (which have no item).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from m2jax import records
from m2jax.observe import svg, transcript
from m2jax.pool import tables
from m2jax.pool.database import Database
from m2jax.pool.reader import Reader

PHASES = ('rl', 'eval')
_SEARCHED_ROWS = 400  # messages that one page decompresses at most
_INSTRUCTION_CHARS, _TITLE_CHARS = 120, 400  # of a row, of what is opened
_KNOWN_INSTRUCTIONS = 10_000
_BARS, _MAX_REWARD = 16, 1e300  # of a histogram
_MAX_TASKS = 20_000
_BEFORE_CHARS, _AFTER_CHARS = 16, 60  # shown around what a search finds
# Columns of a listed trajectory. `Page.rows` has three more.
LISTED = (
  'row', 'session', 'item', 'rank', 'family', 'end_reason', 'success', 'wall_s',
  'tool_calls', 'tool_errors', 'total', 'superseded',
)  # fmt: skip
MORE = 'messages', 'instruction', 'hit'
ITEM = 'index', 'task', 'group_size', 'attempt', 'state', 'reason', 'step'


@dataclasses.dataclass(frozen=True)
class Condition:
  """Which trajectories to list; None and '' are any.

  Attributes:
    phase: 'rl' for training, 'eval' for evaluations.
    family, end_reason: exactly these.
    success: a verdict of 1, or one below.
    least_s, most_s: bounds on the wall-clock seconds.
    first_row, last_row: bounds on the row.
    step: the learner's step that took the group.
    least_reward, most_reward: bounds on the return of a training
      trajectory or on the verdict of an evaluation; the upper one is excluded.
    sessions: only these trajectories.
    text: occurs in the messages, task, answer or error, in whatever case.
  """

  phase: str = 'rl'
  family: str | None = None
  end_reason: str | None = None
  success: bool | None = None
  least_s: float | None = None
  most_s: float | None = None
  first_row: int | None = None
  last_row: int | None = None
  step: int | None = None
  least_reward: float | None = None
  most_reward: float | None = None
  sessions: frozenset[str] | None = None
  text: str = ''

  def __post_init__(self):
    if self.phase not in PHASES:
      raise ValueError(f'phase: must be one of {PHASES}, not {self.phase!r}')

  @property
  def any(self) -> bool:
    """Whether every trajectory of the phase meets it."""
    return self == Condition(self.phase)


@dataclasses.dataclass(frozen=True)
class Page:
  """Trajectories, the newest first, and their work items.

  Attributes:
    items: [index, task, …] as in `ITEM`, without those that are pending and have no
      trajectory yet; empty for evaluations.
    rows: trajectories as in `LISTED`, with whether each has messages, the beginning of
      what its task asks ('' once pruned) and, of a search, the text around the first
      place where it has the text.
    before: cursor of the next page; None after the last one.
  """

  items: list[list[Any]]
  rows: list[list[Any]]
  before: int | None


class PageReader(Reader):
  """`Reader` with queries for lists of any length."""

  def __init__(self, database: Database):
    super().__init__(database)
    self._asked: dict[int, str] = {}  # instruction by `_asks`

  def page(self, where: Condition, before: int | None = None, n: int = 50) -> Page:
    """Up to n work items with their trajectories, or up to 8 n evaluations.

    A search in text reads a bounded number of messages, so that a page may have fewer
    trajectories than asked for, or none, and still have a next one.

    Args:
      where: which trajectories.
      before: `Page.before` of the page before this one; None for the first.
      n: number of items.
    """
    t = tables.trajectories.c
    training = where.phase == 'rl'
    n = max(1, _SEARCHED_ROWS // 16) if where.text and training else n
    found = _matching(where)
    if not training:
      n = _SEARCHED_ROWS if where.text else 8 * n
      return self._evaluations(where, found, before, n)
    i = tables.items.c
    of = i.index if where.any else t.item
    query = sa.select(of).group_by(of).order_by(of.desc()).limit(n)
    begun = (i.state != 'pending') | sa.exists().where(t.item == i.index)
    query = query.where(begun if where.any else found)
    if before is not None:
      query = query.where(of < before)
    indices = [r[0] for r in self._read(query)]
    rows = []
    if indices:
      query = _listed(where).where(found, t.item.in_(indices))
      rows = self._read(query.order_by(t.item.desc(), t.rank, t.row))
    shown = self._shown(where, rows)
    if not where.any:
      left = {r[LISTED.index('item')] for r in shown}
      kept = [x for x in indices if x in left]
    else:
      kept = indices
    return Page(self._items(kept), shown, indices[-1] if len(indices) == n else None)

  def _evaluations(self, where: Condition, found, before, n: int) -> Page:
    t = tables.trajectories.c
    query = _listed(where).where(found).order_by(t.row.desc()).limit(n)
    if before is not None:
      query = query.where(t.row < before)
    rows = self._read(query)
    more = rows[-1].row if len(rows) == n else None
    return Page([], self._shown(where, rows), more)

  def _shown(self, where: Condition, rows: list[sa.Row]) -> list[list[Any]]:
    """`Page.rows` of rows: those that have the text, if there is one."""
    asked = self._instructions(rows)
    out = []
    for r in rows:
      hit = [_hit(where.text, r)] if where.text else []
      if all(hit):
        out.append([*r[: len(LISTED) + 1], asked.get(_asks(r), ''), *hit])
    return out

  def _instructions(self, rows: list[sa.Row]) -> dict[int, str]:
    """Beginnings of what tasks ask by `_asks`, of groups read from one trajectory."""
    if len(self._asked) > _KNOWN_INSTRUCTIONS:
      self._asked = {}
    t = tables.trajectories.c
    new = {_asks(r): r.row for r in rows if r.has_messages}
    for part in tables.parts([new[key] for key in new.keys() - self._asked.keys()]):
      query = sa.select(t.row, t.item, t.messages).where(t.row.in_(part))
      for row in self._read(query.where(t.messages.is_not(None))):
        try:
          found = _instruction(tables.messages(row.messages), _INSTRUCTION_CHARS)
          self._asked[_asks(row)] = found
        except ValueError:  # damaged: the page of the others is shown
          self._asked[_asks(row)] = ''
    return self._asked

  def _items(self, indices: list[int]) -> list[list[Any]]:
    table = tables.items
    columns = [table.c[name] for name in ITEM]
    query = sa.select(*columns).where(table.c.index.in_(indices))
    return [list(r) for r in self._read(query.order_by(table.c.index.desc()))]

  def item(self, index: int) -> dict[str, Any] | None:
    """A work item, by the names of `ITEM`."""
    found = self._items([index])
    return dict(zip(ITEM, found[0], strict=True)) if found else None

  def sessions(self, item: int) -> list[str]:
    """Sessions of a work item's trajectories, superseded ones last."""
    t = tables.trajectories.c
    query = sa.select(t.session).where(t.item == item)
    return [r[0] for r in self._read(query.order_by(t.superseded, t.rank, t.row))]

  def sessions_like(self, beginning: str) -> list[str]:
    """Up to five sessions that begin so; only the one, if it is a whole session."""
    t = tables.trajectories.c
    query = sa.select(t.session).where(t.session.startswith(beginning, autoescape=True))
    exact = (t.session == beginning).desc()
    found = [r[0] for r in self._read(query.order_by(exact, t.session).limit(5))]
    return found[:1] if beginning in found else found

  def trajectory(self, session: str) -> tuple[dict[str, Any], tuple | None] | None:
    """A trajectory's fields, and its messages, which are None once they are pruned.

    The fields are those of `LISTED`, task, error, answer, rewards and instruction.
    """
    table = tables.trajectories
    query = sa.select(table).where(table.c.session == session)
    if not (found := self._read(query)):
      return None
    row = found[0]
    names = (*LISTED, 'task', 'error', 'answer', 'process', 'speed', 'perf')
    fields = {name: getattr(row, name) for name in names}
    messages = None if row.messages is None else tables.trajectory(row).messages
    fields['instruction'] = _instruction(messages or (), _TITLE_CHARS)
    return fields, messages

  def recorded(
    self, session: str
  ) -> list[tuple[dict[str, Any], records.Completion | None]]:
    """A session's completions by turn: the columns, and the record until it is pruned.

    Superseded ones are included.
    """
    c = tables.completions
    rows = self._read(sa.select(c).where(c.c.session == session).order_by(c.c.row))
    found = tables.completions_of(rows)
    out = []
    for row in sorted(rows, key=lambda r: (r.turn, r.row)):
      fields = {k: v for k, v in row._mapping.items() if k != 'arrays'}
      out.append((fields, found.get(row.id)))
    return out

  def judged(self, step: int) -> dict[int, dict[str, tuple[int, float]]] | None:
    """Response tokens and largest |advantage| of a step's trajectories, by item.

    Of judged completions. None if some of them were deleted (`retention`), so that the
    batch is not complete.
    """
    i, t, c = tables.items.c, tables.trajectories.c, tables.completions.c
    taken = (i.state == 'taken') & (i.step == step)
    out: dict[int, dict[str, tuple[int, float]]] = {}
    for index, pruned in self._read(sa.select(i.index, i.pruned).where(taken)):
      if pruned:
        return None
      out[index] = {}
    total = sa.func.sum(c.response_tokens), sa.func.max(sa.func.abs(c.advantage))
    query = (
      sa.select(t.item, t.session, *total)
      .join_from(tables.trajectories, tables.items, t.item == i.index)
      .join(tables.completions, c.session == t.session)
      .where(taken, ~t.superseded, ~c.superseded, c.advantage.is_not(None))
      .group_by(t.item, t.rank, t.session)
      .order_by(t.item, t.rank)
    )
    for item, session, tokens, advantage in self._read(query):
      out[item][session] = int(tokens), float(advantage)
    return out

  def histogram(self, where: Condition) -> dict[str, list[Any]]:
    """How the rewards of the trajectories that meet a condition are distributed.

    Its text and its bounds on the reward do not count. `edges` are round numbers around
    all rewards of the phase; `counts` has one number fewer. A reward on an edge counts
    in the bar above it, in the last bar if it is the last edge.
    """
    where = dataclasses.replace(where, text='', least_reward=None, most_reward=None)
    value = _reward(where.phase)
    finite = value.between(-_MAX_REWARD, _MAX_REWARD)  # NaN is above all on PostgreSQL
    everyone = _matching(Condition(where.phase)) & finite
    limits = sa.select(sa.func.min(value), sa.func.max(value)).where(everyone)
    low, high = self._read(limits)[0]
    if low is None:
      return {'edges': [], 'counts': []}
    edges = [float(f'{x:.10g}') for x in svg.ticks(low, high, about=_BARS)]
    bars = [(value >= a) & (value < b) for a, b in itertools.pairwise(edges)]
    if not bars:
      return {'edges': edges, 'counts': []}
    bars[-1] = value >= edges[-2]
    counted = [sa.func.sum(sa.case((bar, 1), else_=0)) for bar in bars]
    found = self._read(sa.select(*counted).where(_matching(where) & finite))[0]
    return {'edges': edges, 'counts': [int(n or 0) for n in found]}

  def tasks(self, where: Condition) -> list[list[Any]]:
    """[task, family, trajectories, mean verdict] of each task, the newest first.

    What was superseded, or failed for infrastructure, does not count; 20,000 tasks at
    most.
    """
    t = tables.trajectories.c
    numbers = sa.func.min(t.family), sa.func.count(), sa.func.avg(t.success)
    query = (
      sa.select(t.task, *numbers).where(_matching(where), _judged()).group_by(t.task)
    )
    query = query.order_by(sa.func.max(t.row).desc()).limit(_MAX_TASKS)
    return [list(r) for r in self._read(query)]

  def of_task(self, where: Condition, task: str, n: int) -> list[str]:
    """Up to n sessions of `tasks` that have a task, the newest first."""
    t = tables.trajectories.c
    query = sa.select(t.session).where(_matching(where), _judged(), t.task == task)
    return [r[0] for r in self._read(query.order_by(t.row.desc()).limit(n))]

  def newest(self) -> int:
    """Row of the newest trajectory; 0 if there is none."""
    newest = sa.func.max(tables.trajectories.c.row)
    return self._read(sa.select(newest))[0][0] or 0

  def states(self) -> dict[str, int]:
    """Number of work items by state."""
    state = tables.items.c.state
    query = sa.select(state, sa.func.count()).group_by(state)
    return {r[0]: r[1] for r in self._read(query)}

  def waiting(self) -> int:
    """Number of pending work items that have no trajectory yet."""
    i, t = tables.items.c, tables.trajectories.c
    query = sa.select(sa.func.count()).where(i.state == 'pending')
    return self._read(query.where(~sa.exists().where(t.item == i.index)))[0][0]

  def trained(self) -> int | None:
    """The last work item that a step took."""
    i = tables.items.c
    query = sa.select(i.index).where(i.state == 'taken')
    found = self._read(query.order_by(i.step.desc(), i.index.desc()).limit(1))
    return found[0][0] if found else None

  def evaluated(self, after: int, until_s: float) -> int | None:
    """Row of the last evaluation after a row that ended by a time."""
    t, c = tables.trajectories.c, tables.completions.c
    joined = sa.join(tables.trajectories, tables.completions, t.session == c.session)
    query = sa.select(sa.func.max(t.row)).select_from(joined)
    query = query.where(t.item < 0, t.row > after, c.ended_s <= until_s)
    return self._read(query)[0][0]

  def kinds(self, after: int, last: int) -> list[tuple[bool, str, str, int]]:
    """(evaluation, family, end reason, number) of trajectories in rows after..last."""
    t = tables.trajectories.c
    names = (t.item < 0).label('evaluation'), t.family, t.end_reason
    query = (
      sa.select(*names, sa.func.count())
      .where(t.row > after, t.row <= last)
      .group_by(*names)
    )
    return [(bool(r[0]), r[1], r[2], r[3]) for r in self._read(query)]

  def run(self) -> str:
    """The run id of the pool."""
    m = tables.meta.c
    return self._read(sa.select(m.value).where(m.key == 'run'))[0][0]


def _listed(where: Condition) -> sa.Select:
  table = tables.trajectories
  columns = [table.c[name] for name in LISTED]
  columns.append(table.c.messages.is_not(None).label('has_messages'))
  if where.text:
    columns += [table.c[name] for name in ('task', 'error', 'answer', 'messages')]
  return sa.select(*columns)


def _matching(where: Condition) -> sa.ColumnElement:
  t = tables.trajectories.c
  found = t.item >= 0 if where.phase == 'rl' else t.item < 0
  for column, value in ((t.family, where.family), (t.end_reason, where.end_reason)):
    if value is not None:
      found &= column == value
  if where.success is not None:
    found &= t.success >= 1 if where.success else t.success < 1
  if where.least_s is not None:
    found &= t.wall_s >= where.least_s
  if where.most_s is not None:
    found &= t.wall_s <= where.most_s
  if where.first_row is not None:
    found &= t.row >= where.first_row
  if where.last_row is not None:
    found &= t.row <= where.last_row
  if where.step is not None:
    i = tables.items.c
    taken = (i.state == 'taken') & (i.step == where.step)
    found &= t.item.in_(sa.select(i.index).where(taken))
  if where.least_reward is not None:
    found &= _reward(where.phase) >= where.least_reward
  if where.most_reward is not None:
    found &= _reward(where.phase) < where.most_reward
  if where.sessions is not None:
    found &= t.session.in_(sorted(where.sessions))
  return found


def _reward(phase: str) -> sa.ColumnElement:
  """The return that a step computed; evaluations have a verdict only."""
  t = tables.trajectories.c
  return t.total if phase == 'rl' else t.success


def _judged() -> sa.ColumnElement:
  t = tables.trajectories.c
  return ~t.superseded & (t.end_reason != 'infrastructure')


def _asks(row: sa.Row) -> int:
  """What has one task: a work item, or an evaluation (negative)."""
  return row.item if row.item >= 0 else -row.row


def _instruction(messages: Iterable[Mapping[str, Any]], n: int) -> str:
  """The beginning of the first user message, on one line."""
  asked = (m.get('content') for m in messages if m.get('role') == 'user')
  text = transcript.plain_text(next(asked, ''))[: 10 * n]
  line = ' '.join(text.split())
  return line if len(line) <= n else line[:n] + '…'


def _hit(text: str, row: sa.Row) -> str:
  """The first place of a text in a row, with what is around it; '' if it has none."""
  whole = _text(row)
  if not (found := re.search(re.escape(text), whole, re.IGNORECASE)):
    return ''
  start, end = max(found.start() - _BEFORE_CHARS, 0), found.end() + _AFTER_CHARS
  return '…' * (start > 0) + re.sub(r'\s', ' ', whole[start:end])


def _text(row: sa.Row) -> str:
  parts = [row.task, row.error, row.answer]
  if row.messages is not None:
    # JSON text, in which \\u and \\n are escaped: decoded, so that a search finds them.
    parts += map(_words, tables.messages(row.messages))
  return '\n'.join(parts)


def _words(value: Any) -> str:
  """All strings of a JSON value."""
  if isinstance(value, str):
    return value
  if isinstance(value, dict):
    value = value.values()
  elif not isinstance(value, list):
    return ''
  return '\n'.join(map(_words, value))
