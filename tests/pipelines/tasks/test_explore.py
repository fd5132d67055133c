"""Exploring: the teacher's search solves every task, and splits share none."""

import asyncio

import pytest

from m2jax import tasks
from m2jax.tasks import demonstrations
from m2jax_pipelines.tasks import explore

CONFIG = explore.Config(places=(2, explore.MAX_PLACES), spare_calls=0)


def test_depth_first_finds_the_code():
  specs = [tasks.spec(CONFIG, split, i) for split in explore.SPLITS for i in range(60)]
  found = asyncio.run(demonstrations.collect(specs, explore.TeacherConfig()))
  for spec, demonstration in zip(specs, found, strict=True):
    task = tasks.make(spec)
    calls = [m for m in demonstration.messages if m['role'] == 'tool']
    assert demonstration.success == 1
    assert len(calls) == task.baseline_calls == task.max_tool_calls
    assert task.family == f'places_{len(calls)}'
  families = {tasks.make(spec).family for spec in specs}
  assert len(families) == explore.MAX_PLACES - 1


def test_mistakes_cost_calls_only():
  specs = [tasks.spec(CONFIG, 'train', i) for i in range(60)]
  teacher = explore.TeacherConfig(mistakes=0.5)
  found = asyncio.run(demonstrations.collect(specs, teacher))
  for spec, demonstration in zip(specs, found, strict=True):
    places = [m['content'] for m in demonstration.messages if m['role'] == 'tool']
    assert demonstration.success == 1
    assert len(places) - len(set(places)) == len(demonstration.mistakes)
    assert len(set(places)) == tasks.make(spec).baseline_calls
  assert sum(len(d.mistakes) for d in found) > 60


def test_no_start_is_in_two_splits():
  starts = {
    split: {tasks.make(tasks.spec(CONFIG, split, i)).start for i in range(200)}
    for split in explore.SPLITS
  }
  assert not starts['train'] & starts['dev']
  assert not starts['train'] & starts['held_out']
  assert not starts['dev'] & starts['held_out']


def test_only_the_code_is_right():
  task = tasks.make(tasks.spec(CONFIG, 'dev', 0))

  async def verdicts():
    async with task.open() as environment:
      unknown = await environment.execute('look', {'place': 'nowhere'})
      with pytest.raises(tasks.BadCall):
        await environment.execute('look', {'place': 'a', 'other': 'b'})
      answers = task.code, f' {task.code}\n', '', task.start, f'{task.code} 11'
      return unknown, [await task.verify(environment, answer) for answer in answers]

  assert asyncio.run(verdicts()) == ('no such place', [1, 1, 0, 0, 0])


@pytest.mark.parametrize(
  'spec',
  ['explore/dev/places_1/0/0?2', 'explore/test/places_3/0/0?2', 'explore/dev/places_3']
  + ['explore/dev/places_99/0/0?2', 'explore/dev/places_3/0/0?-1'],
)
def test_wrong_specs(spec):
  with pytest.raises(ValueError, match='expected explore/'):
    explore.make(spec)
