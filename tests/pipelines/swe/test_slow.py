"""Performance tasks by injected slowness: the edits, and tasks made of them."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from m2jax import sandbox
from m2jax.pipelines import admission, records, seat
from m2jax.pipelines.context import Context
from m2jax.pipelines.make import LIMITS
from m2jax.pipelines.swe import collect, environment, mutate, slow
from m2jax.tasks import harbor
from tests.pipelines.swe import package

_TEXT = """\
import bisect
import functools

NAMES = {str(n): n for n in range(300)}


@functools.lru_cache(maxsize=None)
def ways(n):
  return 1 if n < 2 else ways(n - 1) + ways(n - 2)


def place(values, x):
  return bisect.bisect_left(values, x), bisect.bisect_right(values, x)


def known(word, names=NAMES):
  return word in names, names.get(word, 0)


def ascending(values):
  found = all(a <= b for a, b in zip(values, values[1:]))
  return found


def both(values, x):
  return ascending(values)
"""
_TESTS = """\
from tinycalc import fast


def test_ways():
  assert fast.ways(18) == 4181


def test_place():
  values = list(range(2000))
  for x in range(0, 2000, 40):
    assert fast.place(values, x) == (x, x + 1)


def test_known():
  assert [fast.known(str(n))[0] for n in range(600)] == [n < 300 for n in range(600)]


def test_ascending():
  assert fast.both(list(range(30)), 1) and not fast.ascending([2, 1])
"""


def _results(text: str):
  names: dict = {}
  exec(text, names)
  values = [1, 3, 3, 7]
  return (
    names['ways'](12),
    [names['place'](values, x) for x in range(9)],
    [names['known'](w) for w in ('7', 'x')],
    [names['both'](v, 0) for v in (values, [2, 1], [])],
  )


def test_each_edit_changes_no_result():
  """The kinds are all there, and each edit is a slow equivalent."""
  found = slow.mutations('fast.py', _TEXT)
  assert {m.kind for m in found} == {
    'cache removed',
    'linear scan',
    'copied before a look-up',
    'no short circuit',
    'computed twice',
  }
  for mutation in found:
    text = mutation.apply(_TEXT)
    assert mutate.parses(text) and text != _TEXT
    assert _results(text) == _results(_TEXT), mutation


def _env(dataset) -> environment.Environment:
  package.site(dataset)
  source = package.source(dataset)
  files = {
    **source.files,
    'src/tinycalc/fast.py': _TEXT.encode(),
    'tests/test_fast.py': _TESTS.encode(),
  }
  archive = dataset / 'fast.tar.gz'
  collect.pack(files, archive)
  source = dataclasses.replace(source, files=files, archive=archive)
  return asyncio.run(_closed(environment.build(source, dataset, 0)))


async def _closed(work):
  try:
    return await work
  finally:
    await sandbox.shutdown()


@pytest.mark.long
def test_slowness_that_is_measured_is_a_task(tmp_path):
  """Proved by the whole admission: slow fails, the release passes twice."""
  env = _env(tmp_path)
  context = Context(tmp_path, seat.Seat(seat.SeatConfig(), 'author'))

  async def made():
    config = dataclasses.replace(package.CONFIG, slow=1, slow_tried=8)
    stream = slow.candidates(env, config, context)
    found = [candidate async for candidate in stream]
    drawn = [c for c in found if c.draft is not None]
    split = tmp_path / 'tasks' / 'train'
    split.mkdir(parents=True)
    path = harbor.write(drawn[0].draft, split)
    judged = await admission.admit(
      harbor.read(path), backend='bubblewrap', limits=LIMITS
    )
    return found, drawn, judged

  found, drawn, judged = asyncio.run(_closed(made()))
  assert len({c.id for c in found}) == len(found)
  assert drawn and all(c.facts['gain'] > 1.4 for c in drawn)
  assert judged.outcome == records.ADMITTED, judged
