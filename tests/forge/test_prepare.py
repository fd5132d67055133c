"""Before the second phase: what a control copies from another run."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from m2jax.agents.agent import AuthorConfig
from m2jax.checkpoint import CheckpointMismatch, MissingCheckpoint
from m2jax.forge import prepare, run
from m2jax.rl.distillation import DistillationConfig
from m2jax.tasks import demonstrations, harbor, mixed
from m2jax.text import tokenizer
from m2jax.train.workdir import open_workdir
from tests.forge import forge_worker


@pytest.fixture
def finished(tmp_path):
  """A run's workdir after SFT, as far as it matters here."""
  workdir = tmp_path / 'run'
  open_workdir(forge_worker.config(), workdir)
  (workdir / 'sft' / '3').mkdir(parents=True)
  (workdir / 'sft' / '3' / 'weights').write_text('w')
  (workdir / 'demonstrations.jsonl').write_text('d')
  (workdir / 'tokenizer.json').write_text('t')
  return workdir


def control(start, **changes):
  return dataclasses.replace(forge_worker.config(), start=str(start), **changes)


def test_a_control_begins_with_the_runs_own_weights(tmp_path, finished):
  """Everything before the second phase is copied, once: the control's own stays."""
  workdir = tmp_path / 'control'
  workdir.mkdir()
  prepare.take_over(control(finished), workdir)
  assert (workdir / 'sft' / '3' / 'weights').read_text() == 'w'
  (finished / 'tokenizer.json').write_text('other')
  prepare.take_over(control(finished), workdir)
  assert (workdir / 'tokenizer.json').read_text() == 't'


def test_other_settings_of_sft_are_named(tmp_path, finished):
  """Weights of another seed or another SFT would be no fair start."""
  with pytest.raises(ValueError, match='another seed'):
    prepare.take_over(control(finished, seed=9), tmp_path)


def test_a_control_may_have_other_numerics(tmp_path, finished):
  """The weights are the same function in both."""
  cfg = dataclasses.replace(forge_worker.config().model, numerics='invariant')
  prepare.take_over(control(finished, model=cfg), tmp_path)
  assert (tmp_path / 'sft' / '3' / 'weights').exists()


def test_controls_may_weigh_domains_otherwise_in_rl(tmp_path):
  """Ratios are of RL only: the weights before it are the same."""
  domains = {name: forge_worker.config().tasks for name in ('a', 'b')}

  def config(**changes):
    tasks = mixed.Config(domains=domains, **changes)
    return dataclasses.replace(forge_worker.config(), tasks=tasks)

  other = tmp_path / 'run'
  open_workdir(config(ratios={'a': (1.0, 2.0)}, stages=(9,)), other)
  alone, shares = config(ratios={'b': (0.0,)}), config(demonstrated={'a': 2.0})
  with pytest.raises(FileNotFoundError):  # the settings are right
    prepare.take_over(dataclasses.replace(alone, start=str(other)), tmp_path)
  with pytest.raises(ValueError, match='another tasks'):
    prepare.take_over(dataclasses.replace(shares, start=str(other)), tmp_path)


@pytest.mark.parametrize('missing', ['dev', 'held_out'])
def test_a_split_without_tasks_ends_the_run_before_it_begins(tmp_path, missing):
  """Not after SFT, when it is evaluated on for the first time."""
  toy = harbor.Draft(
    'one',
    'Do it.',
    harbor.Metadata('toy', 'sum'),
    tests={'test.sh': b''},
    solution={'solve.sh': b''},
  )
  for split in {'train', 'dev', 'held_out'} - {missing}:
    harbor.write(toy, tmp_path / 'made' / 'tasks' / split)
  made = harbor.Config(dataset=str(tmp_path / 'made'))
  config = dataclasses.replace(
    forge_worker.config(), tasks=made, dev_tasks=2, eval_tasks=2
  )
  with pytest.raises(ValueError, match=rf'no task in tasks/{missing}/'):
    run.run(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_evaluations_refuse_partial_credit():
  """Set on the tasks it would raise every success; RL has its own field."""
  tasks = dataclasses.replace(forge_worker.config().tasks, partial_credit=0.5)
  with pytest.raises(ValueError, match='rl.partial_credit'):
    dataclasses.replace(forge_worker.config(), tasks=tasks)


def test_a_run_before_its_sft_is_named(tmp_path, finished):
  """The message names what is missing, and that SFT has to be finished."""
  (finished / 'demonstrations.jsonl').unlink()
  with pytest.raises(FileNotFoundError, match='demonstrations.jsonl'):
    prepare.take_over(control(finished), tmp_path)


@pytest.fixture
def with_chats(tmp_path):
  """A config whose SFT learns from recorded chats, and how to write them."""

  def write(*tasks):
    chats = [
      {
        'task': task,
        'messages': [
          {'role': 'system', 'content': 'Another scaffold.'},
          {'role': 'user', 'content': f'task {number}'},
          {'role': 'assistant', 'content': 'done', 'reasoning_content': 'why'},
        ],
      }
      for number, task in enumerate(tasks)
    ]
    path = tmp_path / 'verified.jsonl'
    path.write_text('\n'.join(map(json.dumps, chats)))
    config = forge_worker.config()
    sft = dataclasses.replace(config.sft, recorded=str(path), demonstrations=2)
    return dataclasses.replace(config, sft=sft, teacher=None)

  return write


def test_recorded_chats_take_the_teachers_place(tmp_path, with_chats):
  """As they are: neither the agent's system prompt nor its tools are added."""
  config = with_chats(*['terminal/train/steps_1/0/0'] * 3)
  demos = prepare.make_demonstrations(config, tmp_path / 'demonstrations.jsonl')
  assert len(demos) == 2 and {demo.success for demo in demos} == {1.0}
  (chat, _) = prepare.chats(config, demos)
  assert chat.text().count('Another scaffold.') == 1
  assert config.episodes.agent.system not in chat.text()
  (tmp_path / 'verified.jsonl').unlink()  # the run keeps its own copy
  again = prepare.make_demonstrations(config, tmp_path / 'demonstrations.jsonl')
  assert again == demos


def test_recorded_chats_of_other_splits_are_refused(with_chats):
  config = with_chats('terminal/train/steps_1/0/0', 'terminal/held_out/steps_1/0/0')
  with pytest.raises(ValueError, match=r'line 2.*held_out'):
    prepare.recorded(config)


def test_recorded_calls_of_a_judge_are_not_learned(tmp_path, with_chats):
  """They count towards no limit, either."""
  config = with_chats(*['terminal/train/steps_1/0/0'] * 3)
  path = tmp_path / 'verified.jsonl'
  first, *rest = map(json.loads, path.read_text().splitlines())
  marked = [first | {'training': False}, *rest]
  path.write_text('\n'.join(map(json.dumps, marked)))
  found = prepare.recorded(config)
  assert [demo.messages[1]['content'] for demo in found] == ['task 1', 'task 2']


def test_a_run_needs_demonstrations_from_somewhere():
  with pytest.raises(ValueError, match=r'sft\.recorded'):
    dataclasses.replace(forge_worker.config(), teacher=None)


@pytest.mark.parametrize('author', [None, AuthorConfig()])
def test_an_agent_whose_demonstrations_all_fail(tmp_path, monkeypatch, author):
  """The message says so, with the likely cause, and nothing is stored to be reused."""
  config = forge_worker.config()
  agent = SimpleNamespace(author=author)
  episodes = dataclasses.replace(config.episodes)
  object.__setattr__(episodes, 'agent', agent)
  config = dataclasses.replace(config)
  object.__setattr__(config, 'episodes', episodes)

  async def collect(specs, *args, **kwargs):
    return [demonstrations.Demonstration(spec, [], [], 0.0) for spec in specs]

  monkeypatch.setattr(demonstrations, 'collect', collect)
  monkeypatch.setattr(prepare.authored, 'collect', collect)
  hint = 'author.rename' if author else 'its task$'
  with pytest.raises(ValueError, match=f'none of .* demonstrations .*{hint}'):
    prepare.make_demonstrations(config, tmp_path / 'd')
  assert not (tmp_path / 'd').exists()


def test_teachers_have_the_runs_tokens(tmp_path):
  """Where one is not there or has other tokens, the message names it."""
  (tmp_path / 'model.safetensors').touch()  # makes it one in the released format
  own = tokenizer.train(['a plain text'], 400)
  config = forge_worker.config()

  def check(**teachers):
    how = DistillationConfig(**teachers)
    learner = dataclasses.replace(config.rl.learner, distillation=how)
    rl = dataclasses.replace(config.rl, learner=learner)
    prepare.check_teachers(dataclasses.replace(config, rl=rl), own)

  check()
  own.save(tmp_path / 'tokenizer.json')
  check(teacher=str(tmp_path))
  tokenizer.train(['other words ' * 50], 401).save(tmp_path / 'tokenizer.json')
  with pytest.raises(CheckpointMismatch, match=f'{tmp_path} has other tokens'):
    check(teachers={'shell': str(tmp_path)})
  with pytest.raises(MissingCheckpoint, match='no checkpoint: .*nowhere'):
    check(teacher=str(tmp_path / 'nowhere'))
