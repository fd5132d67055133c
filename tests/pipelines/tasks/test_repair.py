"""Repair tasks: splits, verdicts on what code does, attempts to forge one, teacher."""

import ast
import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import sandbox, tasks
from m2jax.tasks import demonstrations
from m2jax_pipelines.tasks import repair
from m2jax_pipelines.tasks.repair import code, programs

BACKEND = 'namespaces'
CONFIG = repair.Config(steps=(1, 6))
LIMITS = sandbox.Limits(cpu_s=1, wall_s=3.0, memory_bytes=128 << 20)


def a_task(index=0, family='steps_3'):
  return tasks.make(tasks.spec(CONFIG, 'train', index, family=family))


def judge(task, content, answer='fixed'):
  """Verdict if the file has this content."""

  async def run():
    async with task.open(backend=BACKEND, limits=LIMITS) as environment:
      await environment.box.write(code.FILE, content.encode())
      return await task.verify(environment, answer)

  return asyncio.run(run())


@given(st.sampled_from(programs.SPLITS), st.integers(1, 6), st.integers(0, 10**6))
def test_a_spec_is_one_program_of_its_split(split, steps, index):
  """Bug and program differ on the shown call; Python agrees with `Program`."""
  spec = tasks.spec(CONFIG, split, index, family=f'steps_{steps}')
  task = tasks.make(spec)
  repair.task.make.cache_clear()
  assert tasks.make(spec) == task
  assert programs.split_of(task.program) == split
  right, wrong = {}, {}
  exec(task.program.code, right)
  exec(task.broken, wrong)
  for call in task.hidden:
    assert right['f'](*call) == task.program(*call)
  assert wrong['f'](*task.shown[0]) != task.program(*task.shown[0])
  ast.parse(task.broken)
  changed = zip(task.program.code.split('\n'), task.broken.split('\n'), strict=True)
  assert sum(a != b for a, b in changed) == 1


def test_the_same_program_with_other_names_is_in_the_same_split():
  rng = random.Random(0)
  program, _ = programs.draw(
    rng, 'train', 3, [(a, b) for a in range(9) for b in (1, 5)]
  )
  steps = tuple(
    programs.Step(s.operation, {program.parameters[1]: 'z'}.get(s.operand, s.operand))
    for s in program.steps
  )
  other = programs.Program(('w', 'z'), steps)
  assert programs.split_of(other) == programs.split_of(program)


def test_verdicts_are_of_values():
  """The right file and any other code with its values; not the file as it was."""
  task = a_task()
  cases = ''.join(
    f'  if (a, b) == {c}: return {task.program(*c)}\n' for c in task.shown
  )
  assert judge(task, task.program.code) == 1.0
  assert judge(task, task.program.code.replace('return a', 'b = a\n  return b')) == 1.0
  assert judge(task, task.program.code, answer=' ') == 0.0
  assert judge(task, task.broken) == 0.0
  assert judge(task, f'def f(a, b):\n{cases}') == 0.0, 'hard-coded shown calls'


# Each would be wrong with a verifier that trusts the process or compares loosely.
FORGERIES = {
  'prints a list of ones': 'print([1]*24)\ndef f(*a): return 1',
  'exits': 'import os\nos._exit(0)',
  'exits after output': 'import os\nprint("[]", flush=True)\nos._exit(0)',
  'equals everything': (
    'class E(int):\n  __eq__ = lambda *a: True\ndef f(*a): return E()'
  ),
  'a subclass with its own text': (
    'class E(int):\n  __repr__ = lambda s: "1"\ndef f(*a): return E(1)'
  ),
  'floats': '{right}\ng = f\ndef f(*a): return float(g(*a))',
  'strings': '{right}\ng = f\ndef f(*a): return str(g(*a))',
  'replaces json': 'import json\njson.dumps = lambda v: "ok"\ndef f(*a): return 1',
  'one value more': 'import json\nd = json.dumps\njson.dumps = lambda v: d(v + v[:1])\n'
  '{right}',
  'looks for the expected values': (
    'import sys, os\ndef f(*a):\n'
    '  for frame in sys._current_frames().values():\n'
    '    while frame:\n      v = frame.f_locals.get("expected")\n'
    '      if v: return v[0]\n      frame = frame.f_back\n'
    '  return open("/proc/self/environ").read()'
  ),
  'never ends': 'while True: pass',
  'eats memory': 'x = []\nwhile True: x.append(bytes(1 << 24))',
  'no function': '',
  'no Python': 'def f(',
  'deep nesting': (
    'import json\njson.dumps = lambda v: "[" * 100000\ndef f(*a): return 1'
  ),
}


@pytest.mark.parametrize('name', FORGERIES)
def test_no_verdict_is_forged(name):
  task = a_task()
  assert judge(task, FORGERIES[name].replace('{right}', task.program.code)) == 0.0


def test_a_repair_that_is_rarely_wrong_fails():
  """Its values differ on 13 of the 169 calls, which 24 drawn ones did not meet."""
  task = tasks.make('repair/train/steps_6/0/35?3')
  step = programs.Step('at most', task.program.parameters[1])
  wrong = programs.apply(task.program, programs.Bug(task.bug.index, step))
  differ = [call for call in task.hidden if wrong(*call) != task.program(*call)]
  assert len(differ) == 13 and len(task.hidden) == 169
  assert judge(task, wrong.code) == 0.0
  assert judge(task, task.program.code) == 1.0


FILL = """\
import os
os.link('f.py', 'g')  # so that to replace the file frees nothing
for i in range(9999):
  try:
    with open(f'z{i}', 'wb', buffering=0) as file:
      for size in (1 << 20, 1 << 10):
        while file.write(bytes(size)) == size:
          pass
  except OSError as error:
    if error.errno == 28:
      break
"""


def test_a_full_workspace_is_the_agents_doing():
  """The next edit is a bad call; a failure of the machine would not be judged."""
  task = a_task()

  async def run():
    async with task.open(backend=BACKEND, limits=LIMITS) as environment:
      first = task.broken.split('\n')[0]
      edits = {'old': first, 'new': FILL + first}, {'old': first, 'new': first + ' '}
      await environment.execute('edit', edits[0])
      await environment.execute('test', {})
      with pytest.raises(tasks.BadCall, match='no space'):
        await environment.execute('edit', edits[1])
      return await task.verify(environment, 'fixed')

  assert asyncio.run(run()) == 0.0


def test_what_the_agent_leaves_instead_of_the_file():
  """Links out of the workspace, directories, pipes and big files are no solution."""
  task = a_task()

  async def run(command):
    async with task.open(backend=BACKEND, limits=LIMITS) as environment:
      await environment.box.exec(command)
      first = await task.verify(environment, 'fixed')
      with pytest.raises(tasks.BadCall, match='gone'):
        await environment.execute('read', {})
      return first

  for command in (
    'rm f.py',
    'ln -sf /etc/hostname f.py',
    'rm f.py; mkdir f.py',
    'rm f.py; mkfifo f.py',
    'head -c 100000 /dev/zero > f.py',
  ):
    assert asyncio.run(run(command)) == 0.0, command


def test_tools():
  """A text is replaced if it occurs once; errors are observations; tests show one."""
  task = a_task()
  wrong, right = task.bug.step.code, task.program.steps[task.bug.index].code

  async def run():
    async with task.open(backend=BACKEND, limits=LIMITS) as environment:
      execute = environment.execute
      assert await execute('read', {}) == task.broken.rstrip()
      assert 'should be' in await execute('test', {})
      for arguments, message in (
        ({'old': 'a', 'new': 'b'}, 'not once'),
        ({'old': '', 'new': 'b'}, '0 times'),
        ({'old': wrong}, 'edit takes new and old'),
        ({'old': wrong, 'new': 3}, 'edit takes'),
        ({'old': wrong, 'new': 'x' * 5000}, 'above'),
      ):
        with pytest.raises(tasks.BadCall, match=message):
          await execute('edit', arguments)
      with pytest.raises(tasks.BadCall, match='no tool'):
        await execute('sh', {})
      assert await execute('edit', {'old': wrong, 'new': right}) == 'edited'
      assert await execute('test', {}) == 'ok'
      await execute('edit', {'old': right, 'new': 'raise ValueError("\ud800" * 999)'})
      assert len(await execute('test', {})) <= 120
      return await task.verify(environment, 'fixed')

  assert asyncio.run(run()) == 0.0


@pytest.mark.parametrize('slip', [0.0, 1.0])
def test_the_teacher_succeeds_also_after_a_slip(slip):
  specs = [tasks.spec(CONFIG, 'train', i) for i in range(12)]
  teacher = repair.TeacherConfig(slip=slip)
  options = dict(concurrency=4, backend=BACKEND, limits=LIMITS)
  made = asyncio.run(demonstrations.collect(specs, teacher, **options))
  assert [d.success for d in made] == [1.0] * len(made)
  calls = [sum('tool_calls' in m for m in d.messages) for d in made]
  assert all(
    n <= tasks.make(s).max_tool_calls for n, s in zip(calls, specs, strict=True)
  )
  if slip:
    assert max(calls) == 5 and all(d.mistakes == ['wrong_edit'] for d in made)
  else:
    assert set(calls) == {3}


def test_lessons_end():
  """Also where no other wrong edit shows: there the teacher makes no slip."""
  task = tasks.make('repair/train/steps_3/1000003/1186?3')
  assert 'at most 2, make it at least 7' in task.instruction  # whatever is before
  mistakes = []
  turns = list(repair.lesson(task, repair.TeacherConfig(slip=1.0), mistakes))
  assert [turn.tool for turn in turns][:2] == ['read', 'edit'] and not mistakes


def test_configs_say_what_is_wrong():
  for arguments, message in (
    (dict(steps=(0, 3)), 'steps'),
    (dict(steps=(1, 2), weights={'steps_3': 1.0}), 'weights'),
    (dict(partial_credit=0.5), 'partial_credit'),
  ):
    with pytest.raises(ValueError, match=message):
      repair.Config(**arguments)
  for spec in (
    'repair/train/steps_x/0/0?3',
    'repair/train',
    'repair/train/steps_1/0/0',
  ):
    with pytest.raises(ValueError, match='repair'):
      repair.make(spec)
