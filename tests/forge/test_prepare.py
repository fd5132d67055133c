"""Before the second phase: what a control copies from another run."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from m2jax.agents.agent import AuthorConfig
from m2jax.forge import prepare
from m2jax.tasks import demonstrations
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
