"""Look-up tasks: splits, verdicts, latencies that add up or run in parallel."""

import asyncio
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax import sandbox, tasks
from m2jax.tasks import demonstrations
from m2jax_pipelines.tasks import fetch

LIMITS = sandbox.Limits()


def act(task, function):
  """Runs `function(environment)` in the task's environment."""

  async def run():
    async with task.open(backend='none', limits=LIMITS) as environment:
      return await function(environment)

  return asyncio.run(run())


@settings(deadline=None, max_examples=60)
@given(
  st.sampled_from(fetch.SPLITS),
  st.sampled_from(fetch.FAMILIES),
  st.integers(0, 10**6),
)
def test_a_spec_is_one_task_of_its_split(split, family, index):
  """The same task in every process; no sequence of keys in two splits."""
  spec = tasks.spec(fetch.Config(), split, index, family=family)
  task = tasks.make(spec)
  fetch.make.cache_clear()
  assert tasks.make(spec) == task and task.spec == spec
  keys = tuple(task.table)
  owner = fetch.task.split_of(keys)
  assert owner == split == task.split
  low, high = fetch.Config().latency_s
  assert all(low <= s <= high for s in task.latency_s.values())
  assert task.baseline_calls == len(keys) == int(family[-1])


def test_chains_lead_from_key_to_key():
  """Only the last value answers, and each value but the last is the next key."""
  task = tasks.make(tasks.spec(fetch.Config(), 'train', 0, family='chain_3'))
  keys = list(task.table)
  assert [task.table[k] for k in keys[:-1]] == keys[1:]
  assert task.answer == task.table[keys[-1]] and keys[1] not in task.instruction


def test_verdicts():
  """The values in order; in part only with partial credit."""
  plain, partial = (
    tasks.make(tasks.spec(config, 'train', 3, family='independent_4'))
    for config in (fetch.Config(), fetch.Config(partial_credit=0.5))
  )

  async def judge(environment):
    return [
      await task.verify(environment, answer)
      for task in (plain, partial)
      for answer in (
        task.answer,
        task.answer + '.',
        ' '.join([*task.answer.split()[:2], 'x', 'y']),
        task.answer + ' 7',
        '',
      )
    ]

  assert act(plain, judge) == [1, 1, 0, 0, 0, 1, 1, 0.25, 0.4, 0]


@pytest.mark.parametrize('together', [True, False])
def test_latencies_are_real(together):
  """In parallel a turn takes its slowest call; one by one it takes their sum."""
  config = fetch.Config(latency_s=(0.2, 0.4))
  task = tasks.make(tasks.spec(config, 'train', 1, family='independent_3'))

  async def look_up(environment):
    calls = [environment.execute('get', {'key': key}) for key in task.table]
    started_s = time.monotonic()
    if together:
      found = await asyncio.gather(*calls)
    else:
      found = [await call for call in calls]
    assert found == task.answer.split()
    return time.monotonic() - started_s

  seconds, each = act(task, look_up), task.latency_s.values()
  assert seconds >= 0.99 * (max(each) if together else sum(each))
  if together:
    assert seconds < 0.99 * sum(each)


def test_bad_calls_are_the_models():
  """Each is a BadCall whose message the model can act on, and takes no time."""
  task = tasks.make(tasks.spec(fetch.Config(), 'train', 1))

  async def call(environment):
    for name, arguments, said in (
      ('put', {'key': 'ash'}, 'use get'),
      ('get', {'name': 'ash'}, 'one string: key'),
      ('get', {'key': 3}, 'one string: key'),
      ('get', {'key': 'nowhere'}, "no key 'nowhere'"),
    ):
      with pytest.raises(tasks.BadCall, match=said):
        await environment.execute(name, arguments)

  act(task, call)


def test_the_teacher_does_both():
  """All demonstrations are right; a chain is never looked up in parallel."""
  config, teacher = fetch.Config(latency_s=(0.0, 0.0)), fetch.TeacherConfig()
  specs = [tasks.spec(config, 'train', i) for i in range(60)]
  found = asyncio.run(
    demonstrations.collect(specs, teacher, backend='none', limits=LIMITS)
  )
  assert all(d.success == 1 for d in found)
  json.dumps([d.messages for d in found])
  widths = {'independent': set(), 'chain': set()}
  for d in found:
    calls = [len(m['tool_calls']) for m in d.messages if 'tool_calls' in m]
    widths[tasks.make(d.task).family.partition('_')[0]] |= set(calls)
  assert widths['chain'] == {1} and widths['independent'] == {1, 2, 3, 4}


@pytest.mark.parametrize(
  'spec', ['fetch/train/none_3/0/0', 'fetch/train', 'fetch/dev/chain_2/0/0?{"x":1}']
)
def test_bad_specs(spec):
  """Not of this kind, or with settings that do not exist: an error with the spec."""
  with pytest.raises(ValueError, match='fetch/'):
    tasks.make(spec)
  with pytest.raises(ValueError, match='latency_s'):
    fetch.Config(latency_s=(0.2, 0.1))
