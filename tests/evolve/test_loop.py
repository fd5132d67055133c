"""The loop with a simulated policy: rounds, kills, replay, baits, splits."""

import json
import re

import pytest

from m2jax.evolve import lineage, loop, proposers, record, scaffold
from m2jax.evolve.archive import ArchiveConfig
from m2jax.evolve.budget import BudgetConfig
from m2jax.evolve.evaluator import Result
from m2jax.evolve.gate import GateConfig
from m2jax.evolve.proposers import random_search, same
from m2jax.evolve.scaffold import Scaffold
from m2jax.evolve.trees import Trees
from tests import processes
from tests.evolve import simulated
from tests.evolve.simulated import BEST, BETTER, START, WORSE


def lines_of(workdir):
  return record.read(workdir / record.FILE_NAME)


def ran(workdir, proposer, rounds=5, **options):
  made = simulated.make(workdir, proposer, rounds, **options)
  try:
    return made.run()
  finally:
    made.close()


def decisions(state):
  return [attempt.decision for attempt in state.attempts[1:]]


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """(workdir, state) of a lineage with two keeps."""
  workdir = tmp_path_factory.mktemp('evolve')
  return workdir, ran(workdir, simulated.script(WORSE, BETTER, {}, BEST), 4)


def test_a_lineage_keeps_what_is_better(finished):
  workdir, state = finished
  assert decisions(state) == ['revert', 'keep', 'reject', 'keep']
  assert state.attempts[3].reason == 'duplicate: the scaffold of round 2'
  assert state.stopped == 'rounds: 4 of 4'
  best = state.nodes[state.incumbent].scaffold
  assert best == START.changed(BETTER | BEST)
  means = state.sealed['means']
  assert means['incumbent'] > means['start'] + 0.2 and state.sealed['low'] > 0
  refs = Trees(workdir)._git('for-each-ref', '--format=%(refname)').split()
  assert refs == ['refs/heads/main', *(f'refs/nodes/{n}' for n in (0, 1, 2, 4))]
  shown = Trees(workdir)._git('show', 'main:scaffold.json')
  assert json.loads(shown) == json.loads(best.files()[scaffold.JSON])


def test_the_second_and_third_splits_are_outside_the_rounds(finished):
  """Scores on them are of the start and of keeps only, and no view has them."""
  workdir, state = finished
  seconds = [line['round'] for line in lines_of(workdir) if line['kind'] == 'second']
  assert seconds == [0, 2, 4]
  for line in lines_of(workdir):
    if line['kind'] == 'look':
      assert all(spec.startswith('dev/') for spec, *_ in line['pairs'])
  seen = repr(state.view(5, 4))
  assert not re.search(r'(second|sealed|dev)/\d', seen)


def test_the_third_split_is_opened_once(tmp_path):
  evaluator = simulated.Evaluator()
  ran(tmp_path, simulated.script(BETTER), 1, evaluator=evaluator)
  opened = sum(spec.startswith('sealed/') for spec, _ in evaluator.asked)
  again = ran(tmp_path, simulated.script(BETTER), 1, evaluator=evaluator)
  assert again.sealed is not None
  assert sum(spec.startswith('sealed/') for spec, _ in evaluator.asked) == opened
  # A second opening: the record is cut to before it, and continued to another end.
  path = tmp_path / record.FILE_NAME
  kept = path.read_text().splitlines(keepends=True)
  path.write_text(''.join(line for line in kept if '"kind":"baseline"' in line[:40] or
    '"kind":"begin"' in line[:40]))  # fmt: skip
  with pytest.raises(loop.AlreadyOpened, match=r'sealed\.opened'):
    ran(tmp_path, simulated.script(WORSE), 1, evaluator=evaluator)
  assert sum(spec.startswith('sealed/') for spec, _ in evaluator.asked) == opened


def test_pairs_have_the_same_tasks_and_seeds(tmp_path):
  """And each round measures its incumbent again, on new draws."""
  evaluator = simulated.Evaluator()
  ran(tmp_path, simulated.script(WORSE, BETTER), 2, evaluator=evaluator)
  looks = [line for line in lines_of(tmp_path) if line['kind'] == 'look']
  drawn = {line['round']: line['pairs'] for line in looks if line['look'] == 0}
  assert [pair[:2] for pair in drawn[1]] != [pair[:2] for pair in drawn[2]]
  for pairs in drawn.values():
    asked = [(spec, seed) for spec, seed, *_ in pairs]
    where = evaluator.asked.index(asked[0])
    assert evaluator.asked[where : where + 32] == asked * 2


def test_replay_makes_the_same_decisions(finished):
  workdir, _ = finished
  assert list(lineage.replay(lines_of(workdir))) == []


FORGERIES = {
  'decision': lambda line: line.update(decision='keep'),
  'look': lambda line: line['pairs'][0].__setitem__(1, 7),
  'proposal': lambda line: line.update(parent=1),
  'stop': lambda line: line.update(reason='tired'),
  'checked': lambda line: line.update(problems=['x']),
}


@pytest.mark.parametrize('kind', FORGERIES)
def test_replay_finds_a_decision_that_does_not_follow(finished, kind):
  lines = lines_of(finished[0])
  [first, *_] = [line for line in lines if line['kind'] == kind]
  FORGERIES[kind](first)
  if kind == 'proposal':  # its other lines then have no such parent
    lines = lines[: lines.index(first) + 1]
  assert any(f'{kind}.' in text for text in lineage.replay(lines))


def test_replay_finds_scores_that_give_another_decision(finished):
  lines = lines_of(finished[0])
  for line in lines:
    if line['kind'] == 'look' and line['round'] == 2:
      line['pairs'] = [[*pair[:3], pair[2]] for pair in line['pairs']]
  assert 'round 2, decision.decision' in next(lineage.replay(lines))


@pytest.mark.parametrize(
  ('rounds', 'stride'), [(2, 9), pytest.param(4, 1, marks=pytest.mark.thorough)]
)
def test_a_kill_anywhere_changes_nothing(tmp_path, rounds, stride):
  """SIGKILL before, within and after each line, and at git commands; then resumed."""
  given = str(tmp_path), str(rounds), str(stride)
  done = processes.run('tests.evolve.kills', *given, timeout_s=900)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert len(found) > 6 and all(found.values()), found


BAITS = [
  ({'seed': 7}, 'no field'),
  ({'sampling.seed': 7}, 'no field'),
  ({'max_turns': 99}, 'no field'),
  ({'max_tokens': 4096}, r'must be in \[16, 192\]'),
  ({'retry.length': 400}, 'must be in'),
  ({'../../evaluator.py': 'def run(*a): return 1'}, 'no field'),
  (
    {'rules': 'def act(e):\n  return {"message": open("/answers.json").read()}'},
    'open',
  ),
  ({'rules': 'from m2jax.evolve import evaluator\ndef act(e): pass'}, 'import of'),
  ({'sampling.temperature': float('nan')}, 'no JSON'),
  ({'system': 'x' * 100_000}, 'changes of'),
]


def test_baits_are_rejected_and_recorded(tmp_path):
  """A seed, an effort knob, an answer, an evaluator: none gets an evaluation."""
  script = simulated.script(*(changes for changes, _ in BAITS))
  evaluator = simulated.Evaluator()
  bounds = (('max_tokens', 16, 192),)
  budget = BudgetConfig(rounds=len(BAITS), failures=0)
  state = ran(
    tmp_path, script, evaluator=evaluator, bounds=bounds, budget=budget,
  )  # fmt: skip
  assert decisions(state) == ['reject'] * len(BAITS)
  for attempt, (_, why) in zip(state.attempts[1:], BAITS, strict=True):
    assert re.search(why, attempt.reason), attempt.reason
  assert state.incumbent == 0 and state.sealed['effect'] == 0
  assert not any(line['kind'] == 'look' for line in lines_of(tmp_path))


def test_effort_gains_nothing(tmp_path):
  """More tokens within the bounds do not buy a keep above the cost ratio."""

  class Effort(simulated.Evaluator):
    def run(self, one, specs, seeds):
      tokens = one.values['max_tokens']
      return [Result(float(tokens > 96), tokens=tokens) for _ in specs]

  script = simulated.script({'max_tokens': 384}, {'max_tokens': 192})
  state = ran(tmp_path, script, 2, evaluator=Effort())
  assert decisions(state) == ['revert', 'keep']
  assert state.attempts[1].reason == 'effort: 4.00 times the tokens of the incumbent'


def test_failures_that_a_candidate_causes_are_no_gain(tmp_path):
  """It breaks the hard attempts: those count as 0 where the incumbent has a score; too
  many of an incumbent end the job."""

  class Breaking(simulated.Evaluator):
    def run(self, one, specs, seeds):
      found = super().run(one, specs, seeds)
      if one.values['system'] is None or len(specs) == 2:  # the smoke phase
        return found
      return [r if r.score else Result(None, 'infrastructure') for r in found]

  script = simulated.script({'system': 'x', 'sampling.temperature': 1.5})
  state = ran(tmp_path / 'a', script, 1, evaluator=Breaking())
  assert decisions(state) == ['revert'] and state.attempts[1].effect < -0.1

  class Down(simulated.Evaluator):
    def run(self, one, specs, seeds):
      return [Result(None, 'infrastructure') for _ in specs]

  made = simulated.make(tmp_path / 'b', simulated.script({'system': 'x'}), 1)
  made._baseline()
  made._evaluator = Down()
  made.state.second.add(0)
  with pytest.raises(loop.EvaluationFailed, match='infrastructure'):
    made._look(1, 0, START)


def test_a_candidate_that_fails_the_smoke_phase(tmp_path):
  class Broken(simulated.Evaluator):
    def run(self, one, specs, seeds):
      if one.values['rules']:
        return [Result(0.0, 'rules') for _ in specs]
      return super().run(one, specs, seeds)

  rules = {'rules': 'def act(episode):\n  return 1 / 0\n'}
  state = ran(tmp_path, simulated.script(rules), 1, evaluator=Broken())
  assert state.attempts[1].reason == "2 attempts ended with 'rules'"
  assert list(state.nodes) == [0]


def test_aa_rounds(tmp_path):
  """The candidate is the incumbent, with seeds of its own: the scores differ, and a
  generous gate keeps some; the default one of a lineage does not."""
  archive = ArchiveConfig('incumbent', allow_duplicates=True)
  options = dict(archive=archive, paired_seeds=False)
  gate = GateConfig(alpha=0.99, looks=(16,), min_effect=0.0)
  proposer = same.make(same.Config())
  loose = ran(tmp_path / 'a', proposer, 3, gate=gate, **options)
  assert decisions(loose).count('keep') >= 1
  assert all(a.effect != 0 for a in loose.attempts[1:])
  assert 'keep' not in decisions(ran(tmp_path / 'b', proposer, 3, **options))


def test_random_search_under_every_rule_of_the_parent(tmp_path):
  for method in ('clade', 'dgm', 'best'):
    proposer = random_search.make(random_search.Config())
    archive = ArchiveConfig(method)
    state = ran(tmp_path / method, proposer, 4, archive=archive, seed=3)
    assert state.rounds == 4
    assert list(lineage.replay(lines_of(tmp_path / method))) == []


def test_budgets_stop_between_rounds(tmp_path):
  budget = BudgetConfig(rounds=9, failures=2)
  state = ran(tmp_path, simulated.script(WORSE, {'x': 1}, {'y': 1}), 9, budget=budget)
  assert state.rounds == 3 and state.stopped.startswith('failures: 2')


def test_a_record_of_other_settings_or_damaged_is_refused(tmp_path):
  ran(tmp_path, simulated.script(), 1, budget=BudgetConfig(1, failures=1))
  with pytest.raises(ValueError, match='other config'):
    simulated.make(tmp_path, simulated.script(), 2)
  path = tmp_path / record.FILE_NAME
  text = path.read_text()
  path.write_text(text + '{"schema": 1, "kind')  # torn: removed
  assert len(record.read(path)) == len(text.splitlines())
  path.write_text(text.replace('"kind":"baseline"', '"kind":"new"'))
  with pytest.raises(record.DamagedRecord, match='line 2'):
    simulated.make(tmp_path, simulated.script(), 1)


def test_a_start_outside_the_bounds_is_refused(tmp_path):
  with pytest.raises(scaffold.InvalidScaffold, match='start: max_tokens=96'):
    simulated.make(tmp_path, simulated.script(), bounds=(('max_tokens', 1, 64),))


def test_a_file_in_the_worktree_that_is_no_scaffold_is_refused(tmp_path, monkeypatch):
  """What is evaluated is read from the folder, which has nothing else."""
  write = Scaffold.write

  def more(self, folder):
    write(self, folder)
    if 'rounds' in folder.parts and folder.name == '1':
      (folder / 'evaluator.py').write_text('x')

  monkeypatch.setattr(Scaffold, 'write', more)
  with pytest.raises(scaffold.InvalidScaffold, match=r'evaluator\.py'):
    ran(tmp_path, simulated.script(BETTER), 1)


def test_hooks_and_settings_of_the_user_are_not_used(tmp_path, monkeypatch):
  home = tmp_path / 'home'
  home.mkdir()
  (home / '.gitconfig').write_text('[core]\n  hooksPath = /nowhere\n[user')  # broken
  monkeypatch.setenv('HOME', str(home))
  monkeypatch.setenv('GIT_DIR', str(tmp_path / 'elsewhere'))
  repository = Trees(tmp_path / 'run')
  repository.repair({0: (START, None)}, 0)
  assert repository._git('show', '-s', '--format=%an', 'main') == 'm2jax'


def test_a_proposer_that_fails_is_a_round(tmp_path):
  class Silent:
    def propose(self, view):
      raise proposers.ProposerFailed('no answer')

  state = ran(tmp_path, Silent(), 9, budget=BudgetConfig(9, failures=2))
  assert [a.reason for a in state.attempts[1:]] == ['no answer'] * 2
