"""Detectors over a run's data pool, which is opened for reading only.

The pool of another person is untrusted: tasks are never built here (a spec may name a
module to import), rows are counted by the database, and what is quoted is printable.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator

import numpy as np
import sqlalchemy as sa

from m2jax.evolve.doctor import finding
from m2jax.evolve.doctor.finding import Evidence, Finding
from m2jax.observe import printable
from m2jax.pool import tables
from m2jax.pool.database import Database

NEWEST_MESSAGES = 1024  # trajectories whose tool results are read
NEWEST = 200_000  # rows of trajectories and completions that are counted
MASKED, FAILED = 0.1, 0.1  # shares, as those of `flow`
LEAST = 8  # failures: fewer say nothing about a share
UNAVAILABLE = 0.03  # share of the tool results
_UNAVAILABLE = re.compile(
  r'(?i)\b(50[0234]|429)\b|unavailable|overloaded|refused|connection (reset|error)'
  r'|timed? ?out|rate limit|broken pipe|no route|internal server error'
)
_SHORT = 300  # characters of a result that is an error and nothing else
REENCODED = 0.05  # share of the completions: clients return what they got
REENCODED_REASONS = 'retokenised', 'reasoning_dropped', 'assistant_edited'
JUDGED = 64  # trajectories from which a correlation is known
AGAINST = -0.3  # correlation with success; chance gives ±0.12 for 64
SESSIONS = 32  # whose token ids are compared
_SESSION_TOKENS = 1 << 20  # prompt and response tokens of one that is compared
SPLITS = 'train', 'dev', 'held_out'
_QUOTED = 3  # reasons or tasks
_CHARS = 160


def examine(database: Database, vocab_size: int | None) -> Iterator[Finding]:
  """All findings of a pool.

  Args:
    vocab_size: number of ids of the run's tokenizer; None if it is unknown.

  Raises:
    sqlalchemy.exc.SQLAlchemyError, PoolBroken: the database cannot be read.
  """
  yield from infrastructure(database)
  yield from failed(database)
  yield from unavailable(database)
  yield from reencoded(database)
  yield from splits(database)
  yield from signs(database)
  yield from tokens(database, vocab_size)


def newest_s(database: Database) -> float:
  """When the newest completion ended; 0 without completions."""
  c = tables.completions.c
  recent = sa.select(c.ended_s).order_by(c.row.desc()).limit(64)
  times = [row[0] for row in _rows(database, recent)]
  return max((t for t in times if type(t) is float and math.isfinite(t)), default=0.0)


def infrastructure(database: Database) -> Iterator[Finding]:
  """Infrastructure failures of training trajectories, by what failed."""
  t = tables.trajectories.c
  why = sa.func.substr(t.error, 1, _CHARS)
  of = (t.item >= 0) & (t.row > _floor(database, tables.trajectories))
  total = _count(database, sa.select(sa.func.count()).where(of))
  masked = of & (t.end_reason == 'infrastructure')
  rows = _reasons(database, sa.select(why, sa.func.count()).where(masked).group_by(why))
  lost = sum(n for _, n in rows)
  if lost >= LEAST and lost > MASKED * total:
    yield _counted(
      'infrastructure',
      f'{lost:,} of the {total:,} newest training trajectories are infrastructure '
      f'failures: {_quoted(rows)}',
      *('share of the trajectories in the pool', lost / total, MASKED),
    )


def unavailable(database: Database) -> Iterator[Finding]:
  """Tool results that say that the tool failed, not what it was asked for.

  Counted are short texts that appear in several tasks.
  """
  t = tables.trajectories.c
  query = sa.select(t.task, t.messages).where(t.item >= 0, t.messages.is_not(None))
  rows = _rows(database, query.order_by(t.row.desc()).limit(NEWEST_MESSAGES))
  total, tasks, counts = 0, collections.defaultdict(set), collections.Counter()
  for task, blob in rows:
    try:
      found = tables.messages(blob)
    except ValueError:
      continue  # `tokens` names damage
    for message in found:
      text = message.get('content')
      if message.get('role') != 'tool' or not isinstance(text, str):
        continue
      total += 1
      if len(text) <= _SHORT and _UNAVAILABLE.search(text):
        shown = printable.one_line(text, _CHARS)
        counts[shown] += 1
        tasks[shown].add(task)
  common = [(n, text) for text, n in counts.items() if len(tasks[text]) >= 3]
  lost = sum(n for n, _ in common)
  if lost >= LEAST and lost > UNAVAILABLE * total:
    rows = [(text, n) for n, text in sorted(common, reverse=True)]
    yield _counted(
      'tool_failures',
      f'{lost:,} of the {total:,} newest tool results are failures of the tool: '
      f'{_quoted(rows)}',
      *('share of the tool results in the pool', lost / total, UNAVAILABLE),
    )


def failed(database: Database) -> Iterator[Finding]:
  """Work items that failed, by their reason."""
  i = tables.items.c
  total = _count(database, sa.select(sa.func.count()).select_from(tables.items))
  why = sa.func.substr(i.reason, 1, _CHARS)
  query = sa.select(why, sa.func.count()).where(i.state == 'failed').group_by(why)
  rows = _reasons(database, query)
  lost = sum(n for _, n in rows)
  if lost >= LEAST and lost > FAILED * total:
    yield _counted(
      'failed_items',
      f'{lost:,} of {total:,} work items failed: {_quoted(rows)}',
      *('share of the items in the pool', lost / total, FAILED),
    )


def reencoded(database: Database) -> Iterator[Finding]:
  """Forks whose cause is that an answer came back as other text or tokens."""
  c = tables.completions.c
  of = c.row > _floor(database, tables.completions)
  total = _count(database, sa.select(sa.func.count()).where(of))
  query = sa.select(c.fork_reason, sa.func.count()).where(
    of, c.fork_reason.in_(REENCODED_REASONS)
  )
  rows = _reasons(database, query.group_by(c.fork_reason))
  forks = sum(n for _, n in rows)
  if forks >= LEAST and forks > REENCODED * total:
    yield _counted(
      'retokenised',
      f'{forks:,} of the {total:,} newest completions do not extend the answer that '
      f'they contain: {_quoted(rows)}',
      *('share of the completions in the pool', forks / total, REENCODED),
    )


def splits(database: Database) -> Iterator[Finding]:
  """Tasks of training that are of another split, or that evaluations use too."""
  i, t = tables.items.c, tables.trajectories.c
  wrong: dict[str, int] = {}
  seen = 0
  last = -1
  while True:  # a page at a time: specs are long
    query = sa.select(i.index, i.task).where(i.index > last).order_by(i.index)
    rows = _rows(database, query.limit(10_000))
    if not rows or seen >= NEWEST:
      break
    for index, task in rows:
      seen += 1
      if isinstance(task, str) and split_of(task) in ('dev', 'held_out'):
        wrong[task] = index
    last = rows[-1][0]
  common = sa.select(i.task, sa.func.min(i.index)).where(
    i.task.in_(
      sa.select(t.task).where(t.item < 0, t.row > _floor(database, tables.trajectories))
    )
  )
  for task, index in _rows(database, common.group_by(i.task).limit(1000)):
    if isinstance(task, str):
      wrong.setdefault(task, index)
  if wrong:
    shown = [printable.one_line(task, _CHARS) for task in list(wrong)[:_QUOTED]]
    yield _counted(
      'held_out_in_training',
      f'{len(wrong):,} tasks of training are of an evaluation: {"; ".join(shown)}',
      *('tasks', float(len(wrong)), 0.0),
    )


def split_of(spec: str) -> str:
  """The split in a spec, `KIND/SPLIT/…` or `mixed/DOMAIN/KIND/SPLIT/…`; or ''."""
  parts = spec.split('/', 4)
  at = 3 if parts[0] == 'mixed' else 1
  return parts[at] if len(parts) > at and parts[at] in SPLITS else ''


def signs(database: Database) -> Iterator[Finding]:
  """Returns and advantages that are against the verifier's verdict."""
  t, c = tables.trajectories.c, tables.completions.c
  judged = (t.item >= 0) & ~t.superseded & (t.end_reason != 'infrastructure')
  judged &= t.row > _floor(database, tables.trajectories)
  returns = sa.select(*_moments(t.success, t.total)).where(judged, t.total.is_not(None))
  joined = sa.join(tables.trajectories, tables.completions, t.session == c.session)
  advantages = (
    sa.select(*_moments(t.success, c.advantage))
    .select_from(joined)
    .where(judged, c.advantage.is_not(None), c.advantage != 0)
  )
  for name, query in ('returns', returns), ('advantages', advantages):
    found = correlation(_rows(database, query)[0])
    if found is not None and found < AGAINST:
      yield _counted(
        'reward_sign',
        f'{name} fall with success: correlation {found:.2f} over the pool',
        *(f'correlation of {name} with success', found, AGAINST),
      )


def _moments(x, y):
  total = sa.func.sum
  return sa.func.count(), total(x), total(y), total(x * y), total(x * x), total(y * y)


def correlation(moments) -> float | None:
  """Pearson's of n, Σx, Σy, Σxy, Σxx, Σyy; None below `JUDGED` or without variance."""
  if any(type(m) not in (int, float) for m in moments) or moments[0] < JUDGED:
    return None
  n, x, y, xy, xx, yy = map(float, moments)
  variance = (xx / n - (x / n) ** 2) * (yy / n - (y / n) ** 2)
  if not 1e-12 < variance < math.inf:
    return None
  return (xy / n - x * y / n**2) / math.sqrt(variance)


def tokens(database: Database, vocab_size: int | None) -> Iterator[Finding]:
  """Token ids outside the vocabulary, and prompts that change what they extend."""
  c = tables.completions
  query = sa.select(c.c.session).where(c.c.arrays.is_not(None))
  query = query.group_by(c.c.session).order_by(sa.func.max(c.c.row).desc())
  largest = changed = 0
  for (session,) in _rows(database, query.limit(SESSIONS)):
    where = c.c.session == session
    size = sa.func.sum(c.c.prompt_tokens + c.c.response_tokens)
    if _count(database, sa.select(size).where(where)) > _SESSION_TOKENS:
      continue
    rows = _rows(database, sa.select(c).where(where).order_by(c.c.row))
    try:
      found = tables.completions_of(rows)
    except ValueError as error:
      yield _counted(
        'damaged_pool', printable.one_line(error, 400), 'damaged sessions', 1.0, 0.0
      )
      return
    for completion in found.values():
      ids = completion.tokens
      largest = max(largest, int(ids.max(initial=0)))
      parent = found.get(completion.parent or '')
      if parent is not None:
        prefix = completion.prompt_ids[: len(parent.tokens)]
        changed += not np.array_equal(prefix, parent.tokens)
  if vocab_size is not None and largest >= vocab_size:
    yield _counted(
      'tokenizer',
      f'the pool has token ids up to {largest:,}, the tokenizer has {vocab_size:,}',
      *('largest token id', float(largest), float(vocab_size - 1)),
    )
  if changed:
    yield _counted(
      'prefix_changed',
      f'{changed:,} prompts do not begin with the token ids that they extend',
      *('prompts', float(changed), 0.0),
    )


def _counted(kind: str, summary: str, name: str, value: float, bound: float) -> Finding:
  shown = Evidence(name, (float(value),), (), bound, 'of the whole pool')
  return finding.Finding(kind, summary, 'rl', evidence=(shown,))


def _rows(database: Database, query: sa.Select) -> list[sa.Row]:
  return database.read(lambda connection: list(connection.execute(query).all()))


def _count(database: Database, query: sa.Select) -> int:
  found = _rows(database, query)[0][0]
  return found if type(found) is int else 0


def _floor(database: Database, table: sa.Table) -> int:
  """Rows above this one are the newest `NEWEST`."""
  return _count(database, sa.select(sa.func.max(table.c.row))) - NEWEST


def _reasons(database: Database, query: sa.Select) -> list[tuple[str, int]]:
  """(text, count) of a grouped query, the most frequent first."""
  rows = _rows(database, query.order_by(sa.func.count().desc()).limit(100))
  return [(printable.one_line(row[0], _CHARS), row[1]) for row in rows]


def _quoted(rows: list[tuple[str, int]]) -> str:
  return '; '.join(f'{n:,} × {text}' for text, n in rows[:_QUOTED])
