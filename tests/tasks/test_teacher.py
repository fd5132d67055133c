"""The teacher: correct without mistakes, and wrong in known ways with them."""

import asyncio
import collections
import contextlib
import itertools
import json

import pytest

from m2jax import sandbox, tasks
from m2jax.tasks import demonstrations, lookup, terminal
from m2jax.tasks.terminal import shell, teacher
from m2jax.text import chat
from tests.tasks import local_shell

FAMILIES = sorted(terminal.FAMILIES)
SKIPPED = {'skipped_step'}  # another step then comes first
PERFECT = teacher.TeacherConfig(scale=0.0)


def tasks_of(family, count, **options):
  specs = (
    terminal.spec(split, i, 5, family=family, **options)
    for i, split in zip(range(count), itertools.cycle(terminal.SPLITS), strict=False)
  )
  return [terminal.make(spec) for spec in specs]


def demonstrate(task, config, open_workspace=local_shell.workspace, attempt=0):
  async def run():
    async with open_workspace(task) as environment:
      return await teacher.demonstrate(task, environment, config, attempt)

  return asyncio.run(run())


def demonstrations_of(family, count):
  return [demonstrate(t, teacher.TeacherConfig()) for t in tasks_of(family, count)]


def success_rate(demos):
  return sum(demo.success for demo in demos) / len(demos)


def commands(demo):
  return [
    json.loads(call['function']['arguments'])
    for message in demo.messages
    for call in message.get('tool_calls', ())
  ]


@pytest.mark.parametrize('family', FAMILIES)
def test_perfect_teacher_solves_every_task_by_real_commands(family):
  """Every task is solved in `baseline_calls` calls by short commands and thoughts."""
  for task in tasks_of(family, 6):
    demo = demonstrate(task, PERFECT)
    assert demo.success == 1.0, (task.spec, demo.messages)
    assert demo.mistakes == []
    calls = commands(demo)
    assert len(calls) == task.baseline_calls
    assert all(len(call[shell.ARGUMENT]) <= 80 for call in calls)
    for message in demo.messages:
      if message['role'] == 'assistant':
        assert 1 <= len(message['reasoning_content'].split()) <= 18
      elif message['role'] == 'tool':
        assert len(message['content']) <= 120


@pytest.mark.parametrize('family', FAMILIES)
def test_each_mistake_is_a_mistake(family):
  """A mistake without effect would make the configured rates meaningless."""
  for kind in terminal.FAMILIES[family].mistakes:
    config = teacher.TeacherConfig(rates={family: {kind: 1.0}}, malformed_call=0.0)
    demos, made = [], []
    for task in tasks_of(family, 40):
      demos.append(demonstrate(task, config))
      made += [demo.success for demo in demos[-1:] if demo.mistakes]
      if len(made) == 6:
        break
    assert made, f'{kind} never came up'
    assert sum(made) <= 0.25 * len(made), f'{kind} often does no harm'
    spared = [demo.success for demo in demos if not demo.mistakes]
    assert all(spared), f'{kind} harms where it was not made'


def test_default_teacher_rarely_errs_at_steps():
  """The main job's demonstrations have plausible mistakes at low rates."""
  assert 0.8 <= success_rate(demonstrations_of('steps_2', 60)) < 1.0


def test_mistakes_do_not_show_in_the_words():
  """The text of a wrong demonstration does not mark the mistake."""
  thoughts = collections.defaultdict(set)
  rates = {
    family: dict.fromkeys(set(of) - SKIPPED, 1.0)
    for family, of in teacher.RATES.items()
  }
  wrong = teacher.TeacherConfig(rates=rates, malformed_call=0.0)
  for config, name in ((PERFECT, 'right'), (wrong, 'wrong')):
    for family in FAMILIES:
      for task in tasks_of(family, 2):
        demo = demonstrate(task, config)
        first = demo.messages[1]['reasoning_content']
        thoughts[name].add((family, first))
  assert len(thoughts['wrong'] - thoughts['right']) <= 1  # after a skipped step


def test_malformed_call_is_answered_and_made_good():
  """A malformed call uses one spare call, and the demonstration continues."""
  config = teacher.TeacherConfig(malformed_call=1.0, rates={})
  for family in ('steps_1', 'dead_end'):
    for task in tasks_of(family, 4):
      demo = demonstrate(task, config)
      assert demo.success == 1.0 and demo.mistakes == ['malformed_call']
      assert demo.messages[2]['content'].startswith('error: sh takes')
      assert len(commands(demo)) == task.baseline_calls + 1 <= task.max_tool_calls
  strict = tasks_of('steps_1', 2, config=terminal.TerminalConfig(spare_calls=0))
  assert all(demonstrate(task, config).mistakes == [] for task in strict)


def test_looks_cost_spare_calls_and_change_nothing():
  """The teacher lists files while calls are left, and otherwise acts the same."""
  config = teacher.TeacherConfig(malformed_call=0.0, rates={}, looks=1.0)
  for spare in (0, 1, 2):
    settings = terminal.TerminalConfig(spare_calls=spare)
    for task in tasks_of('steps_3', 6, config=settings):
      demo, plain = demonstrate(task, config), demonstrate(task, PERFECT)
      done = [call[shell.ARGUMENT] for call in commands(demo)]
      assert done.count('ls') == spare and demo.success == 1.0
      without = [command for command in done if command != 'ls']
      assert without == [call[shell.ARGUMENT] for call in commands(plain)]


def test_demonstrations_are_repeatable_and_attempts_differ():
  """The SFT set is a function of config and specs; another attempt errs elsewhere."""
  tasks = [task for family in FAMILIES for task in tasks_of(family, 1)]
  once, again, other = (
    [demonstrate(task, teacher.TeacherConfig(), attempt=attempt) for task in tasks]
    for attempt in (0, 0, 1)
  )
  assert once == again
  assert [demo.mistakes for demo in once] != [demo.mistakes for demo in other]


def test_demonstrations_render_in_the_chat_template():
  """SFT reads them through M2's template, thinking and tool calls included."""
  for family in ('steps_1', 'trail'):
    task = tasks_of(family, 1)[0]
    demo = demonstrate(task, PERFECT)
    text = chat.render(demo.messages, [shell.TOOL])
    assert task.instruction in text
    for arguments in commands(demo):
      assert f'<parameter name="cmd">{arguments["cmd"]}</parameter>' in text
    assert demo.messages[-1]['content'] in text.rpartition('</think>')[2]


@pytest.mark.parametrize(
  'rates', [{'sing': {}}, {'trail': {'sang': 0.1}}, {'trail': {'clobber': 1.5}}]
)
def test_bad_rates_are_named(rates):
  """A misspelt family or kind would otherwise silently lower the rate of mistakes."""
  with pytest.raises(ValueError, match='sing|sang|clobber'):
    teacher.TeacherConfig(rates=rates)


def test_families_work_in_the_real_sandbox():
  """The commands work in the real sandbox, whose workspace is judged."""

  async def run():
    failed = []
    for family in FAMILIES:
      for task in tasks_of(family, 1):
        async with task.open(**local_shell.SANDBOX) as environment:
          demo = await teacher.demonstrate(task, environment, PERFECT)
          if demo.success != 1.0:
            failed.append((task.spec, demo.messages))
    await sandbox.shutdown()
    return failed

  assert asyncio.run(run()) == []


@pytest.mark.parametrize('failures', [2, 3])
def test_a_failing_machine_costs_no_demonstration(monkeypatch, failures):
  """A lost sandbox is tried again, thrice in all: one
  failure would end a run of thousands."""
  spec = tasks.spec(lookup.Config(), 'train', 0)
  left = [failures]

  @contextlib.asynccontextmanager
  async def opened(self, **options):
    left[0] -= 1
    if left[0] >= 0:
      raise sandbox.SandboxError('lost')
    async with whole(self) as environment:
      yield environment

  whole = lookup.Lookup.open
  monkeypatch.setattr(lookup.Lookup, 'open', opened)
  collected = demonstrations.collect([spec], lookup.TeacherConfig())
  if failures == 3:
    with pytest.raises(sandbox.SandboxError, match='lost'):
      asyncio.run(collected)
  else:
    assert asyncio.run(collected)[0].success == 1.0
