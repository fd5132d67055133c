"""Tasks and agents from outside the package: executes the pages that explain them."""

import asyncio
import dataclasses
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import common
from m2jax import kinds, tasks
from m2jax.agents import episodes
from m2jax.data import chats
from m2jax.forge.config import ForgeConfig
from m2jax.rl import rewards
from m2jax.tasks import demonstrations
from tests.gateway.conftest import response_text

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope='module')
def mylab(tmp_path_factory):
  """The package `mylab` of the pages, importable."""
  folder = tmp_path_factory.mktemp('lab') / 'mylab'
  folder.mkdir()
  for page in ('add_a_task', 'add_an_agent', 'add_a_reward'):
    text = (ROOT / 'docs' / f'{page}.md').read_text()
    for code in re.findall(r'```python\n(.*?)```', text, re.DOTALL):
      name = re.match(r'# mylab/(\w+\.py)', code)[1]
      with (folder / name).open('a') as file:
        file.write(code)
  sys.path.insert(0, str(folder.parent))
  yield folder
  sys.path.remove(str(folder.parent))


def values_of(mylab):
  return runpy.run_path(str(mylab / 'sums_config.py'))['get_config']('smoke')


def config(mylab, **agent):
  values = values_of(mylab)
  values.episodes.agent = agent
  return common.build(ForgeConfig, values)


def reader(tok):
  """A policy that makes a bad call, reads both numbers, and answers with the sum."""

  def policy(request):
    prompt = tok.decode(request.prompt_ids)
    seen = re.findall('<response>(.*?)</response>', prompt, re.DOTALL)
    numbers = [s for s in seen if s.isdigit()]
    if not seen:
      return tok.encode(response_text('try', calls=[('read', {'name': 'c'})]))
    if len(numbers) < 2:
      name = 'ab'[len(numbers)]
      return tok.encode(response_text('read', calls=[('read', {'name': name})]))
    return tok.encode(response_text('add', str(sum(map(int, numbers)))))

  return policy


@pytest.mark.parametrize(
  'agent, success',
  [
    (dict(kind='mylab.chatter'), 1.0),
    (dict(kind='mylab.careful', price=0.25), 0.75),
    (dict(kind='whitebox'), 1.0),
  ],
)
def test_an_agent_from_outside_solves_a_task_from_outside(
  mylab, serve, tok, agent, success
):
  """Only the config names both."""
  made = config(mylab, **agent)
  specs = [tasks.spec(made.tasks, 'held_out', i) for i in range(3)]
  assert len(set(specs)) == 3
  gateway, _, records = serve(reader(tok))
  with episodes.Runner(made.episodes, gateway.base_url, gateway.sessions) as runner:
    out = episodes.evaluate(runner, specs)
  for trajectory in out:
    assert (trajectory.end_reason, trajectory.success) == ('answer', success), (
      trajectory
    )
    assert (trajectory.tool_calls, trajectory.tool_errors) == (2, 1)
    assert trajectory.family == 'two_numbers'
  by_session = [[r for r in records if r.session == t.session] for t in out]
  for completions in by_session:  # one chain of recorded ids: nothing is retokenised
    assert [c.parent for c in completions[1:]] == [c.id for c in completions[:-1]]
    assert len(completions) == 4


def run(made, gateway, specs, **options):
  """The trajectories of a group of each spec."""
  with episodes.Runner(made.episodes, gateway.base_url, gateway.sessions) as runner:
    return [runner.group(spec, 1, **options).result(30)[0] for spec in specs]


def test_an_environment_pays_turns(mylab, serve, tok):
  """Each completion has what its turn earned, and credit by turn."""
  made = config(mylab, kind='whitebox')
  spec = tasks.spec(importlib.import_module('mylab.paid').Config(), 'train', 0)
  gateway, _, records = serve(reader(tok))
  [trajectory] = run(made, gateway, [spec], item=0)
  assert trajectory.success == 1.0
  assert [trajectory.rewards[c.id] for c in records] == [0.0, 0.1, 0.1, 0.0]
  group = [
    (trajectory, records),
    (dataclasses.replace(trajectory, rewards={}), records),
  ]
  credit = rewards.advantages(group, rewards.RewardConfig(alpha=0.0))
  np.testing.assert_allclose(credit.credits[0].advantages, [0.1, 0.1, 0.05, 0.0])


def install(folder, name, **groups):
  """Writes the metadata of an installed distribution with entry points."""
  facts = folder / f'{name}-1.0.dist-info'
  facts.mkdir(parents=True)
  (facts / 'METADATA').write_text(f'Name: {name}\nVersion: 1.0\n')
  sections = [f'[m2jax.{group}]\n{lines}\n' for group, lines in groups.items()]
  (facts / 'entry_points.txt').write_text('\n'.join(sections))


def test_an_installed_package_names_its_kinds(mylab, serve, tok, tmp_path, monkeypatch):
  """Entry points give a kind of tasks and a kind of agents names without a dot."""
  install(tmp_path, 'mylab', tasks='sums = mylab.sums', agents='chat = mylab.chatter')
  monkeypatch.syspath_prepend(tmp_path)
  values = values_of(mylab)
  values.tasks.kind = values.teacher.kind = 'sums'
  values.episodes.agent = dict(kind='chat')
  made = common.build(ForgeConfig, values)
  spec = tasks.spec(made.tasks, 'train', 0)
  assert spec.startswith('sums/train/')
  gateway, _, _ = serve(reader(tok))
  assert run(made, gateway, [spec])[0].success == 1.0
  collected = demonstrations.collect([spec], made.teacher, backend='', limits=None)
  assert asyncio.run(collected)[0].success == 1.0


def test_two_packages_that_give_one_name_are_named(mylab, tmp_path, monkeypatch):
  """Which of them is meant is not decided by the order of the path."""
  for name in ('one', 'two'):
    install(tmp_path, name, tasks=f'twice = mylab.{name}')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match='kind=.twice.: several .*mylab.one, mylab.two'):
    tasks.make('twice/train/0')


@pytest.mark.parametrize('verdict', [float('nan'), 1.5, -1.0])
def test_a_verdict_out_of_range_names_the_task(mylab, serve, tok, monkeypatch, verdict):
  """In process as over HTTP: no such value reaches an average."""

  async def verify(self, environment, answer):
    return verdict

  made = config(mylab, kind='whitebox')
  monkeypatch.setattr(importlib.import_module('mylab.sums').Sum, 'verify', verify)
  spec = tasks.spec(made.tasks, 'train', 0)
  gateway, _, _ = serve(reader(tok))
  with pytest.raises(ExceptionGroup) as failed:
    run(made, gateway, [spec])
  [error] = failed.value.exceptions
  assert str(error).startswith(f'task {spec}: the verdict is {verdict}')


def test_demonstrations_from_outside_are_chats(mylab, tmp_path):
  """SFT reads the demonstrations of a new kind's teacher."""
  made = config(mylab, kind='whitebox')
  specs = [tasks.spec(made.tasks, 'train', i) for i in range(4)]
  path = tmp_path / 'demonstrations.jsonl'
  collected = asyncio.run(
    demonstrations.collect(specs, made.teacher, backend='', limits=None)
  )
  demonstrations.write(path, collected)
  assert [d.task for d in demonstrations.read(path)] == specs
  assert all(d.success == 1.0 for d in demonstrations.read(path))
  assert [chat.tools[0]['function']['name'] for chat in chats.read(path)] == [
    'read'
  ] * 4


@pytest.mark.parametrize(
  'field, kind, said',
  [
    (
      'tasks',
      'terminals',
      r'tasks.kind=.terminals.: no module m2jax.tasks.terminals; .*\(harbor, terminal\)'
      r', an entry point of the group m2jax.tasks \(bfcl, clicks, .*, verifiers\)',
    ),
    ('tasks', 'mylab.nothing', 'tasks.kind=.mylab.nothing.: no module'),
    ('teacher', 'mylab.chatter', 'teacher.kind=.mylab.chatter.: .* has no teacher'),
  ],
)
def test_a_kind_that_is_not_there_is_named(mylab, field, kind, said):
  """A misspelt kind gives a one-line error with the field and the choices."""
  values = values_of(mylab).to_dict()
  values[field] = {'kind': kind}
  with pytest.raises(common.BadInput, match=said):
    common.build(ForgeConfig, values)


@pytest.mark.parametrize(
  'package, some',
  [('m2jax.agents', 'blackbox, mixed, perturbed, whitebox')]
  + [('m2jax.evolve.proposers', 'analyst, .*scripted, tpe')],
)
def test_the_choices_are_the_kinds_of_the_package(package, some):
  with pytest.raises(ValueError, match=rf'expected a module of {package} \({some}\)'):
    kinds.module(package, 'nothing')
  for name in importlib.import_module(package).KINDS:
    assert hasattr(kinds.module(package, name), 'make')


@pytest.mark.long
def test_the_main_job_learns_on_them(mylab, tmp_path):
  """`experiments.forge` runs every phase with the page's config, an external agent and
  a flag of the external task."""
  path = mylab / 'both_config.py'
  path.write_text(
    'from experiments import fields\n'
    'from m2jax.forge.config import ForgeConfig\n'
    'from mylab import sums_config\n\n\n'
    "def get_config(variant=''):\n"
    '  c = sums_config.get_config(variant)\n'
    "  c.episodes.agent = dict(kind='mylab.chatter', max_tokens=16)\n"
    '  return fields.complete(c, ForgeConfig)\n'
  )
  command = [sys.executable, '-m', 'experiments.forge', f'--config={path}:smoke']
  command += [f'--workdir={tmp_path / "run"}', '--config.tasks.most=60']
  environment = os.environ | {'PYTHONPATH': f'{mylab.parent}:{ROOT}'}
  done = subprocess.run(
    command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert 'after RL' in done.stdout
  report = (tmp_path / 'run' / 'report.html').read_text()
  assert 'two_numbers' in report
